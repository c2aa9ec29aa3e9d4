"""Connections that a killed CRIU leaves in repair mode."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time

import pytest
from support.keeper import wait_until

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.record import Connection
from criuctl.connections.repair_mode import RepairMode
from criuctl.proc.sockdiag import Socket
from criuctl.proc.sockets import Peer, TreeSocket

_TCP_REPAIR = 19


def test_they_are_left_alone_for_as_long_as_criu_lives() -> None:
    """Also when criuctl has hung up, interrupted: CRIU is at them still, and puts them right
    itself.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        ours,
    ):
        with theirs:
            criu = subprocess.Popen(["sleep", "1000"], pass_fds=[theirs.fileno()])
        try:
            repairs = RepairMode()
            repairs.watch(ours.fileno(), criu.pid, [_connection(sock)])
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            ours.shutdown(socket.SHUT_RDWR)
            time.sleep(0.2)  # for what is not to happen
            assert sock.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1
        finally:
            criu.kill()
        wait_until(lambda: not sock.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR), 60, "it is mended")
        repairs.rest()
        assert repairs.mended == 1
        criu.wait()


def test_no_thread_is_left_to_wait_for_where_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dump fails for that, and not for something else when it is over."""
    repairs, before = RepairMode(), os.listdir("/proc/self/fd")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.create_server(("127.0.0.1", 0))
    sock = socket.create_connection(listener.getsockname())
    with listener, sock, ours, theirs, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _cannot_start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            repairs.watch(ours.fileno(), os.getpid(), [_connection(sock)])
    repairs.rest()
    assert os.listdir("/proc/self/fd") == before


def _cannot_start(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _connection(sock: socket.socket) -> Connection:
    """One of this process's own."""
    number = sock.fileno()
    found = Socket(os.fstat(number).st_ino, "inet", "stream", "tcp", "established")
    held = TreeSocket(found, 0, ((os.getpid(), number),), Peer.OUTSIDE)
    return Connection(ConnectionRecord(os.getpid(), number), held)
