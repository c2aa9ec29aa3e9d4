"""Sessions of a group: stored at one moment, and brought back with the connections among them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest
from support.asking import Asked, Team
from support.hooking import HookFolder
from support.keeper import Keeper, wait_until
from support.linked import Exchange
from support.operating import TIMEOUT, Operators

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROUNDS = 3
VETO = """[ "$CRIUCTL_HOOK_SESSION" != connect ] || { echo "not now" >&2; exit 10; }"""


@pytest.fixture
def exchange(operators: Operators) -> Iterator[Exchange]:
    exchange = Exchange(operators)
    exchange.start()
    yield exchange
    exchange.end()


def test_no_message_is_lost_or_doubled(exchange: Exchange, operators: Operators) -> None:
    """With full queues in both directions, over TCP and unix sockets: a snapshot, more messages,
    the end of both, and back.
    """
    queued = 0
    for number in range(1, ROUNDS + 1):
        made = operators("snapshot", "--group", "work")
        assert (made["group"], made["number"]) == ("work", number)
        assert {member["session"] for member in made["members"]} == {"serve", "connect"}
        assert made["frozen_ms"] >= max(member["frozen_ms"] for member in made["members"])
        exchange.goes_on()  # the snapshot is not noticed
        shown = operators("show", made["members"][0]["checkpoint"])
        links = [c for c in shown["connections"] if c["linked"]]
        assert len(links) == 4 and len({c["link"] for c in links}) == 4
        queued += sum(c["rqueue"] + c["wqueue"] for c in links)
        exchange.kill()
        back = operators("restore", "--group", "work", "--files", "keep")
        assert back["checkpoint"] == made["checkpoint"]
        kept = [c for member in back["members"] for c in member["connections"]]
        assert [c["outcome"] for c in kept] == ["kept"] * 8
        exchange.goes_on()
    assert queued > 1 << 16
    assert exchange.listed() == list(range(1, ROUNDS + 1))


def test_a_dump_ends_all(exchange: Exchange, operators: Operators) -> None:
    made = operators("dump", "--group", "work")
    assert exchange.states() == {"serve": "checkpointed", "connect": "checkpointed"}
    assert exchange.listed() == [made["number"]]
    operators("restore", "--group", "work@1")
    exchange.goes_on()


@pytest.mark.parametrize(
    ("command", "phase"),
    [("snapshot", "pre-dump"), ("snapshot", "frozen"), ("dump", "post-dump")],
)
def test_one_member_s_dump_fails(
    command: str, phase: str, exchange: Exchange, operators: Operators
) -> None:
    """All run on, and nothing is listed, of the group or of one of them."""
    hook = HookFolder(operators.home.path / "hooks").sh(phase, "veto", VETO)
    refused = operators(command, "--group", "work", check=False)
    assert refused["error"]["code"] == "vetoed" and "not now" in refused["error"]["message"]
    assert "connect" in refused["error"]["message"]
    exchange.goes_on()
    assert not exchange.listed() and not operators("list")
    hook.unlink()
    operators("snapshot", "--group", "work")
    exchange.goes_on()


def test_one_member_s_restore_fails(exchange: Exchange, operators: Operators) -> None:
    """None is left, and it says so; then all come back."""
    operators("snapshot", "--group", "work")
    exchange.kill()
    hook = HookFolder(operators.home.path / "hooks").sh("post-restore", "veto", VETO)
    refused = operators("restore", "--group", "work", "--files", "keep", check=False)
    assert refused["error"]["code"] == "vetoed"
    assert "no other member was restored" in refused["error"]["message"]
    assert "running" not in exchange.states().values()
    hook.unlink()
    operators("restore", "--group", "work", "--files", "keep")
    exchange.goes_on()


def test_one_member_runs(exchange: Exchange, operators: Operators) -> None:
    """The restore of a group is refused while one of it runs; one alone is restored as any
    session, and its connections end.
    """
    operators("snapshot", "--group", "work")
    refused = operators("restore", "--group", "work", check=False)
    assert refused["exit_code"] == 9
    exchange.goes_on()
    exchange.kill()
    back = operators("restore", "connect", "--files", "keep")
    assert {c["outcome"] for c in back["connections"]} == {"hangup"}
    wait_until(lambda: "has ended" in exchange.failed() or "Error" in exchange.failed(), 60, "ends")


def test_removing(exchange: Exchange, operators: Operators) -> None:
    """A member's checkpoint stays while a group checkpoint needs it."""
    for _ in range(3):
        operators("snapshot", "--group", "work")
    refused = operators("rm", "connect@1", check=False)
    assert refused["exit_code"] == 9 and "group checkpoint work@1" in refused["error"]["message"]
    pruned = operators("prune", "--keep-last", "1")
    assert [one["keep"] for one in pruned["groups"]] == [True, False, False]
    assert exchange.listed() == [3]
    assert {one["number"] for one in operators("list")} == {3}
    operators("rm", "--group", "work")
    assert not exchange.listed() and not operators("list")


PARTNER = """
import os, socket, sys
role, path = sys.argv[1:]
if role == "serve":
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(1)
    print("listening", flush=True)
    sock, _ = listener.accept()
else:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    sock.send(b"one")
    sock.send(b"two")
    sock.shutdown(socket.SHUT_WR)
print("ready", flush=True)
other = os.dup(sock.fileno())
input()
if role == "serve":
    print([sock.recv(9) for _ in range(2)], os.get_blocking(other), flush=True)
    sock.send(b"answer")
else:
    print(sock.recv(9), flush=True)
input()
"""


def test_what_a_unix_socket_holds(operators: Operators) -> None:
    """Packets are kept apart, a side that was shut down stays so, and a duplicate is one."""
    path = operators.home.path / "packets"
    run = (sys.executable, "-c", PARTNER)
    for role, word in (("serve", "listening"), ("connect", "ready")):
        operators("run", "-d", "--name", role, "--group", "two", "--", *run, role, path)
        operators("wait", role, "--match", word)
    operators("wait", "serve", "--match", "ready")
    operators("dump", "--group", "two")
    operators("restore", "--group", "two")
    operators("send", "serve", "--enter")
    operators("wait", "serve", "--match", r"\[b'one', b'two'\] True")
    operators("send", "connect", "--enter")
    operators("wait", "connect", "--match", "b'answer'")
    operators("kill", "--group", "two", "--timeout", "0")


def test_a_second_try_fills_no_queue_twice(asked: Asked, keeper: Keeper) -> None:
    """A PID is taken after the look at it, so one member is restored again."""
    Team(asked, "--host-pids")
    asked.ask("agent", "kept[0].send(b'once')")
    pid = asked("status", "db")["pid"]
    asked("dump", "--group", "team")
    gate, there = asked.home.path / "gate", asked.home.path / "there"
    os.mkfifo(gate)
    asked.hook(f"db) [ -e '{there}' ] || {{ : > '{there}'; read nothing < '{gate}'; }};;")
    command = asked.start("restore", "--group", "team")
    wait_until(there.exists, TIMEOUT, "the hook has begun")
    taken = asked.occupy(keeper, pid)
    gate.write_text("\n")
    assert command.process.wait(TIMEOUT * 2) == 0, command.output()
    taken.kill()
    started = [e for e in asked("events") if e["operation"] == "restore"]
    assert len(started) == len(Team.NAMES)
    assert asked("status", "db")["pid"] != pid
    assert asked.ask("db", "kept[0].recv(99)") == "b'once'"
    assert asked.ask("db", "__import__('select').select([kept[0]], [], [], 0)[0]") == "[]"


def test_an_agent_and_its_redis(operators: Operators) -> None:
    """A real server: its data and the client's place in it are of one moment, and the client's
    connection is the same one afterwards.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    data = operators.home.path / "redis"
    data.mkdir()
    server = ("redis-server", "--port", port, "--save", "", "--dir", data)
    operators("run", "-d", "--name", "db", "--group", "agent", "--", *server)
    operators("wait", "db", "--match", "Ready to accept connections")
    program = f"""
import redis
db = redis.Redis(port={port})
number = 0
while True:
    number += 1
    found = db.incr("counter")
    assert found == number, (found, number)
    db.publish("news", number)
    if number % 500 == 0:
        print("at", number, "of", db.client_id(), flush=True)
"""
    client = (sys.executable, "-c", program)
    operators("run", "-d", "--name", "agent", "--group", "agent", "--", *client)
    for _ in range(2):
        operators("wait", "agent", "--match", r"at \d+ of \d+")
        operators("snapshot", "--group", "agent")
        operators("kill", "--group", "agent", "--timeout", "0")
        back = operators("restore", "--group", "agent")
        assert {c["outcome"] for m in back["members"] for c in m["connections"]} == {"kept"}
        start = operators("status", "agent")["offset"]
        operators("wait", "agent", "--match", r"at \d+ of \d+", "--since", start)
        assert operators("status", "agent")["state"] == "running"
    operators("kill", "--group", "agent", "--timeout", "0")
