"""Giving external connections back, while the restored tree has not run one instruction yet.

A TCP connection to outside the tree has its other half in another kernel.  With policy ``keep`` CRIU has
restored it as it was.  With ``hangup`` its socket was restored unconnected; shutting it down here makes the
program see the end at once: EOF on read, EPIPE on write, EPOLLHUP on poll, never a hang.  The socket is
reached through pidfd_getfd: it is the very socket, so duplicates and epoll registrations see the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..checkpoint.manifest import ConnectionRecord, Manifest
from ..proc.syscalls import borrow_socket
from ..proc.tree import read_tree


def outer_pids(root: int) -> dict[int, int]:
    """The tree's own PIDs -> ours, for the restored tree of `root`."""
    return {p.ns_pid: p.pid for p in read_tree(root)}


def hand_back(manifest: Manifest, policies: Mapping[tuple[int, int], str], root: int) -> list[dict[str, Any]]:
    """Carry out the policies in the restored tree; returns one report per external connection."""
    pids = outer_pids(root)
    report = []
    for c in manifest.connections:
        policy = policies.get((c.pid, c.fd))
        if policy is None:
            continue
        outcome = "kept" if policy == "keep" else _hang_up(c, pids)
        report.append({"pid": c.pid, "fd": c.fd, "local": c.local, "peer": c.peer, "policy": policy, "outcome": outcome})
    return report


def _hang_up(connection: ConnectionRecord, pids: Mapping[int, int]) -> str:
    pidfd = os.pidfd_open(pids[connection.pid])
    try:
        with borrow_socket(pidfd, connection.fd) as sock, suppress(OSError):
            # ENOTCONN is what an unconnected socket answers; it is marked as shut down all the same.
            sock.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
    return "hangup"
