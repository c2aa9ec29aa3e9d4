"""What a dump finds out about connections, decides and waits for: on real sockets, before and at
the freeze.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from servers.postgresql import PostgresServer
from servers.redis import redis_server
from support.command import Criuctl, Home
from support.echo import Echo
from support.keeper import wait_until
from support.obstacles import DUMPABLE, running
from support.pauses import paused, steps_of
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.config import Config
from criuctl.connections import sockopts
from criuctl.connections.detect import Dial, probe
from criuctl.connections.record import Look, look
from criuctl.connections.survey import Survey
from criuctl.proc.descriptors import descriptors
from criuctl.proc.tree import read_tree
from criuctl.report import Reporter

pytestmark = pytest.mark.integration

ME = f"{os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


def _look(pid: int) -> Look:
    tree = read_tree(pid)
    return look(tree, {p.pid: descriptors(p.pid) for p in tree if not p.zombie})


def _external(pid: int) -> ConnectionRecord:
    (only,) = _look(pid).external
    return only.record


# -- the record ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_that_was_made(host: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        text = (
            f"s = socket.create_connection(({host!r}, {port}))\n"
            "s.setsockopt(6, socket.TCP_NODELAY, 1); s.setsockopt(1, socket.SO_KEEPALIVE, 1)\n"
            "s.setsockopt(1, socket.SO_LINGER, struct.pack('ii', 1, 7)); s.sendall(b'12345'); d = "
            "os.dup(s.fileno())\n"
            "child(lambda: None)"
        )
        with running(text, tmp_path) as program:
            with listener.accept()[0] as peer:
                assert peer.recv(9) == b"12345"
                peer.sendall(b"unread")
                wait_until(lambda: _external(program.pid).rqueue == 6, 60, "the answer")
                record = _external(program.pid)
                local = peer.getpeername()
            child = next(p.pid for p in read_tree(program.pid) if p.pid != program.pid)
    brackets = "[{}]:{}" if ":" in host else "{}:{}"
    assert record.peer == brackets.format(host, port)
    assert record.local == brackets.format(*local[:2])
    assert (record.family, record.type, record.protocol) == (
        "inet6" if ":" in host else "inet",
        "stream",
        "tcp",
    )
    assert (record.state, record.direction, record.wqueue) == ("established", "initiated", 0)
    assert record.peer_process == ME
    assert {pid for pid, _fd in record.holders} == {program.pid, child}
    assert len(record.holders) == 4  # two descriptors, in parent and child
    assert record.options["TCP_NODELAY"] == 1
    assert record.options["SO_KEEPALIVE"] == 1
    assert record.options["SO_LINGER"] == [1, 7]
    assert record.tcp["bytes_received"] == 6
    assert record.tcp["mss"] > 500


def test_a_connection_that_was_accepted(tmp_path: Path) -> None:
    text = (
        "s = socket.create_server(('127.0.0.1', 0)); open(TMP + '/port', "
        "'w').write(str(s.getsockname()[1])); ready()\n"
        "a = s.accept()[0]; open(TMP + '/accepted', 'w').close()"
    )
    with running(text, tmp_path) as program:
        wait_until((tmp_path / "port").exists, 60, "the port")
        with socket.create_connection(
            ("127.0.0.1", int((tmp_path / "port").read_text()))
        ) as client:
            wait_until((tmp_path / "accepted").exists, 60, "accept")
            found = _look(program.pid)
            assert [c.record.state for c in found.connections] == ["listen", "established"]
            (only,) = found.external
            assert (only.record.direction, only.record.peer_process) == ("accepted", ME)
            assert only.record.peer.endswith(f":{client.getsockname()[1]}")


def test_datagrams(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        udp.bind(("127.0.0.1", 0))
        log.bind(str(tmp_path / "log"))
        text = (
            "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(('127.0.0.1', "
            f"{udp.getsockname()[1]}))\n"
            "l = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); l.connect(TMP + '/log')"
        )
        with running(text, tmp_path) as program:
            inet, unix = (c.record for c in _look(program.pid).external)
    assert (inet.protocol, inet.type, inet.direction) == ("udp", "dgram", "initiated")
    assert (unix.family, unix.type, unix.peer, unix.peer_process) == (
        "unix",
        "dgram",
        f"{tmp_path}/log",
        ME,
    )


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("accepted", [True, False])
def test_unix_connections(kind: socket.SocketKind, accepted: bool, tmp_path: Path) -> None:
    place = str(tmp_path / "outside.sock")
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(place)
        listener.listen()
        with running(
            f"s = socket.socket(socket.AF_UNIX, {int(kind)}); s.connect({place!r})", tmp_path
        ) as program:
            peer = listener.accept()[0] if accepted else None
            found = _look(program.pid)
            (only,) = found.external
            assert (only.record.peer, only.record.direction, only.record.peer_process) == (
                place,
                "initiated",
                ME,
            )
            assert only.held.waiting == (not accepted)
            assert found.unix_keys() == ([f"unix[{only.record.inode}]"] if accepted else [])
            if peer is not None:
                peer.close()


def test_a_dump_waits_for_the_trees_own_server_to_accept(tmp_path: Path) -> None:
    """A second at most: a server that does not is one that is busy."""
    text = (
        "s = socket.create_server(('127.0.0.1', 0)); c = "
        "socket.create_connection(s.getsockname()); c.sendall(b'x'); ready()\n"
        "while not os.path.exists(TMP + '/go'): time.sleep(.01)\n"
        "a = s.accept()[0]"
    )
    with running(text, tmp_path) as program:
        wait_until(lambda: _look(program.pid).external, 60, "the connection")
        (only,) = _look(program.pid).external
        assert (only.record.queued, only.record.direction) == (True, "initiated")
        assert only.record.tcp["bytes_acked"] == len(b"x") + 1  # the beginning is acknowledged, too
        survey = Survey(Config(), Reporter(), ending=True)
        survey.ahead(program.pid)
        began = time.monotonic()
        survey.wait(program.pid)
        assert time.monotonic() - began > 0.9
        later = Survey(Config(), Reporter(), ending=True)
        later.ahead(program.pid)
        (tmp_path / "go").touch()
        later.wait(program.pid)
        assert _look(program.pid).external == []


def test_a_connection_inside_the_tree_is_internal(tmp_path: Path) -> None:
    text = (
        "s = socket.create_server(('127.0.0.1', 0)); c = "
        "socket.create_connection(s.getsockname()); a = s.accept()[0]"
    )
    with running(text, tmp_path) as program:
        found = _look(program.pid)
    assert found.external == []
    assert sorted(c.record.direction for c in found.connections) == ["", "accepted", "initiated"]


def test_options_are_put_on_another_socket() -> None:
    with socket.socket() as one, socket.socket() as other:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (3).to_bytes(8, "little") + bytes(8))
        found = sockopts.changed(one)
        assert found == {"TCP_KEEPIDLE": 77, "SO_RCVTIMEO": [3, 0]}
        assert sockopts.changed(other) == {}
        assert sockopts.apply(other, json.loads(json.dumps(found))) == []
        assert sockopts.changed(other) == found
        odd: dict[str, Any] = {
            "SO_NONSENSE": 1,
            "SO_LINGER": "x",
            "TCP_NODELAY": [1],
            "SO_RCVTIMEO": [1],
        }
        assert sorted(sockopts.apply(other, odd)) == sorted(odd)


def test_a_process_that_ends_while_we_look_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = f"s = socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))"
        with running(text, tmp_path) as program:
            gone = subprocess.Popen(["true"])
            gone.wait()
            tree = read_tree(program.pid)
            seen = [*tree, tree[0]._replace(pid=gone.pid, ns_pids=(gone.pid,))]
            monkeypatch.setattr("criuctl.connections.survey.read_tree", lambda pid: seen)
            survey = Survey(Config(), Reporter())
            survey.ahead(program.pid)
            (only,) = survey.look(program.pid)
            assert (only.record.pid, only.record.policy) == (program.pid, "hangup")


# -- criuctl connections
# --------------------------------------------------------------------------------------------


@pytest.fixture
def echo(home: Home) -> Iterator[Echo]:
    server = Echo("tcp")
    yield server
    server.stop()


def _rules(criuctl: Criuctl, *rules: dict[str, Any]) -> None:
    criuctl.extra["CRIUCTL_CONNECTION_RULES"] = json.dumps(rules)


def test_the_check_says_what_the_rules_would_do(echo: Echo, zoo: Zoo, criuctl: Criuctl) -> None:
    """A tree that a rule does not give up cannot be dumped, and a rule that criuctl does not
    understand is no rule.
    """
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)

    def checked() -> tuple[int, list[tuple[str, str]]]:
        answer = criuctl("check", animal.pid, check=False)
        return answer.get("exit_code", 0), [
            (f["level"], f["code"]) for f in answer.get("findings", [])
        ]

    assert checked() == (0, [("warning", "connections-hangup")])
    _rules(criuctl, {"policy": "refuse"})
    answer = criuctl("check", animal.pid, check=False)
    (finding,) = answer["findings"]
    assert (answer["ok"], finding["level"], finding["code"]) == (
        False,
        "error",
        "connection-refuse",
    )
    assert finding["pid"] == animal.pid and echo.address in finding["text"]
    _rules(criuctl, {"policy": "keep", "match": {"prot": "tcp"}})
    assert checked()[0] == 2
    _rules(criuctl, {"policy": "reconnect", "application": "tcp"})
    assert checked() == (0, [])


MANY = "c = [socket.create_connection(('127.0.0.1', {port})) for _ in range(5)]"
SERVED = """
s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]
c = outside(lambda: [socket.create_connection(('127.0.0.1', port)) for _ in range(5)])
a = [s.accept()[0] for _ in c]; [one.close() for one in c]
"""


def test_what_the_default_hangs_up_is_said_once(
    echo: Echo, criuctl: Criuctl, tmp_path: Path
) -> None:
    """A program that lives of a connection ends of that; a server's clients come again."""
    port = int(echo.address.rpartition(":")[2])
    with running(MANY.format(port=port), tmp_path) as program:
        (checked,) = criuctl("check", program.pid)["findings"]
        assert (
            criuctl(
                "dump", program.pid, "--name", "kept", "--leave-running", "--connections", "hangup"
            )["warnings"]
            == []
        )
        (warning,) = criuctl("dump", program.pid, "--name", "ended")["warnings"]
    assert (checked["level"], checked["code"]) == ("warning", "connections-hangup")
    for said in (checked["text"], warning):
        assert (
            "5 connections" in said
            and said.count(f"{echo.address} (PID {program.pid} fd ") == 3
            and "and 2 more" in said
        )
    assert "`--connections keep`" in checked["hint"] and "`--connections keep`" in warning
    with running(SERVED, tmp_path) as program:
        levels = {
            f["level"]
            for f in criuctl("check", program.pid)["findings"]
            if f["code"] == "connections-hangup"
        }
        assert levels == {"info"}


def test_they_are_listed_with_what_would_become_of_them(
    echo: Echo, zoo: Zoo, criuctl: Criuctl
) -> None:
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)
    animal.remember()
    (default,) = criuctl("connections", animal.pid)
    assert (default["peer"], default["policy"], default["pid"]) == (
        echo.address,
        "hangup",
        animal.pid,
    )
    assert default["options"]["TCP_USER_TIMEOUT"] == 34567
    port = int(echo.address.rpartition(":")[2])
    _rules(
        criuctl,
        {
            "match": {"port": port, "process": "python*"},
            "policy": "reconnect",
            "application": "tcp",
        },
    )
    (ruled,) = criuctl("connections", animal.pid)
    assert (ruled["policy"], ruled["application"]) == ("reconnect", "tcp")
    (wished,) = criuctl("connections", animal.pid, "--connections", "refuse")
    assert wished["policy"] == "refuse"
    shown = criuctl.start("connections", animal.pid, json_output=False)
    assert shown.process.wait(60) == 0
    assert echo.address in shown.out.read_text()
    assert "reconnect (tcp)" in shown.out.read_text()
    assert animal.differences(animal) == []
    assert animal.ask()["answered"] == 1


def test_an_invalid_rule_is_refused_before_anything(echo: Echo, zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)
    _rules(criuctl, {"match": {"prot": 1}})
    for words in (("connections", animal.pid), ("dump", animal.pid)):
        answer = criuctl(*words, check=False)
        assert answer["exit_code"] == 2
        assert "connection_rules[1].match: unknown key 'prot'" in answer["error"]["message"]
    assert animal.ask()["answered"] == 1


def test_host_names_of_rules_are_resolved_once(echo: Echo, zoo: Zoo) -> None:
    """The name is in the record, where a restore finds it; an unknown name is reported and matches
    nothing.
    """
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)
    raw: list[dict[str, Any]] = [
        {"match": {"host": "nowhere.invalid"}, "policy": "refuse"},
        {"match": {"host": ["other.invalid", "localhost"]}, "policy": "keep"},
    ]
    reporter = Reporter()
    survey = Survey(Config(connection_rules=tuple(("here", rule) for rule in raw)), reporter)
    survey.ahead(animal.pid)
    (only,) = survey.look(animal.pid)
    assert (only.record.policy, only.record.host) == ("keep", "localhost")
    assert len(reporter.warnings) == 2
    assert "nowhere.invalid" in reporter.warnings[0]


# -- refuse and drain
# -----------------------------------------------------------------------------------------------


def test_refused_by_a_rule(echo: Echo, zoo: Zoo, criuctl: Criuctl) -> None:
    """Exit 10, naming the connection; nothing is touched.  The command line has the last word."""
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)
    _rules(criuctl, {"match": {"peer": "127.0.0.0/8", "protocol": "tcp"}, "policy": "refuse"})
    animal.remember()
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 10
    assert echo.address in answer["error"]["message"]
    assert answer["error"]["fd"] is not None
    assert animal.differences(animal) == []
    report = criuctl("dump", animal.pid, "--leave-running", "--connections", "hangup")
    assert [c["policy"] for c in report["connections"]] == ["hangup"]
    assert animal.ask()["answered"] == 1


@pytest.mark.parametrize("by", ["option", "rule"])
def test_a_busy_connection_is_waited_for(by: str, zoo: Zoo, criuctl: Criuctl) -> None:
    """The program takes its time to read what its peer has sent; the dump begins when all is read
    and nothing comes any more.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = f"import os, socket, time; s = socket.create_connection(('127.0.0.1', {port}))\n"
        text += "while not os.path.exists('read-on'): time.sleep(0.02)\nwhile s.recv(64): pass"
        animal = _program(zoo, text)
        with listener.accept()[0] as peer:
            peer.sendall(b"x" * 20)
            if by == "rule":
                _rules(criuctl, {"match": {"port": port}, "drain": 600})
            dump = criuctl.start(
                "dump",
                animal.pid,
                "--leave-running",
                *(["--drain", "600"] if by == "option" else []),
            )
            with pytest.raises(TimeoutError):
                dump.process.wait(2)
            (animal.folder / "read-on").touch()
            assert dump.process.wait(120) == 0, dump.output()
            report = dump.json()
            (record,) = report["connections"]
            assert (record["tcp"]["bytes_received"], record["rqueue"]) == (20, 0)
            assert report["warnings"] == []


def test_a_connection_that_does_not_become_idle_is_reported(zoo: Zoo, criuctl: Criuctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        animal = _program(
            zoo,
            (
                f"import signal, socket; s = socket.create_connection(('127.0.0.1', {port})); "
                "signal.pause()"
            ),
        )
        with listener.accept()[0] as peer:
            peer.sendall(b"nobody reads this")
            report = criuctl("dump", animal.pid, "--leave-running", "--drain", "0.3")
    assert len(report["warnings"]) == 1
    assert "did not become idle" in report["warnings"][0]
    assert report["connections"][0]["rqueue"] == 17


def test_who_is_busy_when_frozen_is_met_later(zoo: Zoo, criuctl: Criuctl) -> None:
    """A request is under way, which only the frozen connection tells: the tree runs on until the
    answer is there.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = (
            f"import signal, socket, time; s = socket.create_connection(('127.0.0.1', {port}))\n"
            # which side spoke last is decided by the kernel's clock, which is coarse
            "time.sleep(0.1); s.sendall(b'?')\n"
            "s.recv(1); open('answered', 'w').close(); signal.pause()"
        )
        animal = _program(zoo, text)
        with listener.accept()[0] as peer:
            assert peer.recv(1) == b"?"
            _rules(
                criuctl,
                {"match": {"port": port}, "policy": "reconnect", "application": "tcp", "drain": 60},
            )
            with paused(criuctl, "freeze#2", "dump", animal.pid, "--leave-running") as held:
                peer.sendall(b"!")
                wait_until(
                    (animal.folder / "answered").exists, 60, "the program, which is not frozen"
                )
                held.go_on()
                assert held.command.process.wait(60) == 0
            (record,) = held.command.json()["connections"]
            assert (record["policy"], record["reason"]) == ("reconnect", "")


def test_unread_bytes_of_a_server_are_reported_as_at_the_freeze(zoo: Zoo, criuctl: Criuctl) -> None:
    """Not of the look before it, from which a server that works differs all the time."""
    criuctl("store", "init")
    text = (
        "import os, socket, time; l = socket.create_server(('127.0.0.1', 0)); u = "
        "socket.socket(type=socket.SOCK_DGRAM)\n"
        "u.bind(l.getsockname()); open('port', 'w').write(str(l.getsockname()[1]))\n"
        "while not os.path.exists('go'): time.sleep(.01)\n"
        "a = l.accept(); u.recv(9); open('taken', 'w').close(); time.sleep(1000)"
    )
    animal = _program(zoo, text)
    wait_until(
        lambda: (animal.folder / "port").exists() and (animal.folder / "port").read_text(),
        60,
        "the port",
    )
    address = ("127.0.0.1", int((animal.folder / "port").read_text()))
    with ExitStack() as stack:

        def call() -> None:
            stack.enter_context(socket.create_connection(address))
            stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)).sendto(b"x", address)

        call()
        with paused(criuctl, "freeze", "dump", animal.pid, "--leave-running") as held:
            (animal.folder / "go").touch()
            wait_until((animal.folder / "taken").exists, 60, "the server")
            held.go_on()
            assert held.command.process.wait(60) == 0
        assert held.command.json()["warnings"] == []
        with paused(criuctl, "freeze", "dump", animal.pid, "--leave-running") as held:
            call()
            held.go_on()
            assert held.command.process.wait(60) == 0
        warnings = held.command.json()["warnings"]
        assert [
            word in text for word, text in zip(("accepted", "datagrams"), warnings, strict=True)
        ] == [True, True]


def test_who_is_never_at_rest_is_not_waited_for_again_and_again(zoo: Zoo, criuctl: Criuctl) -> None:
    criuctl("store", "init")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = (
            f"import signal, socket, time; s = socket.create_connection(('127.0.0.1', {port}))\n"
            "time.sleep(0.1); s.sendall(b'?'); signal.pause()"
        )
        animal = _program(zoo, text)
        with listener.accept()[0] as peer:
            assert peer.recv(1) == b"?"
            _rules(
                criuctl,
                {
                    "match": {"port": port},
                    "policy": "reconnect",
                    "application": "tcp",
                    "drain": 600,
                },
            )
            steps = steps_of(criuctl, "dump", animal.pid, "--leave-running")
            assert len([step for step in steps if step.startswith("freeze")]) == 5
            assert steps[-1] == "done"


def _program(zoo: Zoo, text: str) -> Animal:
    """A tree of one process that runs `text`; it is not waited for."""
    import sys

    return zoo.launch([sys.executable, "-c", text], name="program", ready=False, quiet=False)


# -- unix sockets with an outside peer
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "seqpacket", "unix-dgram", "udp"])
def test_an_outside_peer_does_not_fail_a_dump(kind: str, home: Home, zoo: Zoo, trip: Trip) -> None:
    """The tree that goes on has its connection still.  Nothing of a datagram socket is lost in
    another kernel: it is kept.
    """
    echo = Echo(kind, "127.0.0.1:0" if kind == "udp" else str(home.path / "outside.sock"))
    try:
        animal = zoo.launch("caller.py", "blocking", kind, echo.address)
        assert animal.ask()["answered"] == 1
        report = trip.snapshot(animal)
        (record,) = report["connections"]
        assert (record["peer"], record["external"]) == (echo.address, True)
        assert record["policy"] == ("keep" if kind in ("unix-dgram", "udp") else "hangup")
        assert animal.ask()["answered"] == 1
        assert report["warnings"] == []
    finally:
        echo.stop()


def test_a_client_that_waits_in_an_outside_queue_is_dumped(
    home: Home, zoo: Zoo, trip: Trip
) -> None:
    place = str(home.path / "outside.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        animal = zoo.launch("peer.py", "unix-stream", place)
        report = trip.snapshot(animal)
        assert [(c["peer"], c["policy"]) for c in report["connections"]] == [(place, "hangup")]
        with listener.accept()[0] as peer:
            assert animal.ask()["outcome"] == "sent"
            assert peer.recv(64) == b"1\n"


# -- asking the peer
# ------------------------------------------------------------------------------------------------


def test_a_peer_that_is_silent_does_not_fail_the_dump(zoo: Zoo, criuctl: Criuctl) -> None:
    """A 'PostgreSQL' that says nothing: the policy is a hang-up, the reason is reported, and the
    dump is done.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = (
            f"import signal, socket; s = socket.create_connection(('127.0.0.1', {port})); "
            "signal.pause()"
        )
        animal = _program(zoo, text)
        with listener.accept()[0]:
            _rules(
                criuctl,
                {"match": {"port": port}, "policy": "reconnect", "application": "postgresql"},
            )
            report = criuctl("dump", animal.pid)
    (record,) = report["connections"]
    assert (record["policy"], record["session"]) == ("hangup", {})
    assert record["reason"]
    wait_until(lambda: not animal.alive(), 60, "the end of the tree")


def test_what_cannot_be_rebuilt_is_refused_if_the_rule_says_so(zoo: Zoo, criuctl: Criuctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = (
            f"import signal, socket; s = socket.create_connection(('127.0.0.1', {port})); "
            "signal.pause()"
        )
        animal = _program(zoo, text)
        with listener.accept()[0] as peer:
            peer.sendall(b"half an answer")
            rule = {
                "match": {"port": port},
                "policy": "reconnect",
                "application": "redis",
                "on_failure": "refuse",
            }
            _rules(criuctl, rule)
            answer = criuctl("dump", animal.pid, check=False)
            assert answer["exit_code"] == 10
            assert "not idle" in answer["error"]["message"]
            assert animal.alive()
            os.kill(animal.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    [
        "unix-pair-outside",
        "unix-datagram-pair-outside",
        "unix-stream-outside",
        "unix-waiting-outside",
    ],
)
def test_obstacles_of_raw_criu_are_dumped(name: str, tmp_path: Path, criuctl: Criuctl) -> None:
    case = next(case for case in DUMPABLE if case.name == name)
    with running(case.program, tmp_path) as program:
        report = criuctl("dump", program.pid, "--leave-running")
        assert [(c["family"], c["external"]) for c in report["connections"]] == [("unix", True)]
        assert report["connections"][0]["peer_process"].startswith(f"{program.outer} (")


def test_clients_of_a_unix_server_in_the_tree(zoo: Zoo, trip: Trip, home: Home) -> None:
    """The accepted end is hung up, the listening socket is intact and has its name."""
    place = home.path / "inside.sock"
    text = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(place)!r}); s.listen()\n"
        "while True:\n a = s.accept()[0]; a.sendall(b'hello'); a.recv(1)"
    )
    animal = _program(zoo, text)
    wait_until(place.exists, 60, "the server")
    with _client(place) as client:
        assert client.recv(9) == b"hello"
        report = trip.dump(animal)
        assert [(c["direction"], c["local"], c["policy"]) for c in report["connections"]] == [
            ("accepted", str(place), "hangup")
        ]
        assert client.recv(9) == b""
    trip.restore(report, animal, equal=False)
    with _client(place) as client:
        assert client.recv(9) == b"hello"


def _client(place: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    wait_until(lambda: client.connect_ex(str(place)) == 0, 60, "a server listens")
    return client


def test_real_servers_are_known_by_asking(postgres_server: PostgresServer) -> None:
    """As it is for a server on another host, whose process is not visible here."""
    with redis_server() as redis:
        peers: dict[str, Dial] = {
            "pg": (socket.socket, ("127.0.0.1", postgres_server.port)),
            "redis": (socket.socket, ("127.0.0.1", redis.port)),
        }
        assert probe(peers, seconds=15.0) == {"pg": "postgresql", "redis": "redis"}
