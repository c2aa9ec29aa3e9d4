"""Peers see the end when the tree that held their connection has been dumped and ended; never while
it lives.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from support.command import Criuctl
from support.pauses import paused
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


def called(zoo: Zoo, listener: socket.socket) -> tuple[Animal, socket.socket]:
    animal = zoo.launch("caller.py", "blocking", "tcp", f"127.0.0.1:{listener.getsockname()[1]}")
    ours = listener.accept()[0]
    ours.settimeout(60)
    return animal, ours


@pytest.mark.parametrize("policy", ["hangup", "reconnect"])
def test_the_peer_sees_an_orderly_end(
    listener: socket.socket, zoo: Zoo, trip: Trip, policy: str
) -> None:
    animal, ours = called(zoo, listener)
    with ours:
        trip.dump(animal, "--connections", policy)
        assert ours.recv(10) == b""


def test_a_kept_connection_ends_for_no_peer(listener: socket.socket, zoo: Zoo, trip: Trip) -> None:
    animal, ours = called(zoo, listener)
    with ours:
        report = trip.dump(animal, "--connections", "keep")
        ours.settimeout(0.5)
        with pytest.raises(TimeoutError):
            ours.recv(10)
        trip.restore(report, animal, "--connections", "keep", equal=False)


def test_a_tree_that_lives_keeps_its_connections(
    listener: socket.socket, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """After a snapshot, and after a dump that was killed when all was held: the answer still comes
    over the old connection.
    """
    animal, ours = called(zoo, listener)
    with ours:
        trip.snapshot(animal, "--connections", "hangup")
        with paused(criuctl, "collect", "dump", animal.pid, "--connections", "hangup") as held:
            held.kill()
            held.wait_settled(animal)
        ours.settimeout(0.5)
        with pytest.raises(TimeoutError):
            ours.recv(10)
        assert animal.alive()


def test_clients_of_a_server_are_reset_and_its_port_is_free(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("server.py", quiet=False)
    port = int((animal.folder / "port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET /hit HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(9) == b"HTTP/1.1 "
        report = trip.dump(animal)
        with pytest.raises(ConnectionResetError):
            [*iter(lambda: client.recv(4096), b"")]
        trip.restore(report, animal, equal=False)
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
