"""Connections whose other end is outside the tree: never a reason to fail, never a hang, and each
is reported.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


class Echo:
    """A server outside the tree: greets, then sends every line back; notes what it saw."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self.lines: list[bytes] = []
        self.ended: list[str] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            assert connection.recv(64) == b"hello\n"
            connection.sendall(b"welcome")
            while data := connection.recv(64):
                self.lines.append(data)
                connection.sendall(data)
            self.ended.append("eof")
        except OSError as error:
            self.ended.append(type(error).__name__)

    def close(self) -> None:
        # wakes the thread in accept; close alone would leave it listening
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def echo(home: Home) -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def test_by_default_the_program_sees_the_end_of_it(echo: Echo, zoo: Zoo, trip: Trip) -> None:
    """Nothing said: the dump does not fail, and after the restore the program gets EOF or an error
    at once, no hang.
    """
    animal = zoo.launch("peer.py", "tcp", echo.address)
    assert animal.ask()["outcome"] == "echo"
    report = trip.dump(animal)
    assert [c["peer"] for c in report["connections"]] == [echo.address]
    restored = trip.restore(report, animal, equal=False)
    assert [(c["policy"], c["outcome"]) for c in restored.answer["connections"]] == [
        ("hangup", "hangup")
    ]
    answer = restored.ask()
    assert answer["outcome"] in ("eof", "BrokenPipeError+eof", "ConnectionResetError+eof")
    assert answer["seconds"] < 10  # a hang is reported after 30


def test_hangup(echo: Echo, zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("peer.py", "tcp", echo.address)
    restored = trip.restore(trip.dump(animal, "--connections", "hangup"), animal, equal=False)
    answer = restored.ask()
    assert answer["outcome"] in ("eof", "BrokenPipeError+eof", "ConnectionResetError+eof")
    assert answer["seconds"] < 10  # a hang is reported after 30


def test_keep(echo: Echo, zoo: Zoo, trip: Trip) -> None:
    """The peer holds on: the connection is established again, the next line is echoed, nothing was
    lost or doubled.
    """
    animal = zoo.launch("peer.py", "tcp", echo.address)
    assert animal.ask()["outcome"] == "echo"
    report = trip.dump(animal, "--connections", "keep")
    # the server is gone: no kernel may answer it, and it is sent again later
    echo.connections[0].sendall(b"meanwhile\n")
    restored = trip.restore(report, animal, "--connections", "keep", equal=False)
    assert [(c["policy"], c["outcome"]) for c in restored.answer["connections"]] == [
        ("keep", "kept")
    ]
    first = restored.ask()["outcome"]
    assert "meanwhile" in first
    second = restored.ask()["outcome"]
    # its echoes come in one piece or in two
    assert any(word in second for word in ("echo", "2", "3"))
    wait_until(
        lambda: b"".join(echo.lines).endswith(b"3\n"), 60, "the server has read the last line, too"
    )
    assert echo.ended == []
    assert b"".join(echo.lines) == b"1\n2\n3\n"


def test_what_ended_with_the_tree_cannot_be_kept(echo: Echo, zoo: Zoo, trip: Trip) -> None:
    """The peer saw the end at the dump; `--connections keep` comes too late then, and is refused
    before anything starts.
    """
    animal = zoo.launch("peer.py", "tcp", echo.address)
    report = trip.dump(animal)
    wait_until(lambda: echo.ended == ["eof"], 60, "the server sees the end")
    refused = trip.criuctl("restore", report["checkpoint"], "--connections", "keep", check=False)
    assert refused["exit_code"] == 4
    assert "ended with the tree" in refused["error"]["message"]
    restored = trip.restore(report, animal, equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == ["hangup"]


def test_left_running_keeps_its_connection(echo: Echo, zoo: Zoo, trip: Trip) -> None:
    """A snapshot does not touch the connection of the tree that goes on; its restored copy sees the
    end.
    """
    animal = zoo.launch("peer.py", "tcp", echo.address)
    report = trip.snapshot(animal)
    assert animal.ask()["outcome"] == "echo"
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    assert copy.ask()["outcome"] in ("eof", "BrokenPipeError+eof", "ConnectionResetError+eof")
    assert animal.ask()["outcome"] == "echo"
    assert echo.ended == []


def test_an_open_door_with_a_guest_waiting(zoo: Zoo, trip: Trip) -> None:
    """A connection that was not accepted yet does not prevent a dump."""
    from urllib.request import urlopen

    animal = zoo.launch("server.py", quiet=False)
    port = int((animal.folder / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as idle:
        report = trip.dump(animal)
        trip.restore(report, animal, equal=False)
        idle.settimeout(60)
        try:
            idle.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert idle.recv(10) in (b"", b"HTTP/1.1 2")
        except (ConnectionResetError, BrokenPipeError):
            pass  # to see its end is as good as to be served
    assert urlopen(f"http://127.0.0.1:{port}/hit", timeout=60).read() == b"1"


def test_a_refused_policy(echo: Echo, zoo: Zoo, criuctl: Criuctl) -> None:
    """``refuse`` means: not now. Nothing is touched."""
    animal = zoo.launch("peer.py", "tcp", echo.address)
    animal.remember()
    answer = criuctl("dump", animal.pid, "--connections", "refuse", check=False)
    assert answer["exit_code"] == 10, answer
    assert animal.differences(animal) == []
    assert animal.ask()["outcome"] == "echo"


def test_a_datagram_socket_to_the_system_log(zoo: Zoo, trip: Trip) -> None:
    """The commonest outside unix socket: /dev/log and its like."""
    place = str(zoo.home / "log.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(place)
        log.settimeout(60)
        animal = zoo.launch("peer.py", "unix-dgram", place)
        assert log.recv(64) == b"hello\n"
        restored = trip.restore(trip.dump(animal), animal)
        assert restored.ask()["outcome"] == "sent"
        assert log.recv(64) == b"1\n"


@pytest.mark.parametrize("when", ["accepted", "still waiting"])
def test_half_of_a_unix_stream(when: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Raw CRIU refuses it; here it is reported and dumped, and the program sees its end after the
    restore.
    """
    place = str(zoo.home / "outside.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        animal = zoo.launch("peer.py", "unix-stream", place)
        accepted = listener.accept()[0] if when == "accepted" else None
        checked = criuctl("check", animal.pid)
        assert [f["level"] for f in checked["findings"] if f["code"] == "unix-peer-outside"] == [
            "info"
        ]
        report = trip.dump(animal)
        restored = trip.restore(report, animal, equal=False)
        assert [(c["peer"], c["outcome"]) for c in restored.answer["connections"]] == [
            (place, "hangup")
        ]
        assert restored.ask()["outcome"] == "BrokenPipeError"
        assert os.path.exists(place)  # it is not ours to remove
        if accepted is not None:
            accepted.close()


def test_data_on_an_unaccepted_unix_stream_is_refused(zoo: Zoo, criuctl: Criuctl) -> None:
    """CRIU cannot get it out of the queue: said by the preflight, with descriptor and remedy, and
    the tree runs on.
    """
    place = str(zoo.home / "outside.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        animal = zoo.launch("peer.py", "unix-stream", place)
        assert animal.ask()["outcome"] == "sent"
        animal.remember()
        answer = criuctl("dump", animal.pid, check=False)
        assert answer["exit_code"] == 4
        assert answer["error"]["hint"]
        findings = criuctl("check", animal.pid, check=False)["findings"]
        assert any(
            f["level"] == "error" and f["pid"] == animal.pid and f["fd"] is not None
            for f in findings
        )
        assert animal.differences(animal) == []
        assert animal.ask()["outcome"] == "sent"


@pytest.mark.parametrize("policy", ["hangup", "keep", "reconnect", "refuse"])
def test_what_the_trees_own_server_has_not_accepted(policy: str, zoo: Zoo, trip: Trip) -> None:
    """CRIU loses what waits in the queue, and its client would wait for an answer for ever."""
    animal = zoo.launch("unaccepted.py")
    report = trip.dump(animal, "--connections", policy)
    assert [c["policy"] for c in report["connections"]] == ["reconnect", "reconnect", "hangup"]
    restored = trip.restore(report, animal, "--connections", policy, equal=False)
    assert [c["outcome"] for c in restored.answer["connections"]] == [
        "reconnected",
        "reconnected",
        "hangup",
    ]
    assert "what was sent on it is lost" in restored.answer["connections"][2]["reason"]
    restored.ask()
