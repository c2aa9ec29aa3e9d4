"""Connect a socket that belongs to another process, within a time limit, and leave it unchanged.

A restored program's socket is borrowed (`syscalls.borrow_socket`) while the program is held. File
status flags and socket options belong to the socket, which the program shares: `connect` makes it
non-blocking only while it connects. A waiting connect ends at once when the descriptor `cancel`
becomes readable.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

from .credentials import Credentials, acting_as
from .scratch import Scratch
from .syscalls import disconnect as _dissolve

__all__ = [
    "Address",
    "Cancelled",
    "connect",
    "disconnect",
    "hang_up",
    "hosts_of",
    "inside_root",
    "spelled",
]

Address = tuple[str, int] | tuple[str, int, int, int] | str | bytes

_SYS_OPENAT2 = 437  # the same number on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_OPEN_HOW = struct.Struct("=QQQ")  # flags, mode, resolve
_IN_USE = (errno.EINPROGRESS, errno.EALREADY)


class Cancelled(Exception):
    """The caller does not need the connection any more."""


def disconnect(sock: socket.socket) -> None:
    """Make the socket unconnected again: queues empty, no pending error.

    Not possible for unix streams.
    """
    try:
        _dissolve(sock.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EINVAL, errno.EOPNOTSUPP):
            raise
    # reading clears it: the program must not see our failed try
    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@contextmanager
def _non_blocking(sock: socket.socket) -> Iterator[None]:
    flags = fcntl.fcntl(sock.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(sock.fileno(), fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        yield
    finally:
        fcntl.fcntl(sock.fileno(), fcntl.F_SETFL, flags)


def connect(
    sock: socket.socket, address: Address, deadline: float, cancel: int | None = None
) -> None:
    """Connect the socket.

    `OSError` of the kernel, ETIMEDOUT when `deadline` (of `time.monotonic`) passes, `Cancelled`.
    """
    with _non_blocking(sock):
        code = sock.connect_ex(address)
        if code in _IN_USE:
            code = _wait(sock, deadline, cancel)
    if code:
        raise OSError(code, os.strerror(code))
    # On loopback, a connect to a port without a listener may meet itself, when the kernel picks
    # that very port.
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _wait(sock: socket.socket, deadline: float, cancel: int | None) -> int:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    if cancel is not None:
        poller.register(cancel, select.POLLIN)
    ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    if any(fd == cancel for fd, _ in ready):
        raise Cancelled
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else errno.ETIMEDOUT


def hosts_of(host: str, port: int, family: int, kind: int) -> list[Address]:
    """Return the addresses of `host` that a socket of `family` can be connected to.

    `OSError` when the name is unknown.
    """
    wanted = socket.AF_INET6 if family == socket.AF_INET6 else socket.AF_INET
    flags = socket.AI_V4MAPPED | socket.AI_ALL if wanted == socket.AF_INET6 else 0
    found = socket.getaddrinfo(host, port, wanted, kind, 0, flags)
    return list(dict.fromkeys(cast("Address", entry[4]) for entry in found))


def inside_root(pid: int, path: str, user: Credentials | None = None) -> int:
    """Return an O_PATH descriptor of the file at `path` as process `pid` sees it.

    Below its root, links followed as it would, with `user`'s rights. A path that does not begin
    with ``/`` is below its working folder.
    """
    top = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not path.startswith("/"):
            inner = os.readlink(f"/proc/{pid}/cwd")
            outer = os.readlink(f"/proc/{pid}/root").rstrip("/")
            path = f"{inner.removeprefix(outer)}/{path}"
        how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        libc = ctypes.CDLL(None, use_errno=True)
        with acting_as(user):
            fd = int(libc.syscall(_SYS_OPENAT2, top, os.fsencode(path), how, len(how)))
            code = ctypes.get_errno()
        if fd < 0:
            raise OSError(code, os.strerror(code), path)
        return fd
    finally:
        os.close(top)


def spelled(name: str) -> bytes | None:
    """Return the address of an abstract unix name as the tables write it (``@...``).

    None for a path.
    """
    return b"\0" + os.fsencode(name[1:]) if name.startswith("@") else None


def hang_up(sock: socket.socket) -> None:
    """Close the connection for the program: EOF on read, EPIPE on write, EPOLLHUP on poll.

    Nothing stays queued.
    """
    if sock.family == socket.AF_UNIX:
        _abandon(sock)
    else:
        disconnect(sock)
        if sock.type == socket.SOCK_DGRAM:
            # Without a peer, writing would be EDESTADDRREQ rather than EPIPE. No data is ever sent
            # to this peer.
            host = "::1" if sock.family == socket.AF_INET6 else "127.0.0.1"
            with _tolerant():
                connect(sock, (host, 9), time.monotonic() + 1)
    with _tolerant():
        # an unconnected socket answers ENOTCONN, and is marked anyway
        sock.shutdown(socket.SHUT_RDWR)


def _abandon(sock: socket.socket) -> None:
    """Give a unix socket a peer and close that: it reads EOF only if it had a peer."""
    if sock.type == socket.SOCK_DGRAM:
        disconnect(sock)
    else:
        # data of the abandoned peer: the program must not read it
        with suppress(OSError):
            while sock.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
    # By path, because an abstract name would be in our net namespace; in a folder that leaves
    # nothing behind.
    with Scratch("64k") as folder, socket.socket(socket.AF_UNIX, sock.type) as peer:
        name = f"{folder.path}/end"
        peer.bind(name)
        if sock.type == socket.SOCK_DGRAM:
            connect(sock, name, time.monotonic() + 1)
            return
        peer.listen()
        with suppress(OSError):  # EISCONN: it had a peer
            connect(sock, name, time.monotonic() + 1)
            peer.accept()[0].close()  # not accepted, it would be ECONNRESET


@contextmanager
def _tolerant() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (
            errno.ENOTCONN,
            errno.EISCONN,
            errno.ENETUNREACH,
            errno.EADDRNOTAVAIL,
            errno.EINVAL,
        ):
            raise
