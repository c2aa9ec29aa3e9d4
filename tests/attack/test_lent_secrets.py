"""The secret of a connection rule is sent to no server that a user has chosen, and lent to no
process that only claims a name.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from servers.common import free_ports
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import Keeper, wait_until
from support.laboratory import USER, Laboratory
from support.zoo import Zoo

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.connections.decision import decide
from criuctl.connections.rule_parsing import parse
from criuctl.connections.rules import Rules
from criuctl.connections.secret_scope import Owner, Terms, may_have, of_tree
from criuctl.proc.tree import read_process
from criuctl.store import open_store

pytestmark = pytest.mark.integration

CANARY = "canary-77ab-password"
(PORT,) = free_ports(1)

# Takes connections, says yes to all that is asked, and keeps what it receives.
SERVER = """
import os, socket, sys, threading
folder = sys.argv[1]
server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
def serve(sock):
    while data := sock.recv(4096):
        with open(folder + "/received", "ab") as file:
            file.write(data)
        sock.sendall(b"+OK\\r\\n")
with open(folder + "/ready", "w") as file:
    file.write(str(os.getpid()))
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
# Calls itself as the rule wants, and is connected to that server.
CLIENT = """
import ctypes, os, socket, sys, time
ctypes.CDLL(None).prctl(15, b"worker1", 0, 0, 0)
sock = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
with open(sys.argv[1] + "/.ready", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + "/.ready", sys.argv[1] + "/ready")
time.sleep(100000)
"""


def configured(criuctl: Criuctl, home: Home, match: str, application: str = "redis") -> None:
    """A rule with a secret in a file of root's."""
    secret = home.path / "secret"
    secret.write_text(f"{CANARY}\n")
    secret.chmod(0o600)
    rule = (
        f"{{match: {match}, policy: reconnect, application: {application}, secret: {{file: "
        f"{secret}}}}}"
    )
    criuctl.extra["CRIUCTL_CONNECTION_RULES"] = f"[{rule}]"


def python(program: str, lab: Laboratory) -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", program, str(lab.folder), str(PORT)]


def received(lab: Laboratory) -> bytes:
    file = lab.folder / "received"
    return file.read_bytes() if file.exists() else b""


def test_a_server_of_the_user_s_own_is_not_told_the_secret(
    lab: Laboratory, criuctl: Criuctl, home: Home
) -> None:
    """The attack: a process that calls itself ``worker1``, connected to its user's own server, is
    dumped by root.
    """
    configured(criuctl, home, '{process: "worker*"}')
    lab.start(argv=python(SERVER, lab))
    answer = lab.dump(lab.start(argv=python(CLIENT, lab)))
    assert CANARY.encode() not in received(lab)
    (connection,) = (one for one in answer["connections"] if one["peer"] == f"127.0.0.1:{PORT}")
    assert connection["policy"] == "hangup"
    assert f"of user {USER}" in connection["reason"] and "user: NAME" in connection["reason"]


def test_a_user_s_own_network_is_known_as_such(zoo: Zoo, keeper: Keeper, home: Home) -> None:
    """There any address is a server of the user's, so a rule that names one does not pin the
    peer.
    """
    unshare = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        "--",
        "unshare",
        "--user",
        "--map-root-user",
    ]
    apart = keeper.spawn(
        [*unshare, "--net", "sleep", "1000"],
        env={"PATH": os.environ["PATH"], "CZOO_TOKEN": home.token},
    )
    try:
        wait_until(
            lambda: read_process(apart.pid).command == "sleep", 20, "it is in its namespaces"
        )
        (owner,) = of_tree([read_process(apart.pid)]).values()
        assert owner == Owner(frozenset({USER}), other_userns=True)
        assert not may_have(Terms(pinned=True), [owner])
        (own,) = of_tree([read_process(zoo.launch("counter.py").pid)]).values()
        assert may_have(Terms(pinned=True), [own])
    finally:
        apart.kill()
        apart.wait(20)


def test_the_user_that_a_rule_names_may_have_it(
    lab: Laboratory, criuctl: Criuctl, home: Home
) -> None:
    """The way round, and the proof that the attack above would have been seen."""
    configured(criuctl, home, f'{{process: "worker*", user: {USER}}}')
    lab.start(argv=python(SERVER, lab))
    lab.dump(lab.start(argv=python(CLIENT, lab)))
    assert CANARY.encode() in received(lab)


RECORD = ConnectionRecord(
    10,
    3,
    holders=((10, 3), (11, 3)),
    family="inet",
    type="stream",
    protocol="tcp",
    state="established",
    local="10.0.0.1:4000",
    peer="10.1.2.3:6379",
    external=True,
    direction="initiated",
)
ROOT, APP, OTHER = Owner(frozenset({0})), Owner(frozenset({1001})), Owner(frozenset({1002}))


def ruled(match: dict[str, Any], **more: Any) -> Rules:
    rule = {
        "match": match,
        "policy": "reconnect",
        "application": "redis",
        "secret": {"env": "PW"},
        **more,
    }
    return parse(Config(connection_rules=(("rules[1]", rule),)))


@pytest.mark.parametrize(
    ("match", "owners", "lent"),
    [
        ({"process": "worker*"}, (ROOT, ROOT), True),
        ({"process": "worker*"}, (APP, APP), False),
        ({"process": "worker*"}, (ROOT, APP), False),  # both hold the same socket
        # a set-uid program, started by a user
        ({"process": "worker*"}, (ROOT, Owner(frozenset({0, 1001}))), False),
        ({"process": "worker*", "user": 1001}, (APP, APP), True),
        ({"process": "worker*", "user": [1001, "root"]}, (ROOT, APP), True),
        ({"process": "worker*", "user": 1001}, (APP, OTHER), False),
        ({"port": 6379}, (APP, APP), False),
        ({"protocol": "redis"}, (APP, APP), False),
        ({"peer": "10.1.2.3"}, (APP, APP), True),
        ({"peer": "0.0.0.0/0"}, (APP, APP), False),
        ({"peer": "10.1.2.3"}, (APP, replace(APP, other_userns=True)), False),
        ({"peer": "10.1.2.3", "user": 1001}, (OTHER, OTHER), False),
        ({}, (APP, APP), False),
    ],
)
def test_to_whom_a_secret_is_lent(
    match: dict[str, Any], owners: tuple[Owner, Owner], lent: bool
) -> None:
    known = dict(zip((10, 11), owners, strict=True))
    decided = decide(RECORD, ruled(match), commands={10: "worker1", 11: "worker1"}, owners=known)
    assert bool(decided.settings.secret) == lent
    assert (decided.policy == "reconnect") == lent
    asking = decide(
        RECORD,
        ruled(match, secret={}, options={"ask_secret": {"env": "X"}}),
        commands={10: "worker1", 11: "worker1"},
        owners=known,
    )
    assert bool(asking.settings.options) == lent
    unknown = decide(
        RECORD, ruled(match), commands={10: "worker1", 11: "worker1"}, owners={10: owners[0]}
    )
    assert not unknown.settings.secret or match.get("peer") == "10.1.2.3"


def test_a_path_is_the_peer_s_only_in_this_host_s_own_user_namespace() -> None:
    unix = replace(RECORD, family="unix", protocol="", local="", peer="/run/redis/redis.sock")
    for glob, lent in (("/run/redis/*", True), ("*.sock", False), ("*", False)):
        decided = decide(unix, ruled({"path": glob}), owners={10: APP, 11: APP})
        assert bool(decided.settings.secret) == lent, glob
    apart = {10: APP, 11: replace(APP, other_userns=True)}
    assert not decide(unix, ruled({"path": "/run/redis/*"}), owners=apart).settings.secret


def test_a_name_in_a_manifest_does_not_lead_the_secret_elsewhere() -> None:
    """The rule names an address; a manifest says that the peer at this address is called
    otherwise.
    """
    forged = replace(RECORD, host="attacker.example")
    assert decide(forged, ruled({"peer": "10.1.2.3"}), owners={10: ROOT, 11: ROOT}).host == ""
    named = replace(RECORD, host="db.example", peer="192.0.2.1:6379")
    assert (
        decide(named, ruled({"host": "db.example"}), owners={10: ROOT, 11: ROOT}).host
        == "db.example"
    )


@pytest.mark.parametrize("way", ["by its name", "by a forged manifest", "its user is named"])
def test_a_hook_is_given_no_secret_for_a_process_that_only_has_the_name(
    way: str, lab: Laboratory, criuctl: Criuctl, home: Home, keeper: Keeper
) -> None:
    """At a restore: the hook, which is root's, would tell it to whatever peer the process has
    chosen.
    """
    configured(
        criuctl,
        home,
        f'{{process: "worker*"{f", user: {USER}" if "user" in way else ""}}}',
        "greet",
    )
    hooks = HookFolder(home.path / "hooks")
    hooks.python("reconnect", "greet", GREET.format(note=str(home.path / "note")))
    lab.start(argv=python(SERVER, lab))
    stored = lab.dump(lab.start(argv=python(CLIENT, lab)))
    if "forged" in way:
        stored = forged(criuctl, home)
    (lab.folder / "ready").unlink()
    server = keeper.spawn(
        [
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--clear-groups",
            "--",
            *python(SERVER, lab),
        ],
        env={"PATH": os.environ["PATH"], "CZOO_TOKEN": home.token},
    )
    wait_until(
        (lab.folder / "ready").exists, 20, "the user's server is there, on the host of the restore"
    )
    answer = lab.restore(stored["checkpoint"], "--connections", "reconnect", check=False)
    server.kill()
    server.wait(20)
    (connection,) = (one for one in answer["connections"] if one["peer"] == f"127.0.0.1:{PORT}")
    if way == "its user is named":
        assert (home.path / "note").exists(), str(connection)
        assert (home.path / "note").read_text() == CANARY
        return
    assert not (home.path / "note").exists()
    assert connection["outcome"] == "hangup" and "is not lent" in connection["reason"]


def forged(criuctl: Criuctl, home: Home) -> dict[str, str]:
    """The newest checkpoint once more, with a manifest that calls its processes root's."""
    config = Config(
        store=str(criuctl.store),
        key_dir=str(home.path / "keys"),
        cache_dir=str(home.path / "cache"),
    )
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        manifest = repository.manifest(repository.list()[0])
        processes = tuple(replace(process, uid=0) for process in manifest.processes)
        repository.publish(replace(manifest, id=os.urandom(16).hex(), processes=processes))
        (newest,) = (one for one in repository.list() if one.id != manifest.id)
        return {"checkpoint": newest.id}


GREET = """
import json, os, socket
secret = open(4).read()
open({note!r}, "w").write(secret)
print(json.dumps({{"outcome": "failed", "reason": "seen"}}))
"""
