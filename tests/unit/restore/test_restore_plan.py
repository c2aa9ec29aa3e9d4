"""The plan of a restore: a pure function of manifest, host and options."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, ProcessRecord, SessionRef
from criuctl.config import Config
from criuctl.connections.rule_parsing import parse
from criuctl.files.socket_names import TakenName
from criuctl.namespaces.interfaces import BoundSocket
from criuctl.namespaces.network_choice import Place
from criuctl.restore.host_facts import HostFacts, PlanOptions
from criuctl.restore.observe import observe
from criuctl.restore.plan import RestorePlan, make_plan

FLAGS = ("avx2", "sse2")
CONNECTION = ConnectionRecord(
    pid=100,
    fd=5,
    family="inet",
    protocol="tcp",
    state="established",
    local="10.0.0.1:40000",
    peer="10.0.0.9:80",
    external=True,
)
LISTENER = ConnectionRecord(
    pid=100, fd=3, family="inet", protocol="tcp", state="listen", local="0.0.0.0:80"
)
FOREIGN, FOREIGN6 = "192.0.2.251:80", "[2001:db8::251]:80"
BOUND = ConnectionRecord(
    pid=100, fd=3, family="inet", type="dgram", protocol="udp", state="bound", local="0.0.0.0:80"
)


def manifest(**changes: object) -> Manifest:
    made = Manifest(
        id="0" * 32,
        session=SessionRef("crunch", "1" * 32),
        host=HostInfo(arch="x86_64", cpu_flags=FLAGS, page_size=4096),
        processes=(ProcessRecord(pid=100, ns_pid=100),),
    )
    return made.with_use(**changes)


def facts(**changes: object) -> HostFacts:
    values: dict[str, object] = {
        "kernel_arch": "x86_64",
        "cpu_flags": frozenset(FLAGS),
        "page_size": 4096,
        "taken_pids": (),
        "listening": {},
        "local_addresses": frozenset(),
        "netns": Place("host"),
        "users": frozenset({0}),
        "files": (),
    }
    return HostFacts(**{**values, **changes})  # type: ignore[arg-type]  # spelled out by the tests


def codes(plan: RestorePlan, level: str) -> list[str]:
    return [f.code for f in plan.findings if f.level == level]


def test_the_copies_of_a_group_share_a_network() -> None:
    """Connections among them are kept there, and none leads out of it."""
    linked = replace(CONNECTION, fd=6, linked="db", local="10.0.0.1:41000")
    outside = replace(CONNECTION, policy="reconnect")
    held = manifest(connections=(LISTENER, linked, outside))
    there = facts(netns=Place("shared", "/proc/7/ns/net"))
    options = PlanOptions(copy=True, grouped=True, network="/proc/7/ns/net")
    plan = make_plan(held, there, options)
    assert (plan.net, plan.net_source, plan.pids) == ("shared", "/proc/7/ns/net", "private")
    assert plan.policies == {(100, 6): "keep", (100, 5): "hangup"}
    assert codes(plan, "error") == [] and "netns-new" in codes(plan, "warning")
    alone = make_plan(held, facts(netns=Place("private")), PlanOptions(copy=True, grouped=True))
    assert codes(alone, "error") == ["address"], "the other end is in another network"


def test_nothing_in_the_way() -> None:
    plan = make_plan(manifest(), facts(), PlanOptions())
    assert (plan.pids, plan.net, plan.policies, plan.findings) == ("same", "host", {}, ())


@pytest.mark.parametrize(
    ("wish", "pids", "error"),
    [("auto", "private", []), ("private", "private", []), ("same", "same", ["pids-taken"])],
)
def test_taken_pids(wish: str, pids: str, error: list[str]) -> None:
    plan = make_plan(manifest(), facts(taken_pids=(100,)), PlanOptions(pids=wish))
    assert plan.pids == pids
    assert codes(plan, "error") == error


@pytest.mark.parametrize(
    ("wish", "pids"), [("auto", "private"), ("private", "private"), ("same", "same")]
)
def test_a_tree_with_pids_of_its_own(wish: str, pids: str) -> None:
    """Its PIDs are free here, and do not matter on this host."""
    plan = make_plan(
        manifest(namespaces={"pid": {"mode": "entered", "init": False}}),
        facts(),
        PlanOptions(pids=wish),
    )
    assert (plan.pids, plan.findings) == (pids, ())


@pytest.mark.parametrize(("wish", "error"), [("auto", []), ("private", []), ("same", ["pids"])])
def test_a_root_that_was_pid_1(wish: str, error: list[str]) -> None:
    plan = make_plan(
        manifest(namespaces={"pid": {"mode": "host", "init": True}}),
        facts(),
        PlanOptions(pids=wish),
    )
    assert plan.pids == "init"
    assert codes(plan, "error") == error


@pytest.mark.parametrize(("wish", "error"), [("auto", []), ("private", []), ("same", ["pids"])])
def test_a_tree_whose_network_is_made_again(wish: str, error: list[str]) -> None:
    """Who wants the old PIDs or nothing is not given others because of the network."""
    plan = make_plan(manifest(), facts(netns=Place("private")), PlanOptions(pids=wish))
    assert plan.pids == "private"
    assert codes(plan, "error") == error


@pytest.mark.parametrize("waiting", [LISTENER, BOUND])
def test_a_taken_port_is_an_error_and_gives_a_copy_a_network_of_its_own(
    waiting: ConnectionRecord,
) -> None:
    taken = facts(listening={f"{waiting.protocol} 0.0.0.0:80": ""})
    plan = make_plan(manifest(connections=(waiting,)), taken, PlanOptions())
    assert codes(plan, "error") == ["port-taken"]
    assert (plan.findings[0].pid, plan.findings[0].fd) == (100, 3)
    copy = make_plan(manifest(connections=(waiting,)), taken, PlanOptions(copy=True))
    assert (copy.pids, copy.net) == ("private", "private")
    assert (codes(copy, "error"), codes(copy, "warning")) == ([], ["port-taken"])


def test_a_connection_inside_that_another_tree_has_gives_a_copy_a_network_of_its_own() -> None:
    inside = CONNECTION.with_use(external=False, local="127.0.0.1:40000", peer="127.0.0.1:80")
    taken = facts(open_pairs=frozenset({(inside.local, inside.peer)}))
    assert codes(make_plan(manifest(connections=(inside,)), taken, PlanOptions()), "error") == [
        "port-taken"
    ]
    copy = make_plan(manifest(connections=(inside,)), taken, PlanOptions(copy=True))
    assert (copy.net, codes(copy, "error"), codes(copy, "warning")) == (
        "private",
        [],
        ["port-taken"],
    )
    assert (
        make_plan(manifest(connections=(inside,)), facts(), PlanOptions(copy=True)).findings == ()
    )


@pytest.mark.parametrize(
    ("recorded", "wished", "here", "policy", "errors", "warnings"),
    [
        ("hangup", None, False, "hangup", [], []),
        ("", None, False, "hangup", [], []),
        ("keep", None, True, "keep", [], []),
        ("keep", None, False, "keep", ["address"], []),
        ("keep", "hangup", False, "hangup", [], []),
        ("hangup", "keep", True, "keep", [], []),
        ("refuse", None, True, "refuse", ["connection-refuse"], []),
        ("reconnect", None, True, "reconnect", [], []),
    ],
)
def test_policies(
    recorded: str,
    wished: str | None,
    here: bool,
    policy: str,
    errors: list[str],
    warnings: list[str],
) -> None:
    there = facts(local_addresses=frozenset({CONNECTION.local} if here else ()))
    plan = make_plan(
        manifest(connections=(CONNECTION.with_use(policy=recorded),)),
        there,
        PlanOptions(connections=wished),
    )
    assert plan.policies == {(100, 5): policy}
    assert (codes(plan, "error"), codes(plan, "warning")) == (errors, warnings)


UDP = CONNECTION.with_use(type="dgram", protocol="udp", peer="10.0.0.9:53")
LOG = ConnectionRecord(pid=100, fd=6, family="unix", type="dgram", peer="/run/log", external=True)
BUS = ConnectionRecord(
    pid=100, fd=7, family="unix", type="stream", state="established", peer="/run/bus", external=True
)
JOURNAL = BUS.with_use(
    peer="/run/systemd/journal/stdout", application="journal", policy="reconnect"
)
HERE = frozenset({CONNECTION.local})
OPEN = frozenset({(CONNECTION.local, CONNECTION.peer), (UDP.local, UDP.peer)})


@pytest.mark.parametrize(
    ("record", "wished", "there", "policy", "reason", "errors"),
    [
        (UDP, None, {"local_addresses": HERE}, "keep", "", []),
        (UDP, None, {}, "reconnect", "not an address of this host", []),
        (
            UDP,
            None,
            {"local_addresses": HERE, "open_pairs": OPEN},
            "reconnect",
            "another socket",
            [],
        ),
        (UDP, "keep", {}, "keep", "", ["address"]),
        (LOG, None, {}, "keep", "", []),
        (LOG, None, {"missing_peers": frozenset({"/run/log"})}, "reconnect", "cannot connect", []),
        (LOG.with_use(peer=""), None, {}, "hangup", "no name", []),
        (BUS, "keep", {}, "hangup", "cannot be kept", []),
        (JOURNAL, None, {}, "reconnect", "", []),
        (
            JOURNAL,
            None,
            {"missing_peers": frozenset({JOURNAL.peer})},
            "hangup",
            "no journal here",
            [],
        ),
        (BUS, "reconnect", {}, "reconnect", "", []),
        (BUS.with_use(peer=""), "reconnect", {}, "hangup", "no name", []),
        (CONNECTION.with_use(state="close-wait"), "reconnect", {}, "hangup", "closed", []),
        (CONNECTION.with_use(direction="accepted"), "reconnect", {}, "hangup", "accepted", []),
        (
            CONNECTION,
            "keep",
            {"local_addresses": HERE, "open_pairs": OPEN},
            "keep",
            "",
            ["address-in-use"],
        ),
    ],
)
def test_the_effective_policy_of_a_requested_one(
    record: ConnectionRecord,
    wished: str | None,
    there: dict[str, object],
    policy: str,
    reason: str,
    errors: list[str],
) -> None:
    plan = make_plan(
        manifest(connections=(record,)), facts(**there), PlanOptions(connections=wished)
    )
    (made,) = plan.connections
    assert made.policy == policy
    assert reason in made.decision.reason
    assert codes(plan, "error") == errors


@pytest.mark.parametrize(
    ("wished", "policy", "errors"), [(None, "hangup", []), ("keep", "keep", ["address"])]
)
def test_no_peer_is_reached_from_a_new_network(
    wished: str | None, policy: str, errors: list[str]
) -> None:
    record = CONNECTION.with_use(policy="reconnect")
    there = facts(netns=Place("private"), local_addresses=HERE)
    plan = make_plan(manifest(connections=(record,)), there, PlanOptions(connections=wished))
    assert (plan.policies, codes(plan, "error")) == ({(100, 5): policy}, errors)


def test_a_copy_gets_no_finding_about_the_missing_network_of_the_dump() -> None:
    there = facts(netns=Place("private"))  # which a copy gets whether it is gone or not
    for copy, word in ((False, "is gone"), (True, "of its own")):
        (finding,) = (
            f
            for f in make_plan(manifest(), there, PlanOptions(copy=copy)).findings
            if f.code == "netns-new"
        )
        assert word in finding.text


def test_a_network_that_cannot_be_verified_is_reported_with_a_hint() -> None:
    (finding,) = make_plan(
        manifest(), facts(netns=Place("private", unsure=True)), PlanOptions()
    ).findings
    assert (finding.level, finding.code) == ("warning", "netns-new")
    assert "cannot verify" in finding.text and "ip netns attach" in finding.hint


def test_many_hang_ups_are_one_warning() -> None:
    many = tuple(CONNECTION.with_use(fd=fd, direction="accepted") for fd in range(10, 40))
    plan = make_plan(manifest(connections=many), facts(), PlanOptions(connections="reconnect"))
    assert codes(plan, "warning") == ["connection-hangup"]
    assert "30 connections" in plan.findings[0].text


@pytest.mark.parametrize(
    ("fallback", "errors", "warnings"),
    [("hangup", [], ["connection-hangup"]), ("refuse", ["connection-refuse"], [])],
)
def test_a_hook_that_is_not_on_this_host(
    fallback: str, errors: list[str], warnings: list[str]
) -> None:
    """Known before anything is started; a hook that is here is none of the plan's business."""
    rule = {"policy": "reconnect", "application": "feed", "on_failure": fallback}
    rules = parse(Config(connection_rules=(("file: connection_rules[1]", rule),)))
    plan = make_plan(
        manifest(connections=(CONNECTION,)),
        facts(),
        PlanOptions(rules=rules, hooks=frozenset({"other"})),
    )
    assert (plan.connections[0].policy, codes(plan, "error"), codes(plan, "warning")) == (
        fallback,
        errors,
        warnings,
    )
    assert "there is no reconnect hook 'feed' here" in plan.findings[0].text
    plan = make_plan(
        manifest(connections=(CONNECTION,)),
        facts(),
        PlanOptions(rules=rules, hooks=frozenset({"feed"})),
    )
    assert (plan.connections[0].policy, plan.findings) == ("reconnect", ())


def test_another_machine() -> None:
    other = facts(kernel_arch="aarch64", page_size=65536, cpu_flags=frozenset())
    assert codes(make_plan(manifest(), other, PlanOptions()), "error") == ["arch", "page-size"]
    older = make_plan(manifest(), facts(cpu_flags=frozenset({"sse2"})), PlanOptions())
    assert codes(older, "warning") == ["cpu"]
    assert "avx2" in older.findings[0].text


@pytest.mark.parametrize(("shared", "port_taken"), [(True, False), (False, True)])
def test_a_udp_port_is_taken_when_its_owner_does_not_share_it(
    shared: bool, port_taken: bool
) -> None:
    """CRIU asks to share every port that it binds."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
        owner.bind(("0.0.0.0", 0))
        record = replace(BOUND, local=f"127.0.0.1:{owner.getsockname()[1]}")
        seen = observe(manifest(connections=(record,)), (), (), PlanOptions())
    assert (f"udp {record.local}" in seen.listening) is port_taken


TAKEN = TakenName("/run/x", "socket", "PID 7 (x) fd 3", "/run/x.copy-00000000", 100, 5)
INIT = {"namespaces": {"pid": {"mode": "host", "init": True}}}


@pytest.mark.parametrize(
    ("name", "options", "others", "pids", "net", "errors", "warnings"),
    [
        (TAKEN, PlanOptions(), {}, "same", "host", ["socket-taken"], []),
        (TAKEN, PlanOptions(copy=True), {}, "private", "host", [], ["socket-own-name"]),
        (TAKEN, PlanOptions(copy=True, pids="same"), {}, "same", "host", ["socket-taken"], []),
        (TAKEN, PlanOptions(copy=True), INIT, "init", "host", ["socket-taken"], []),
        (replace(TAKEN, own=""), PlanOptions(copy=True), {}, "same", "host", ["socket-taken"], []),
        (
            replace(TAKEN, what="deleted"),
            PlanOptions(),
            {},
            "same",
            "host",
            [],
            ["socket-own-name"],
        ),
        (
            replace(TAKEN, what="deleted", own=""),
            PlanOptions(),
            {},
            "same",
            "host",
            ["socket-taken"],
            [],
        ),
        (
            replace(TAKEN, what="copys"),
            PlanOptions(),
            {},
            "private",
            "host",
            [],
            ["socket-own-name"],
        ),
        (
            replace(TAKEN, what="copys"),
            PlanOptions(pids="same"),
            {},
            "same",
            "host",
            [],
            ["socket-own-name"],
        ),
        (replace(TAKEN, what="copys", by=""), PlanOptions(), {}, "private", "host", [], []),
        (
            replace(TAKEN, what="copys", by="", exists=False),
            PlanOptions(),
            {},
            "same",
            "host",
            [],
            ["socket-own-name"],
        ),
        (
            replace(TAKEN, what="other"),
            PlanOptions(copy=True),
            {},
            "same",
            "host",
            ["socket-taken"],
            [],
        ),
        (replace(TAKEN, what="abstract"), PlanOptions(), {}, "same", "host", ["socket-taken"], []),
        (
            replace(TAKEN, what="abstract"),
            PlanOptions(copy=True),
            {},
            "private",
            "private",
            [],
            ["socket-taken"],
        ),
    ],
)
def test_names_of_unix_sockets_that_are_taken(
    name: TakenName,
    options: PlanOptions,
    others: dict[str, object],
    pids: str,
    net: str,
    errors: list[str],
    warnings: list[str],
) -> None:
    plan = make_plan(manifest(**others), facts(names=(name,)), options)
    assert (plan.pids, plan.net, codes(plan, "error"), codes(plan, "warning")) == (
        pids,
        net,
        errors,
        warnings,
    )
    assert plan.names == ((name,) if "socket-own-name" in {f.code for f in plan.findings} else ())
    found = next(f for f in plan.findings if f.code.startswith("socket-"))
    assert name.path in found.text and (found.hint or not errors)
    assert ("ln -s" in found.hint) is not name.exists


def test_a_missing_address_is_reported_unless_the_network_is_made_with_it() -> None:
    lacking = facts(missing_addresses=frozenset({LISTENER.local}))
    plan = make_plan(manifest(connections=(LISTENER,)), lacking, PlanOptions())
    assert codes(plan, "error") == ["address-missing"]
    assert (plan.findings[0].pid, plan.findings[0].fd) == (100, 3)
    assert (
        make_plan(manifest(connections=(LISTENER,)), lacking, PlanOptions(alone=True)).findings
        == ()
    )
    # a hook may add it
    plan = make_plan(manifest(connections=(LISTENER,)), lacking, PlanOptions(prepared=True))
    assert not plan.errors and codes(plan, "info") == ["address-missing"]


@pytest.mark.parametrize(
    ("local", "family", "missing"),
    [(FOREIGN, "inet", True), ("127.0.0.1:80", "inet", False), (FOREIGN6, "inet6", False)],
)
def test_which_addresses_are_missing(local: str, family: str, missing: bool) -> None:
    """CRIU binds sockets of IPv6 to whatever they were bound to."""
    made = manifest(connections=(LISTENER.with_use(local=local, family=family),))
    assert observe(made, (), (), PlanOptions()).missing_addresses == (
        frozenset({local}) if missing else frozenset()
    )


def test_a_missing_interface_is_reported_unless_the_connection_is_given_up() -> None:
    given_up = replace(CONNECTION, holders=((100, 5),))
    sockets = (
        BoundSocket("eth7", ((100, 3),), here=False),
        BoundSocket("eth0", ((100, 4),)),
        BoundSocket("lo", ((100, 6),)),
    )
    bound = (*sockets, BoundSocket("eth7", given_up.holders, here=False))
    made = manifest(connections=(given_up,))
    for net, prepared, level, descriptors in (
        (Place("host"), False, "error", [3]),
        (Place("host"), True, "info", [3]),
        (Place("private"), True, "error", [3, 4]),
    ):
        plan = make_plan(made, facts(bound=bound, netns=net), PlanOptions(prepared=prepared))
        assert [(f.level, f.fd) for f in plan.findings if f.code == "interface-missing"] == [
            (level, fd) for fd in descriptors
        ]
        assert plan.no_interfaces == ({"eth7"} if net.mode == "host" else {"eth7", "eth0"})


def test_a_name_that_is_shown_takes_namespaces_of_its_own() -> None:
    """Where it cannot be, only its own name is printed."""
    shown = replace(TAKEN, what="copys")
    for pids, expected in (("auto", True), ("same", False)):
        (finding,) = make_plan(manifest(), facts(names=(shown,)), PlanOptions(pids=pids)).findings
        assert (
            TAKEN.own in finding.text
            and ("only its own processes find" in finding.text) is expected
        )


def test_the_dry_run_tells_all() -> None:
    plan = make_plan(
        manifest(connections=(LISTENER,)),
        facts(listening={"tcp 0.0.0.0:80": "PID 7 (web)"}),
        PlanOptions(),
    )
    answer = plan.to_dict()
    assert answer["ok"] is False
    (found,) = answer["findings"]
    assert found["code"] == "port-taken"
    assert found["text"] == "0.0.0.0:80 is taken on this host by PID 7 (web)"


def test_a_missing_working_folder(tmp_path: Path) -> None:
    """Refused, unless it is put back, or comes with a file that is; that of a tree with a root of
    its own is not looked for.
    """
    gone = str(tmp_path / "gone")
    folders = ((100, gone), (101, str(tmp_path)))
    asked = manifest(
        processes=tuple(ProcessRecord(pid=pid, ns_pid=pid, cwd=folder) for pid, folder in folders)
    )
    plan = make_plan(asked, observe(asked, (), (), PlanOptions()), PlanOptions())
    assert [(f.code, f.pid, gone in f.text) for f in plan.errors if f.code == "folder-missing"] == [
        ("folder-missing", 100, True)
    ]
    carried = FileRecord(path=f"{gone}/file", kind="carried", mode=0o100644)
    for more in ({"files": (carried,)}, {"namespaces": {"mnt": {"mode": "entered"}}}):
        other = asked.with_use(**more)
        assert not observe(other, (), (), PlanOptions()).missing_folders
