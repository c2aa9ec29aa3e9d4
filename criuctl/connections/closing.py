"""Closing the connections of a tree that has been dumped and ended, so that their peers notice.

CRIU leaves the sockets of a tree that it ends in repair mode, in which they vanish silently: a
server would keep the session, with its locks and its place among the permitted connections, until
it sends something. So a dump that ends the tree holds a duplicate of each connection that is not to
be kept, and closes it in order once the tree is gone, the checkpoint is complete and the firewall
lock is taken down.

Accepted connections are reset instead: an orderly end would leave their port in use for a while,
and the restored listener needs it. A duplicate changes nothing while the tree lives: when the dump
fails it is simply closed, and the connection stays with the tree.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import termios
from collections.abc import Iterable
from fcntl import ioctl

from msgspec.structs import replace

from ..proc.syscalls import borrow_socket
from .record import Connection

_TCP_REPAIR = 19
_ABORT, _NO_WAIT = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)


class Farewell:
    """The connections of one dump that are to be closed visibly to their peers."""

    def __init__(self) -> None:
        self._held: list[tuple[socket.socket, bool]] = []  # and whether it is to be reset

    def hold(self, connections: Iterable[Connection]) -> None:
        """Duplicate every TCP connection that is not to be kept, and record it; one that cannot be
        reached ends silently.

        So do those for which there are no descriptors left, since the dump needs some too.
        """
        pidfds: dict[int, int] = {}
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        try:
            for c in connections:
                if (
                    c.record.protocol != "tcp"
                    or c.record.policy == "keep"
                    or c.held.waiting
                    or c.record.queued
                ):
                    continue
                c.record = replace(c.record, ended=True)
                if len(self._held) + len(pidfds) >= most:
                    continue
                try:
                    if c.held.pid not in pidfds:
                        pidfds[c.held.pid] = os.pidfd_open(c.held.pid)
                    sock = borrow_socket(pidfds[c.held.pid], c.held.fd)
                    self._held.append((sock, c.record.direction == "accepted"))
                except OSError:
                    continue
        finally:
            for fd in pidfds.values():
                os.close(fd)

    def say(self) -> None:
        """Close them like a program that ends; the tree must be gone."""
        for sock, reset in self._held:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                unsent = struct.unpack("i", ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
                # Data that the peer has not received must not reach it now: the restored program
                # may send it again.
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _ABORT if unsent or reset else _NO_WAIT
                )
            except OSError:
                pass  # it is closed already: the peer was faster
        self.drop()

    def drop(self) -> None:
        """Close the duplicates; other holders keep the connections."""
        for sock, _reset in self._held:
            sock.close()
        self._held.clear()
