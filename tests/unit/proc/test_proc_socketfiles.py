"""The file at the path of a unix socket, and the owner of a name, found without being noticed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.proc import socketfiles

KINDS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 120])
def test_a_living_socket_and_what_it_leaves(
    kind: socket.SocketKind, length: int, tmp_path: Path
) -> None:
    """A path may be longer than an address: then it was bound from its folder."""
    folder = tmp_path / ("f" * length)
    folder.mkdir()
    path = str(folder / "s")
    assert socketfiles.at(path) == "none"
    with socket.socket(socket.AF_UNIX, kind) as sock:
        there = os.open(folder, os.O_PATH)
        sock.bind(f"/proc/self/fd/{there}/s")
        os.close(there)
        assert socketfiles.at(path) == "alive"  # it need not listen
        if kind != socket.SOCK_DGRAM:
            sock.listen()
        sock.setblocking(False)
        assert socketfiles.at(path) == "alive"
        assert socketfiles.owner(path) == (os.getpid(), sock.fileno())
        with pytest.raises(BlockingIOError):
            sock.recv(1) if kind == socket.SOCK_DGRAM else sock.accept()
    assert socketfiles.at(path) == "dead"
    assert socketfiles.owner(path) is None


def test_a_datagram_socket_that_takes_from_its_peer_only(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        for name, sock in (("one", one), ("other", other)):
            sock.bind(str(tmp_path / name))
        one.connect(str(tmp_path / "other"))
        assert socketfiles.at(str(tmp_path / "one")) == "alive"


def test_an_accepted_connection_keeps_nothing_alive(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        accepted = listener.accept()[0]
    with accepted:
        assert accepted.getsockname() == path
        assert (socketfiles.at(path), socketfiles.owner(path)) == ("dead", None)


def test_anything_else(tmp_path: Path) -> None:
    """A link is not followed, be it to a living socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("s")
        assert [
            socketfiles.at(str(tmp_path / name)) for name in ("s", "file", "link", ".", "file/s")
        ] == [
            *("alive", "other", "other", "other", "none"),
        ]


def test_an_owner_in_another_network(tmp_path: Path) -> None:
    """Not in the tables of our network."""
    text = (
        "libc.unshare(0x40000000); s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); "
        "s.listen()"
    )
    with running(text, tmp_path) as program:
        assert socketfiles.at(str(tmp_path / "s")) == "alive"
        owner = socketfiles.owner(str(tmp_path / "s"))
    assert owner is not None and owner[0] == program.pid


@pytest.mark.parametrize("name", [b"\0criuctl-test-%d", b"\0criuctl\0test-%d\0"])
def test_an_abstract_name(name: bytes) -> None:
    """It is one of its type, and of its net namespace."""
    name %= os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(name)
        assert [socketfiles.abstract_taken(name, kind) for kind in KINDS] == [False, True, False]
        assert socketfiles.abstract_owner(name, socket.SOCK_SEQPACKET) == (
            os.getpid(),
            sock.fileno(),
        )
        assert socketfiles.abstract_owner(name, socket.SOCK_STREAM) is None
    assert not socketfiles.abstract_taken(name, socket.SOCK_SEQPACKET)
