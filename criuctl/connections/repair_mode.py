"""Taking a tree's TCP connections out of repair mode after CRIU was killed; in that mode every call
of the program on them fails.

CRIU puts the connections into repair mode while it looks at them, and takes them out again before
it lets the tree go on. When CRIU is killed meanwhile, the kernel lets the tree go on at once, and
the connections stay in repair mode for good. So a thread waits for CRIU's end during the time in
which CRIU may not end the tree, and mends the connections without waiting for other work of the
dump. A program that waits for events notices nothing; one that waits in a call, which is entered
again first, gets EPERM from it.

After a CRIU that ends in order there is nothing to mend. The thread is gone before CRIU may end the
tree, because the connections of an ended tree must not send anything.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ..proc.syscalls import borrow_socket
from .record import Connection

_TCP_REPAIR = 19


class Mendable(NamedTuple):
    """A connection, and its former options."""

    pid: int
    fd: int
    inode: int
    reused: int  # SO_REUSEADDR, which repair mode overwrites


class RepairMode:
    """The connections of one dump that CRIU may leave in repair mode; `mended` is how many it has
    taken out of it.
    """

    def __init__(self) -> None:
        self.known: list[Mendable] = []
        self.mended = 0
        self._thread: threading.Thread | None = None
        self._wake = -1

    def watch(self, conversation: int, criu: int, connections: Iterable[Connection]) -> None:
        """Watch for CRIU's end. The tree is frozen, and CRIU, reached over the socket
        `conversation`, is about to look at its connections.

        `criu` is its PID or its parent's. Where its parent ends first, CRIU has ended when it has
        hung up as well; when this process hangs up on it, it lets go of the tree by itself, and has
        ended when the process is gone.
        """
        self.rest()
        self.known = []
        for c in connections:
            if c.held.socket.protocol == "tcp" and c.held.socket.connected:
                one = Mendable(c.held.pid, c.held.fd, c.held.socket.inode, 0)
                with suppress(OSError), _borrowed(one) as sock:
                    self.known.append(
                        one._replace(reused=sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
                    )
        if not self.known:
            return
        fds = os.eventfd(0, os.EFD_CLOEXEC), os.dup(conversation), os.pidfd_open(criu)
        thread = threading.Thread(target=self._wait, args=fds, name="criuctl-repairs", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads can be made
            for fd in fds:
                os.close(fd)
            raise
        self._wake, self._thread = fds[0], thread

    def rest(self) -> None:
        """Stop watching: CRIU is about to be allowed to end the tree, or has ended."""
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None

    def mend(self) -> None:
        """Mend the connections: CRIU has ended, and the tree has not."""
        self.mended += mend(self.known)

    def _wait(self, wake: int, conversation: int, criu: int) -> None:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        poller.register(conversation, 0)  # POLLHUP is always reported
        poller.register(criu, select.POLLIN)
        lasting = {conversation, criu}
        while lasting and wake not in (ready := {fd for fd, _events in poller.poll()}):
            for fd in ready:
                poller.unregister(fd)
            lasting -= ready
        os.close(conversation)
        os.close(criu)
        if not lasting:
            self.mend()


def mend(connections: Iterable[Mendable]) -> int:
    """Take those that are in repair mode out of it; return how many were."""
    mended = 0
    for one in connections:
        with suppress(OSError), _borrowed(one) as sock:
            if sock.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                mended += 1
            # Done in any case: a former process that mended it may have been killed before this
            # step.
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) != one.reused:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, one.reused)
    return mended


def _borrowed(one: Mendable) -> socket.socket:
    """Return a duplicate of the tree's socket; raise `OSError` when it is not there any more."""
    pidfd = os.pidfd_open(one.pid)
    try:
        sock = borrow_socket(pidfd, one.fd)
    finally:
        os.close(pidfd)
    if os.fstat(sock.fileno()).st_ino != one.inode:
        sock.close()
        raise FileNotFoundError(f"descriptor {one.fd} is another socket by now")
    return sock
