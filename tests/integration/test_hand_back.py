"""Connections to the outside are given back on a restore: connected again or hung up, as the rules
say, on the same sockets.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.request import urlopen

import pytest
from support.command import Criuctl, Home
from support.echo import Echo
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

from criuctl.proc import netfilter
from criuctl.proc.namespace_sockets import socket_inside

pytestmark = pytest.mark.integration

Server = Callable[..., Echo]


@pytest.fixture
def server(home: Home) -> Iterator[Server]:
    """Makes servers; kinds of unix sockets get a path in the test's folder."""
    made: list[Echo] = []

    def make(kind: str, host: str = "127.0.0.1", **more: Any) -> Echo:
        made.append(
            Echo(
                kind,
                f"{host}:0" if kind in ("tcp", "udp") else str(home.path / "outside.sock"),
                **more,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.mark.parametrize("way", ["blocking", "select", "epoll"])
@pytest.mark.parametrize(
    ("kind", "host"), [("tcp", "127.0.0.1"), ("tcp", "[::1]"), ("unix", ""), ("seqpacket", "")]
)
def test_connected_again(
    kind: str, host: str, way: str, server: Server, zoo: Zoo, trip: Trip
) -> None:
    """The server has been restarted meanwhile; the client's next question is answered on the socket
    it has always had.
    """
    echo = server(kind, host)
    animal = zoo.launch("caller.py", way, kind, echo.address)
    assert animal.ask()["answered"] == 1
    report = trip.dump(animal, "--connections", "hangup")
    echo.stop()
    echo.start()
    restored = trip.restore(report, animal, "--connections", "reconnect", equal=False)
    (connection,) = restored.answer["connections"]
    assert (connection["policy"], connection["outcome"], connection["peer"]) == (
        "reconnect",
        "reconnected",
        echo.address,
    )
    answer = restored.ask()
    assert answer["answered"] == 1
    assert answer["events"] == [["question 1\n", "question 2\n"]]
    assert answer["nonblocking"] == ([2048] if way == "epoll" else [0])
    if kind == "tcp":
        assert (answer["user_timeouts"], answer["nodelay"]) == ([34567], [1])


@pytest.mark.parametrize("way", ["blocking", "select", "epoll"])
@pytest.mark.parametrize("kind", ["tcp", "udp", "unix", "seqpacket", "unix-dgram"])
def test_hung_up(kind: str, way: str, server: Server, zoo: Zoo, trip: Trip) -> None:
    """Every reader sees the end at once, whatever the socket and however it waits; writing is an
    error, never a hang.
    """
    echo = server(kind)
    animal = zoo.launch("caller.py", way, kind, echo.address)
    assert animal.ask()["answered"] == 1
    restored = trip.restore(trip.dump(animal), animal, "--connections", "hangup", equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["hangup"]
    answer = restored.ask()
    assert "send BrokenPipeError" in answer["events"][0]
    assert ("hup" if way == "epoll" else "eof") in answer["events"][0]
    assert answer["seconds"] < 10


@pytest.mark.parametrize("kind", ["udp", "unix-dgram"])
def test_datagrams_are_kept_by_default(kind: str, server: Server, zoo: Zoo, trip: Trip) -> None:
    """Nothing of them lives elsewhere, so they are what they were."""
    echo = server(kind)
    animal = zoo.launch("caller.py", "epoll", kind, echo.address)
    report = trip.dump(animal)
    echo.stop()
    echo.start()
    restored = trip.restore(report, animal, equal=False)
    assert [(c["policy"], c["outcome"]) for c in restored.answer["connections"]] == [
        ("keep", "kept")
    ]
    assert restored.ask()["answered"] == 1


def test_one_socket_of_many_holders(server: Server, zoo: Zoo, trip: Trip) -> None:
    """A duplicate and a child's copy are still the same connection afterwards: one server side
    serves all three.
    """
    echo = server("tcp")
    animal = zoo.launch("caller.py", "shared", "tcp", echo.address)
    assert animal.ask()["answers"] == ["parent\n", "parent\n", "child\n"]
    report = trip.dump(animal, "--connections", "reconnect")
    echo.stop()
    echo.start()
    restored = trip.restore(report, animal, equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["reconnected"]
    assert restored.ask()["answers"] == ["parent\n", "parent\n", "child\n"]
    assert echo.accepted == 1


def test_accepted_connections_end_and_the_listener_goes_on(zoo: Zoo, trip: Trip) -> None:
    """Only a client can connect again, so its old connection ends; a new one is served."""
    animal = zoo.launch("server.py", quiet=False)
    port = int((animal.folder / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /hit HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(9) == b"HTTP/1.1 "
        report = trip.dump(animal)
        restored = trip.restore(report, animal, "--connections", "reconnect", equal=False)
        outcomes = [
            (c["outcome"], "accepted" in c["reason"]) for c in restored.answer["connections"]
        ]
        assert outcomes == [("hangup", True)]
    assert urlopen(f"http://127.0.0.1:{port}/hit", timeout=60).read() == b"2"


@pytest.mark.parametrize("kind", ["tcp", "unix", "unix-dgram"])
def test_the_server_is_away_for_a_while(
    kind: str, server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The restore waits for it, with the tree held, and tries again until it is there."""
    echo = server(kind)
    animal = zoo.launch("caller.py", "blocking", kind, echo.address)
    report = trip.dump(animal, "--connections", "reconnect")
    echo.stop()
    with paused(criuctl, "connections", "restore", report["checkpoint"]) as held:
        held.go_on()
        wait_until(
            lambda: "criuctl-reconnect" in threads_of(held.command.process.pid),
            60,
            "tries to connect",
        )
        began = time.monotonic()
        returned = echo.later(lambda: time.monotonic() - began > 1.5)
        held.command.process.wait(120)
        returned.join()
    answer = held.command.json()
    restored = zoo.adopt(answer["pid"], animal)
    (connection,) = answer["connections"]
    assert connection["outcome"] == "reconnected"
    assert connection["attempts"] > 1
    assert restored.ask()["answered"] == 1


def test_the_server_never_comes_back(
    server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Within the deadline it is given up: hung up and reported, exit 11; or, if the rule says so,
    nothing is restored.
    """
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address)
    report = trip.dump(animal, "--connections", "reconnect")
    echo.stop()
    rule = [
        {
            "match": {"protocol": "tcp"},
            "policy": "reconnect",
            "on_failure": "refuse",
            "deadline": 0.5,
        }
    ]
    config = criuctl.home.path / "refuse.yaml"
    config.write_text(json.dumps({"connection_rules": rule}))
    refused = criuctl("--config", config, "restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 6
    assert echo.address in refused["error"]["message"]
    assert zoo.find(animal) == []
    began = time.monotonic()
    answer = criuctl("restore", report["checkpoint"], "--connections-deadline", "1", check=False)
    assert time.monotonic() - began < 25
    assert answer["exit_code"] == 11
    (connection,) = answer["connections"]
    assert connection["outcome"] == "failed"
    assert "refused" in connection["reason"]
    assert zoo.adopt(answer["pid"], animal).ask()["answered"] == 0
    echo.start()


def test_refused(server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """``refuse`` at the restore: exit 10, nothing is started; the plan says so before."""
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address)
    report = trip.dump(animal, "--connections", "hangup")
    plan = criuctl(
        "restore", report["checkpoint"], "--connections", "refuse", "--dry-run", check=False
    )
    assert [c["policy"] for c in plan["connections"]] == ["refuse"]
    assert (
        criuctl("restore", report["checkpoint"], "--connections", "refuse", check=False)[
            "exit_code"
        ]
        == 10
    )
    assert zoo.find(animal) == []


def test_a_copy_of_a_datagram_socket(server: Server, zoo: Zoo, trip: Trip) -> None:
    """Kept, it would have its original's port; so it gets one of its own, and each has its own
    answers.
    """
    echo = server("udp")
    animal = zoo.launch("caller.py", "epoll", "udp", echo.address, quiet=False)
    copy = trip.restore(trip.snapshot(animal), animal, "--as", "copy", equal=False)
    assert [c["outcome"] for c in copy.answer["connections"]] == ["reconnected"]
    assert [copy.ask()["answered"], animal.ask()["answered"], copy.ask()["answered"]] == [1, 1, 1]


def test_a_copy_next_to_the_original(server: Server, zoo: Zoo, trip: Trip) -> None:
    """The original keeps its connection, the copy gets one of its own; with ``keep`` it would be
    the same: refused.
    """
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address, quiet=False)
    report = trip.snapshot(animal)
    refused = trip.criuctl(
        "restore", report["checkpoint"], "--as", "kept", "--connections", "keep", check=False
    )
    assert refused["exit_code"] == 4
    copy = trip.restore(report, animal, "--as", "copy", "--connections", "reconnect", equal=False)
    assert [c["outcome"] for c in copy.answer["connections"]] == ["reconnected"]
    assert copy.ask()["answered"] == 1
    assert animal.ask()["answered"] == 1
    assert echo.accepted == 2


def test_five_hundred(server: Server, zoo: Zoo, trip: Trip) -> None:
    """Many connections of one tree are given back at the same time."""
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address, "500")
    report = trip.dump(animal, "--connections", "reconnect")
    assert len(report["connections"]) == 500
    restored = trip.restore(report, animal, equal=False)
    connections = restored.answer["connections"]
    assert {c["outcome"] for c in connections} == {"reconnected"}
    seconds = max(c["seconds"] for c in connections)
    print(f"500 connections handed back in {seconds:.2f} s")
    assert seconds < 30
    assert restored.ask()["answered"] == 500
    restored.end()
    trip.criuctl("restore", report["checkpoint"], "--dry-run")  # takes the dead tree's report away


@pytest.mark.crash
def test_killed_while_handing_back(server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """kill -9 or ^C in the middle of it leaves nothing, and the next restore does it all."""
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address)
    report = trip.dump(animal, "--connections", "reconnect")
    echo.stop()
    arguments = ("restore", report["checkpoint"])
    with paused(criuctl, "connections", *arguments) as held:
        held.kill()
    held.wait_settled(restoring=animal)
    assert zoo.find(animal) == []
    with paused(criuctl, "connections", *arguments) as held:
        held.go_on()
        wait_until(
            lambda: "criuctl-reconnect" in threads_of(held.command.process.pid),
            60,
            "tries to connect",
        )
        held.kill(signal.SIGINT)
        began = time.monotonic()
        held.wait_settled(restoring=animal)
        assert time.monotonic() - began < 25  # the peer is away: it would wait for 30 s
    assert held.command.process.wait(0) == 130
    assert zoo.find(animal) == []
    echo.start()
    assert trip.restore(report, animal, equal=False).ask()["answered"] == 1


@pytest.mark.crash
@pytest.mark.parametrize("how", ["killed", "fails"])
def test_what_is_kept_stays_locked_for_the_next_try(
    how: str, server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The dump's firewall lock holds the peer off until a restore has come through; then it is
    gone.
    """
    echo = server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", echo.address)
    before = set(netfilter.tables())
    report = trip.dump(animal, "--connections", "keep")
    wait_until(lambda: echo.accepted, 60, "accepted")
    (connection,) = echo.connected.values()
    connection.sendall(b"news")  # no answer: no reset either
    with paused(criuctl, "connections", "restore", report["checkpoint"]) as held:
        held.kill() if how == "killed" else held.kill_criu()
    held.wait_settled(restoring=animal)
    assert zoo.find(animal) == []
    restored = trip.restore(report, animal, equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["kept"]
    assert restored.ask()["answered"] == 1
    goes(before)


@pytest.mark.crash
@pytest.mark.parametrize("step", ["post-restore", "resume"])
def test_a_killed_restore_leaves_no_lock(step: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Connections inside the tree are locked while it is restored; the next command of any kind
    clears up after a kill.
    """
    animal = zoo.launch("sockets.py")
    before = set(netfilter.tables())
    report = trip.dump(animal)
    with paused(criuctl, step, "restore", report["checkpoint"]) as held:
        held.kill()
    held.wait_settled(restoring=animal)
    for left in zoo.find(animal):
        left.end()
    criuctl("restore", report["checkpoint"], "--dry-run", check=False)
    goes(before)


def goes(before: set[str]) -> None:
    """No firewall table that was not there `before` stays; those of other dumps on this machine
    come and go.
    """
    new = set(netfilter.tables()) - before
    wait_until(lambda: not new & set(netfilter.tables()), 60, f"{new} are gone")


def threads_of(pid: int) -> str:
    """How many threads, and a mark when there are several."""
    return "criuctl-reconnect" if len(os.listdir(f"/proc/{pid}/task")) > 1 else ""


def test_kept_and_connected_again_together(
    server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Rules decide connection by connection; the lock on the kept one does not stand in the way of
    the other.
    """
    kept, renewed = server("tcp"), server("tcp")
    animal = zoo.launch("caller.py", "epoll", "tcp", f"{kept.address},{renewed.address}", "2")
    assert animal.ask()["answered"] == 2
    port = int(renewed.address.rpartition(":")[2])
    config = criuctl.home.path / "rules.yaml"
    config.write_text(
        json.dumps({"connection_rules": [{"match": {"port": port}, "policy": "reconnect"}]})
    )
    report = trip.dump(animal, "--connections", "keep")
    plan = criuctl("--config", config, "restore", report["checkpoint"], "--dry-run")
    assert {c["peer"]: c["policy"] for c in plan["connections"]} == {
        kept.address: "keep",
        renewed.address: "reconnect",
    }
    answer = criuctl("--config", config, "restore", report["checkpoint"])
    assert {c["peer"]: c["outcome"] for c in answer["connections"]} == {
        kept.address: "kept",
        renewed.address: "reconnected",
    }
    assert zoo.adopt(answer["pid"], animal).ask()["answered"] == 2
    assert (kept.accepted, renewed.accepted) == (1, 2)


@pytest.mark.parametrize("pids", ["same", "private"])
def test_the_tree_can_read_its_own_history(
    pids: str, server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """From inside, also in a PID namespace of its own and in a child; never of an earlier life, and
    gone with the tree.
    """
    echo = server("tcp")
    env = {"CRIUCTL_RUN_DIR": str(criuctl.home.run)}
    animal = zoo.launch("caller.py", "shared", "tcp", echo.address, env=env)
    assert animal.ask()["inside"] is None
    report = trip.dump(animal, "--connections", "reconnect", "--name", "caller")
    restored = trip.restore(report, animal, "--pids", pids, equal=False)
    inside = restored.ask()["inside"]
    assert (inside["session"], inside["incarnation"], inside["checkpoint"]) == (
        "caller",
        2,
        report["checkpoint"],
    )
    assert inside["pid"] == animal.pid
    (connection,) = inside["connections"]
    assert (connection["peer"], connection["outcome"]) == (echo.address, "reconnected")
    (left,) = criuctl.home.run.glob("inside/*.json")
    assert left.stat().st_mode & 0o777 == 0o644
    restored.end()
    criuctl("restore", "caller", "--dry-run")
    assert list(criuctl.home.run.glob("inside/*")) == []


@pytest.mark.parametrize("kind", ["unix", "seqpacket"])
def test_what_had_come_is_read_before_the_end(
    kind: str, server: Server, zoo: Zoo, trip: Trip
) -> None:
    """A unix connection that is hung up gives the program first what it had not read yet."""
    echo = server(kind)
    animal = zoo.launch("caller.py", "late", kind, echo.address)
    wait_until(lambda: echo.accepted, 60, "accepted")
    for connection in echo.connected.values():
        connection.sendall(b"last words")
    report = trip.dump(animal)
    assert [c["rqueue"] > 0 for c in trip.criuctl("show", report["checkpoint"])["connections"]] == [
        True
    ]
    assert trip.restore(report, animal, equal=False).ask()["read"] == "last words"


def test_a_descriptor_that_was_not_taken(server: Server, zoo: Zoo, trip: Trip) -> None:
    """In the queue of a connection that is connected again: it belongs to the old session, and goes
    with it.
    """
    echo = server("unix")
    animal = zoo.launch("caller.py", "late", "unix", echo.address)
    wait_until(lambda: echo.accepted, 60, "accepted")
    (connection,) = echo.connected.values()
    with open("/etc/hostname") as file:
        socket.send_fds(connection, [b"take this"], [file.fileno()])
    restored = trip.restore(trip.dump(animal), animal, "--connections", "reconnect", equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["reconnected"]
    wait_until(
        lambda: echo.accepted == 2,
        60,
        "accepted again: to a connection that waits, the end is a reset",
    )
    echo.stop()
    assert restored.ask()["read"] == ""
    echo.start()


def test_a_unix_server_loses_its_client_and_takes_the_next(
    home: Home, zoo: Zoo, trip: Trip
) -> None:
    """The accepted connection bears the listener's name: ending it must not touch the listener's
    path.
    """
    address = str(home.path / "inside.sock")
    animal = zoo.launch("caller.py", "accept", "unix", address)
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as second:
        client.connect(address)
        animal.ask()
        client.sendall(b"hello")
        restored = trip.restore(
            trip.dump(animal), animal, "--connections", "reconnect", equal=False
        )
        assert [c["outcome"] for c in restored.answer["connections"]] == ["hangup"]
        second.connect(address)
        assert restored.ask()["read"] == "hello"


def test_a_hook_connects_it(server: Server, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """An application protocol that criuctl does not know is an executable of the operator's."""
    echo = server("tcp")
    animal = zoo.launch("caller.py", "blocking", "tcp", echo.address)
    report = trip.dump(animal)
    hooks = criuctl.home.path / "hooks"
    (hooks / "reconnect").mkdir(parents=True)
    hook = hooks / "reconnect" / "lines"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    config = criuctl.home.path / "hook.yaml"
    rule = {"match": {"protocol": "tcp"}, "policy": "reconnect", "application": "lines"}
    config.write_text(json.dumps({"connection_rules": [rule], "hook_dirs": [str(hooks)]}))
    echo.stop()
    echo.start()
    answer = criuctl("--config", config, "restore", report["checkpoint"])
    (connection,) = answer["connections"]
    assert (connection["outcome"], connection["application"]) == ("reconnected", "lines")
    assert connection["details"]["said"] == "hi"
    assert zoo.adopt(answer["pid"], animal).ask()["answered"] == 1


@pytest.fixture
def network(home: Home) -> Iterator[str]:
    """A named net namespace with its loopback up, in which 10.20.30.40 is local, as it is nowhere
    else.
    """
    subprocess.run(["ip", "netns", "add", home.token], check=True)
    try:
        subprocess.run(["ip", "-n", home.token, "link", "set", "lo", "up"], check=True)
        subprocess.run(
            ["ip", "-n", home.token, "address", "add", "10.20.30.40/32", "dev", "lo"], check=True
        )
        yield f"/run/netns/{home.token}"
    finally:
        subprocess.run(["ip", "netns", "del", home.token], check=True)


@pytest.mark.parametrize("policy", ["keep", "reconnect"])
def test_in_the_network_of_the_tree(
    policy: str, network: str, server: Server, zoo: Zoo, trip: Trip
) -> None:
    """Addresses are looked for, and peers called, in the net namespace that the tree comes to."""
    namespace = os.open(network, os.O_RDONLY)
    try:
        echo = server("tcp", "10.20.30.40", make=partial(socket_inside, namespace))
        animal = zoo.launch(
            "caller.py", "epoll", "tcp", echo.address, prefix=["nsenter", f"--net={network}", "--"]
        )
        report = trip.dump(animal, "--connections", policy)
        if policy == "reconnect":
            echo.stop()
            echo.start()
        restored = trip.restore(report, animal, equal=False)
        assert [c["outcome"] for c in restored.answer["connections"]] == [
            {"keep": "kept", "reconnect": "reconnected"}[policy]
        ]
        assert restored.ask()["answered"] == 1
    finally:
        os.close(namespace)


HOOK = """#!/usr/bin/env python3
import json, socket, sys

asked = json.load(sys.stdin)
host, port = asked["connection"]["peer"].rsplit(":", 1)
sock = socket.socket(fileno=3)
sock.connect((host, int(port)))
sock.sendall(b"hi")
print(json.dumps({"outcome": "reconnected", "data": {"said": sock.recv(2).decode()}}))
"""
