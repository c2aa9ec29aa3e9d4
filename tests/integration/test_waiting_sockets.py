"""Connections of unix sockets that are not accepted yet when the tree is dumped."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from support.trip import Trip
from support.zoo import Zoo

from criuctl.proc.syscalls import pidfd_getfd

pytestmark = pytest.mark.integration


_WAITING = """import os, socket, sys
kind = getattr(socket, sys.argv[1])
os.chmod(".", int(sys.argv[2], 8))
listener = socket.socket(socket.AF_UNIX, kind)
listener.bind("name"); listener.listen(4)
os.dup2(listener.fileno(), 20)
for number in (21, 22):
    client = socket.socket(socket.AF_UNIX, kind)
    client.connect("name")
    os.dup2(client.fileno(), number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def _socket_of(pid: int, fd: int) -> socket.socket:
    pidfd = os.pidfd_open(pid)
    try:
        return socket.socket(fileno=pidfd_getfd(pidfd, fd))
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("mode", ["755", "775"])
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
def test_connections_that_wait_to_be_accepted(kind: str, mode: str, zoo: Zoo, trip: Trip) -> None:
    """Also where others than root can write to the folder: the program connects there itself, once
    it has bound the name.
    """
    animal = zoo.launch("counter.py", prefix=[sys.executable, "-c", _WAITING, kind, mode])
    animal = trip.restore(trip.dump(animal), animal, equal=False)
    with _socket_of(animal.pid, 20) as listener:
        for number in (21, 22):
            with _socket_of(animal.pid, number) as client, listener.accept()[0] as accepted:
                client.send(b"%d" % number)
                assert accepted.recv(10) == b"%d" % number
    animal.ask()


_OWN_PEER = """import os, socket, sys
os.chmod(".", 0o775)
own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
own.bind("name"); own.connect("name")
os.dup2(own.fileno(), 20)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_socket_that_is_connected_to_itself(zoo: Zoo, trip: Trip) -> None:
    """In a folder in which others than root can write, where the program binds it itself."""
    animal = zoo.launch("counter.py", prefix=[sys.executable, "-c", _OWN_PEER])
    animal = trip.restore(trip.dump(animal), animal, equal=False)
    with _socket_of(animal.pid, 20) as own:
        own.send(b"to itself")
        assert own.recv(20) == b"to itself"
    animal.ask()
