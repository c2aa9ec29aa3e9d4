"""A connection to a unix socket is made again as the user who had it, not as root."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.laboratory import USER, Laboratory

pytestmark = pytest.mark.integration


@contextmanager
def server(path: Path, mode: int, kind: int = socket.SOCK_STREAM) -> Iterator[socket.socket]:
    """A program of root's that listens there."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        path.chmod(mode)
        if kind == socket.SOCK_STREAM:
            sock.listen()
        sock.settimeout(10)
        try:
            yield sock
        finally:
            path.unlink()


def connecting(path: Path, kind: str = "SOCK_STREAM") -> str:
    """Python that connects to a unix socket, and leaves the connection in `opened`."""
    made = f"s.socket(s.AF_UNIX, s.{kind})"
    done = f"(opened.append(k), k.connect({str(path)!r}))"
    return f"[{done} for s in [__import__('socket')] for k in [{made}]]"


def dumped(lab: Laboratory, path: Path, kind: str = "SOCK_STREAM", uid: int = USER) -> Any:
    """Dump a program of the user's that is connected to a server of `uid`."""
    server = lab.start(uid=uid, inside=True)
    lab.ask(server, connecting(path, kind).replace("k.connect", "k.bind"))
    lab.ask(server, f"os.chmod({str(path)!r}, 0o666)")
    if kind == "SOCK_STREAM":
        lab.ask(server, "opened[0].listen()")
    pid = lab.start()
    lab.ask(pid, connecting(path, kind))
    if kind == "SOCK_STREAM":
        lab.ask(server, "opened.append(opened[0].accept())")
    report = lab.dump(pid)
    path.unlink()
    return report


def test_the_server_sees_the_user(lab: Laboratory) -> None:
    """SO_PEERCRED is how many servers tell root from others."""
    path = lab.folder.parent / "public"
    report = dumped(lab, path, uid=0)
    with server(path, 0o666) as listener:
        answer = lab.restore(report["checkpoint"], "--connections", "reconnect")
        assert [c["outcome"] for c in answer["connections"]] == ["reconnected"]
        with listener.accept()[0] as accepted:
            size = struct.calcsize("3i")
            peer = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    assert struct.unpack("3i", peer)[1:] == (USER, USER)


@pytest.fixture
def roots(lab: Laboratory) -> Path:
    """A folder of root's."""
    folder = lab.folder.parent / "roots"
    folder.mkdir()
    lab.as_user("mkdir d")
    return folder


def test_a_socket_of_root_s_is_not_reached(lab: Laboratory, roots: Path) -> None:
    """The user had a server at that path, and puts a link to root's there."""
    report = dumped(lab, lab.folder / "d/sock")
    lab.as_user(f"rmdir d; ln -s {roots} d")
    with server(roots / "sock", 0o600) as private:
        answer = lab.restore(report["checkpoint"], "--connections", "reconnect", check=False)
        private.settimeout(0)
        with pytest.raises(BlockingIOError):
            private.accept()
    assert answer["connections"][0]["outcome"] == "failed", answer


def test_a_datagram_socket_of_root_s_is_not_reached(lab: Laboratory, roots: Path) -> None:
    """CRIU connects such a socket by its peer's name, as root."""
    report = dumped(lab, lab.folder / "d/sock", "SOCK_DGRAM")
    lab.as_user(f"rmdir d; ln -s {roots} d")
    with server(roots / "sock", 0o600, socket.SOCK_DGRAM):
        answer = lab.restore(report["checkpoint"], check=False)
        assert answer["exit_code"] == 4, answer
        assert lab.processes() == []


def test_a_datagram_socket_is_connected_again(lab: Laboratory, roots: Path) -> None:
    """With the user's own rights."""
    report = dumped(lab, lab.folder / "d/sock", "SOCK_DGRAM")
    with server(lab.folder / "d/sock", 0o666, socket.SOCK_DGRAM) as sock:
        pid = lab.restore(report["checkpoint"])["pid"]
        assert lab.ask(pid, "opened[0].send(b'again')") == "5"
        assert sock.recv(10) == b"again"
    assert roots.is_dir()
