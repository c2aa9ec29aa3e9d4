"""A thread that temporarily has another user's rights."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from criuctl.proc.credentials import Credentials, acting_as

USER = Credentials(1001, 1001, frozenset({1003}))


def test_only_this_thread_and_only_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "private").touch(0o600)
    groups, end = os.getgroups(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with acting_as(USER):
        assert (os.geteuid(), os.getegid(), os.getgroups()) == (1001, 1001, [1003])
        with pytest.raises(PermissionError):
            (tmp_path / "private").read_bytes()
    status = os.open(f"/proc/self/task/{thread.native_id}/status", os.O_RDONLY)
    with acting_as(USER):
        assert b"Uid:\t0\t0\t0\t0\n" in os.read(status, 4096)
    os.close(status)
    end.set()
    thread.join()
    assert (os.geteuid(), os.getegid(), os.getgroups()) == (0, 0, groups)
    assert (tmp_path / "private").read_bytes() == b""


def test_peers_see_the_user() -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        listener.bind(f"\0criuctl-test-{os.getpid()}")
        listener.listen()
        with acting_as(USER):
            sock.connect(listener.getsockname())
        with listener.accept()[0] as accepted:
            size = struct.calcsize("3i")
            seen = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    assert struct.unpack("3i", seen) == (os.getpid(), 1001, 1001)


def test_no_credentials_change_nothing() -> None:
    with acting_as(None):
        assert os.geteuid() == 0
