"""Sockets of other net namespaces.

A socket belongs to the namespace in which it is *made*, and stays with it. So a short-lived thread
joins the namespace, makes the socket, hands it back and ends; no other thread ever moves.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading

from ..errors import PlatformError
from .procfs import reading
from .syscalls import CLONE_NEWNET, setns

_SIOCGSKNS = 0x894C
_SO_NETNS_COOKIE = 71


def namespace_socket(pid: int | None, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Make a socket in the net namespace of `pid` (None: our own).

    `NoSuchProcess`, `PlatformError`.
    """

    def make() -> socket.socket:
        return socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)

    if pid is None:
        return make()
    with reading(pid):
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return socket_inside(namespace, family, kind, protocol)
    except OSError as error:
        raise PlatformError(
            f"PID {pid}: its net namespace cannot be entered: {error.strerror}",
            hint="criuctl needs CAP_SYS_ADMIN to enter another net namespace.",
        ) from error
    finally:
        os.close(namespace)


def socket_inside(namespace: int, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Make a socket in the net namespace that the descriptor `namespace` refers to; `OSError`."""
    result: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            setns(namespace, CLONE_NEWNET)
            result.append(socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol))
        except OSError as error:
            failed.append(error)

    # setns moves one thread: one that ends afterwards, while all others stay.
    thread = threading.Thread(target=enter, name="enter-netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


def net_cookie(namespace: int) -> int:
    """Return the cookie of this net namespace, which is unique since the boot.

    0 if the kernel has none (before Linux 5.14). The inode is not unique: the kernel gives it to
    the next namespace once this one is gone.
    """
    try:
        with socket_inside(namespace, socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            (cookie,) = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8))
    except OSError:
        return 0
    return int(cookie)


def namespace_of(sock: socket.socket) -> int:
    """Return a new descriptor of the net namespace of `sock`; `OSError`."""
    return fcntl.ioctl(sock.fileno(), _SIOCGSKNS)


def socket_in_same_namespace(sock: socket.socket) -> socket.socket:
    """Make a socket of the same kind as `sock`, in its net namespace; `OSError`."""
    try:
        namespace = namespace_of(sock)
    except OSError:
        # a kernel without network namespaces, or no permission to ask
        return socket.socket(sock.family, sock.type)
    try:
        if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
            return socket.socket(sock.family, sock.type)
        return socket_inside(namespace, sock.family, sock.type)
    finally:
        os.close(namespace)
