"""Who may do what to a session, enforced in the holder, and all of it on record."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.holding import TIMEOUT, Holders
from support.keeper import wait_until

from criuctl.errors import (
    Conflict,
    CriuctlError,
    Forbidden,
    LeaseHeld,
    NotFound,
    PlatformError,
    SessionGone,
    UsageError,
    WrongState,
)
from criuctl.session.client.session import Event, Session
from criuctl.session.launch.daemon import HolderSpec, start_holder

pytestmark = pytest.mark.integration

WRITES: list[tuple[str, dict[str, Any]]] = [
    ("input", {"text": "x"}),
    ("resize", {"rows": 5, "cols": 5}),
    ("signal", {"signal": "INT"}),
    ("pause", {}),
    ("resume", {}),
    ("halt", {}),
    ("lease-request", {}),
    ("lease-take", {}),
    ("lease-grant", {"to": "op-1"}),
    ("lease-yield", {}),
]
ADMINISTERS: list[tuple[str, dict[str, Any]]] = [
    ("kill", {}),
    ("set-role", {"kind": "human", "name": "x", "role": "observe"}),
    ("checkpoint-begin", {}),
    ("checkpoint-commit", {"checkpoint": "x"}),
    ("checkpoint-done", {"checkpoint": "x", "ended": True}),
    ("checkpoint-abort", {}),
    ("adopt", {"pid": 1, "incarnation": 2}),
    ("spawn", {"argv": ["true"]}),
    ("reexec", {}),
    ("shutdown", {"force": True}),
]


def events(client: Session, name: str) -> list[dict[str, Any]]:
    """The events of this name that have come."""
    client.status()  # what was sent before its answer has come with it
    found = []
    while client.pending:
        message = client.receive(0)
        if isinstance(message, Event) and message.name == name:
            found.append(message.body)
    return found


def groups(mount: str) -> list[str]:
    """The control groups of sessions in one hierarchy."""
    folder = Path("/sys/fs/cgroup") / mount / "criuctl"
    return os.listdir(folder) if folder.is_dir() else []


def test_a_role_allows_what_it_says_and_nothing_else(holders: Holders) -> None:
    started = holders.start("cat")
    observer, writer = (
        holders.connect(role="observe", operator="o"),
        holders.connect(role="write", operator="w"),
    )
    before = observer.status()
    for op, arguments in WRITES + ADMINISTERS:
        with pytest.raises(Forbidden, match="needs the role"):
            observer.request(op, **arguments)
    for op, arguments in ADMINISTERS:
        with pytest.raises(Forbidden, match="needs the role"):
            writer.request(op, **arguments)
    with pytest.raises(Forbidden):
        observer.send("x\n")
    observer.submit_input(b"y\n")  # unanswered, but the refusal is reported
    refusal = observer.receive(TIMEOUT)
    assert refusal is not None and isinstance(getattr(refusal, "error", None), Forbidden)
    after = observer.status()
    assert {k: v for k, v in after.items() if k != "operators"} == {
        k: v for k, v in before.items() if k != "operators"
    }
    assert holders.state()["pid"] == started.pid
    assert {entry["what"] for entry in observer.audit()} == {"opened", "joined"}


def test_the_lease_goes_round(holders: Holders) -> None:
    holders.start("cat")
    alice, bob = (
        holders.connect(operator="alice", role="write"),
        holders.connect(operator="bob", role="write"),
    )
    agent = holders.connect(operator="bot", kind="agent", role="write")
    agent.lease_request()
    agent.send("asked\n")
    with pytest.raises(LeaseHeld, match="bot") as refused:
        alice.send("x")
    assert refused.value.details["holder"]["operator"] == agent.operator
    with pytest.raises(LeaseHeld):
        alice.resize(10, 10)
    assert alice.lease_take()["from"]["name"] == "bot"  # a human from an agent
    with pytest.raises(LeaseHeld):
        agent.send("x")
    with pytest.raises(Forbidden):
        bob.lease_take()  # not a human from a human
    assert bob.request("lease-request", queue=True)["queued"]
    alice.lease_yield()
    assert bob.heartbeat()["operator"] == bob.operator  # type: ignore[index]
    bob.lease_grant(agent.operator)
    agent.send("y\n")
    assert holders.connect(role="admin").lease_take()["from"]["name"] == "bot"
    whats = [entry["what"] for entry in alice.audit()]
    assert [what for what in whats if what.startswith("lease")] == [
        "lease-request", "lease-take", "lease-yield", "lease-request", "lease-grant", "lease-take",
    ]  # fmt: skip


def test_a_merely_attached_operator_blocks_no_other(holders: Holders) -> None:
    """The lease of an attached operator is anybody's once he pauses; who types next has it, and a
    second attaching has not.
    """
    holders.start("cat")
    alice = holders.connect(operator="alice", role="write")
    assert alice.attach(write=True)["lease"]["soft"]
    bob = holders.connect(operator="bob", role="write")
    assert bob.attach(write=True)["lease"]["operator"] == alice.operator
    with pytest.raises(LeaseHeld):
        bob.resize(10, 10)
    holders.connect().reexec()
    assert alice.status()["lease"]["soft"]
    agent = holders.connect(operator="bot", kind="agent", role="write")
    agent.send("typed\n")
    assert agent.status()["lease"]["operator"] == agent.operator
    agent.lease_request()  # from now on it is kept
    assert not agent.status()["lease"]["soft"]
    with pytest.raises(LeaseHeld):
        alice.send("x")


def test_the_lease_expires_without_a_heartbeat_and_is_free_when_its_holder_is_lost(
    holders: Holders,
) -> None:
    holders.start("cat")
    one, two, watcher = (
        holders.connect(operator="one"),
        holders.connect(operator="two"),
        holders.connect(role="observe"),
    )
    watcher.request("subscribe")
    one.lease_request(ttl=60)
    waiting = two.request("lease-request", queue=True, ttl=60)
    assert waiting["queued"]
    one.lease_request(ttl=1)  # only now does its time begin to run
    wait_until(
        lambda: (two.heartbeat() or {}).get("operator") == two.operator,
        TIMEOUT,
        "the lease expired and went on",
    )
    assert [event["how"] for event in events(watcher, "lease")] == ["request", "expired", "request"]
    two.close()
    wait_until(
        lambda: watcher.status()["lease"] is None, TIMEOUT, "the lease of a lost connection is free"
    )
    one.send("x\n")


def test_an_operator_comes_back_to_its_lease(holders: Holders) -> None:
    holders.start("cat")
    first, other = holders.connect(operator="me"), holders.connect(role="observe")
    first.lease_request(ttl=60)
    first.close()
    wait_until(lambda: other.status()["lease"] is None, TIMEOUT, "the connection is lost")
    with pytest.raises(NotFound):
        holders.connect(resume=(first.operator, "0" * 32))
    again = holders.connect(resume=(first.operator, first.token))
    assert again.operator == first.operator
    assert other.status()["lease"]["operator"] == again.operator


def test_a_held_lease_outlives_its_owners_connection_and_the_holders_program(
    holders: Holders,
) -> None:
    holders.start("cat")
    watcher = holders.connect(role="observe")
    watcher.request("subscribe")
    holders.connect(kind="agent", operator="bot", role="write").lease_request(hold=600)
    holders.clients[-1].leave()
    wait_until(
        lambda: "bot" not in {one["name"] for one in watcher.status()["operators"]}, TIMEOUT, "left"
    )
    admin = holders.connect(operator="root")
    admin.reexec()
    lease = admin.status()["lease"]
    assert (lease["name"], lease["held"]) == ("bot", True)
    again = holders.connect(kind="agent", operator="bot", role="write")
    again.send("x\n")
    human = holders.connect(operator="eve", role="write")
    for one in (human, holders.connect(operator="bot", role="write")):  # or of another kind
        with pytest.raises(LeaseHeld, match="keeps the lease for"):
            one.send("y\n")
    again.leave()
    with pytest.raises(LeaseHeld):
        human.send("y\n")
    taken = human.lease_take(hold=1)
    assert (taken["from"]["name"], taken["lease"]["held"]) == ("bot", True)
    human.close()
    wait_until(lambda: watcher.status()["lease"] is None, TIMEOUT, "its time is over")
    hows = [event["how"] for event in events(watcher, "lease")]
    assert hows == ["request", "hold", "implicit", "take", "hold", "expired"]
    with pytest.raises(UsageError):
        admin.request("lease-request", hold=5, queue=True)


def test_two_who_race_for_the_lease_never_both_write(holders: Holders) -> None:
    holders.start("sh", "-c", "stty -echo -icanon; echo ready; cat > /dev/null")
    watcher = holders.connect(role="observe")
    watcher.wait_match("ready", since="start", timeout=TIMEOUT)
    rounds, wins, errors = 40, [0, 0], []

    def race(number: int) -> None:
        try:
            client = Session.connect(
                "s", config=holders.config, operator=f"racer{number}", kind="agent"
            )
            for _ in range(rounds):
                try:
                    client.lease_request()
                except LeaseHeld:
                    continue
                for _ in range(3):
                    client.send(str(number))
                wins[number] += 1
                client.lease_yield()
            client.leave()
        except CriuctlError as error:
            errors.append(error)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # each of its requests has a deadline
    assert not errors and sum(wins) > 0
    holder = ""
    for entry in watcher.audit():
        if entry["what"] in ("lease-request", "lease-implicit"):
            assert holder == ""
            holder = entry["operator"]
        elif entry["what"] == "lease-yield":
            assert holder == entry["operator"]
            holder = ""
        elif entry["what"] == "input":
            assert holder == entry["operator"]


def test_what_is_typed_at_a_prompt_for_a_password_is_not_recorded(holders: Holders) -> None:
    holders.start(
        "sh",
        "-c",
        (
            "read name; stty -echo; echo password:; read secret; stty echo; echo got ${#secret}; "
            "read "
            "again"
        ),
    )
    client = holders.connect()
    client.send("my name\n")
    client.wait_match("password:", since="start", timeout=TIMEOUT)
    client.send("correct horse battery\n")
    client.wait_match("got 21", since="start", timeout=TIMEOUT)
    client.send("public\n")
    typed = [
        (entry["bytes"], entry.get("text"), entry.get("hidden"))
        for entry in client.audit()
        if entry["what"] == "input"
    ]
    assert typed == [(8, "my name\n", None), (22, None, True), (7, "public\n", None)]
    path = Path(client.status()["audit"])
    assert b"horse" not in path.read_bytes() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry["sequence"] for entry in client.audit()] == list(
        range(1, len(client.audit()) + 1)
    )


def test_the_size_follows_the_writer(holders: Holders) -> None:
    holders.start("cat", rows=24, cols=80)
    observer, writer = holders.connect(role="observe"), holders.connect(role="write")
    observer.attach(size=(5, 5), write=True)
    assert (observer.status()["rows"], observer.status()["cols"]) == (24, 80)
    writer.attach(size=(40, 120), write=True)
    assert (observer.status()["rows"], observer.status()["cols"]) == (40, 120)
    latecomer = holders.connect(role="write")
    assert latecomer.attach(size=(6, 6), write=True)["lease"]["operator"] == writer.operator
    assert (observer.status()["rows"], observer.status()["cols"]) == (40, 120)
    assert [event["rows"] for event in events(observer, "resize")] == [40]


def test_a_ceiling_holds_for_the_connected_and_for_those_to_come(holders: Holders) -> None:
    holders.start("cat")
    admin, agent = holders.connect(), holders.connect(kind="agent", operator="bot", role="admin")
    agent.send("x\n")
    admin.set_role("agent", "bot", "observe")
    with pytest.raises(Forbidden):
        agent.send("y\n")
    assert admin.status()["lease"] is None
    assert holders.connect(kind="agent", operator="bot", role="admin").role == "observe"


def test_only_the_owner_and_root_may_connect(holders: Holders) -> None:
    holders.start("cat")
    path = Path(holders.config.run_dir) / "holders" / "s" / "socket"
    assert (
        stat.S_IMODE(path.stat().st_mode) == 0o600
        and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    )
    # The modes keep others out; were they wrong, the peer's credentials would.
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        folder.chmod(0o755)
    path.chmod(0o666)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            Session.connect("s", config=holders.config, kind="human")
            os.write(writer, b"in")
        except SessionGone:
            os.write(writer, b"out")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"out"


def test_a_name_is_one_session(holders: Holders) -> None:
    holders.start("cat")
    with pytest.raises(Conflict, match="exists"):
        holders.start("cat")
    with pytest.raises(NotFound, match="no-such-command"):
        holders.start("no-such-command", name=holders.token)
    assert not [
        name
        for mount in ("unified", "freezer", "")
        for name in groups(mount)
        if name.startswith(holders.token)
    ]
    assert sorted(os.listdir(Path(holders.config.run_dir) / "holders")) == ["s"]
    with pytest.raises(PlatformError, match="no place for its files"):
        start_holder(
            replace(holders.config, run_dir="/proc/self"), HolderSpec("nowhere", argv=["cat"])
        )


def test_a_session_that_is_over_takes_no_input(holders: Holders) -> None:
    holders.start("true")
    client = holders.connect()
    client.wait_exit(TIMEOUT)
    for action in (lambda: client.send("x"), client.pause, lambda: client.signal("INT")):
        checked: Callable[[], Any] = action
        with pytest.raises(WrongState, match="exited"):
            checked()
    assert client.kill() == 0


def test_an_unread_status_keeps_the_holder_and_a_collected_one_does_not(holders: Holders) -> None:
    started = holders.start("sh", "-c", "exit 9")
    wait_until(lambda: holders.state()["state"] == "exited", TIMEOUT, "it exited")
    looking = holders.connect()
    assert looking.status()["exit_code"] == 9
    looking.leave()  # a look is not collecting
    collecting = holders.connect()
    assert collecting.wait_exit(TIMEOUT)["exit_code"] == 9
    collecting.leave()
    holders.gone(started)
    again = holders.start("cat")  # the name is free again, and its audit log is another one
    entries = holders.connect().audit()
    assert (entries[0]["sequence"], entries[0]["what"], entries[0]["session"]) == (
        1,
        "opened",
        again.id,
    )
    aside = Path(holders.config.state_dir) / "holders" / "s" / f"audit-{started.id[:16]}.jsonl"
    assert f'"session":"{started.id}"' in aside.read_text()
