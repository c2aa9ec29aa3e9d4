"""Unix sockets of a restored tree that lead to another tree, which is restored at the same time.

CRIU saves only one tree's half of such a connection, and cannot make the other one. So the
coordinator of a group's restore makes a pair of sockets for each of these connections
(`criuctl.ops.group_restore`), and CRIU gets one end of it for each tree, as a descriptor that it
inherits: with it come duplicates, children's copies and epoll registrations.

What this tree's end had not read is written into the other end here, before CRIU begins. A side
that was shut down is shut down only when all members are in place, because nothing more can be
written then. Lost are the names of both ends (getsockname, getpeername), and SO_PEERCRED names
root.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct, field

from ..criu import socketimages
from ..criu.images import ImageSet
from ..errors import RestoreFailed

_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # SO_..., which CAP_NET_ADMIN needs no limit for
_FLAGS = os.O_NONBLOCK | os.O_APPEND | os.O_ASYNC  # those that F_SETFL sets
_ROOM, _OVERHEAD = 1 << 16, 1 << 10  # bytes: always, and for each packet
_HOW = {1: socket.SHUT_RD, 2: socket.SHUT_WR, 3: socket.SHUT_RDWR}


class LinkedSockets(Struct):
    """Those of one tree."""

    inherit: dict[str, int] = field(default_factory=dict)  # CRIU's key -> descriptor
    _shut: list[tuple[int, int]] = field(default_factory=list)  # descriptor, how

    @classmethod
    def of(
        cls, images: ImageSet, sockets: Mapping[int, tuple[int, int]], *, fill: bool = True
    ) -> LinkedSockets:
        """Take them out of the images, and `fill` their queues; `sockets`: inode at the dump -> own
        and other descriptor.
        """
        made = cls()
        found = socketimages.link(images, sockets)
        if missing := sorted(sockets.keys() - found.keys()):
            raise RestoreFailed(
                f"the images lack unix sockets that lead to other members of the group: {missing}"
            )
        for inode, linked in found.items():
            own, other = sockets[inode]
            try:
                if fill:
                    _fill(other, linked)
                _set(own, linked)
            except OSError as error:
                raise RestoreFailed(
                    f"the queue of unix socket {inode} cannot be filled: {error.strerror}"
                ) from error
            made.inherit[f"socket:[{inode}]"] = own
            if linked.shutdown in _HOW:
                made._shut.append((own, linked.shutdown))
        return made

    def shut_down(self) -> None:
        """Shut down the sides that were; all queues of the group are filled."""
        for fd, how in self._shut:
            with _socket(fd) as sock:
                sock.shutdown(_HOW[how])


def _fill(fd: int, linked: socketimages.Linked) -> None:
    """Write what the end of `linked` had not read into its other end, `fd`."""
    if not linked.packets:
        return
    with _socket(fd) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        # the kernel counts whole buffers: twice the bytes, and something for each packet
        room = _ROOM + sum(2 * len(packet) + _OVERHEAD for packet in linked.packets)
        sock.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, room)
        for packet in linked.packets:
            sent = 0
            while sent < len(packet):
                sent += sock.send(packet[sent:], socket.MSG_DONTWAIT)
        sock.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, before)


def _set(fd: int, linked: socketimages.Linked) -> None:
    """Give the end its flags and the sizes of its buffers, which the kernel shows doubled."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~_FLAGS
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | linked.flags & _FLAGS)
    with _socket(fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, linked.sndbuf // 2)
        sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, linked.rcvbuf // 2)


@contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    """Yield the descriptor as a socket, and leave it open."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
