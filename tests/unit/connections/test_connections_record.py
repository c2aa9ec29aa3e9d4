"""What is read off a tree's sockets, of a tree with more processes than we may have descriptors."""

from __future__ import annotations

import os
import resource
import signal
import socket
from types import SimpleNamespace
from typing import Any, cast

from criuctl.connections.record import _Borrower


def test_sockets_of_more_processes_than_descriptors() -> None:
    """What could not be read for want of a descriptor was left out, without a word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pids: list[int] = []
        try:
            for _ in range(40):
                pids.append(os.fork())
                if not pids[-1]:
                    signal.pause()
            kernel = SimpleNamespace(protocol="tcp", type="stream")
            free = [os.dup(sock.fileno()) for _ in range(20)]
            for fd in free:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
            with _Borrower() as borrower:
                records = [
                    borrower.details(
                        cast("Any", SimpleNamespace(pid=pid, fd=sock.fileno(), socket=kernel)),
                        external=True,
                    )
                    for pid in pids
                ]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert records[0]["options"]
    assert [details.get("options") for details in records] == [records[0]["options"]] * len(pids)
