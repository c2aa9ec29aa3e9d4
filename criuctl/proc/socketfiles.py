"""The files of unix sockets: where they are now, whatever the names were that the sockets were bound to.

A file may be renamed after bind(2), as programs do that publish a socket all at once; the socket's name stays what it was.
SIOCUNIXFILE opens the file itself.  Its path is told as the root of its mount namespace has it, which is where CRIU binds
names again: it makes the sockets of a process before it puts it into its chroot.
"""

from __future__ import annotations

import fcntl
import os

from ..errors import NoSuchProcess
from .procfs import open_pidfd
from .syscalls import borrow_socket

_SIOCUNIXFILE = 0x89E0
_DELETED = " (deleted)"


def bound_file(pid: int, fd: int, *, deleted: bool = False) -> str | None:
    """The path of the file that this unix socket is bound to.

    None if it has none, if it is gone by now, and if its file is deleted, unless where that was is asked for, too.
    """
    found = _look(pid, fd)
    if found is None:
        return None
    path, status = found
    if _is_deleted(path, status):
        return path.removesuffix(_DELETED) if deleted else None
    return path


def renamed(pid: int, fd: int, name: str) -> str | None:
    """The path of the file of this socket, which was bound to the path `name`, if that leads there no more.

    None is also the answer for one whose file is deleted.
    """
    found = _look(pid, fd)
    if found is None:
        return None
    path, status = found
    if path == name or _is_deleted(path, status) or _leads_to(pid, name, status):
        return None
    return path


def _is_deleted(path: str, status: os.stat_result) -> bool:
    return not status.st_nlink or path.endswith(_DELETED)  # one of its names may be deleted, and nobody knows the others


def _leads_to(pid: int, name: str, status: os.stat_result) -> bool:
    """Whether this is another way to the file, over a symlink.  In a chroot it is none, for CRIU goes it outside."""
    try:
        return os.readlink(f"/proc/{pid}/root") == "/" and os.path.samestat(os.lstat(f"/proc/{pid}/root{name}"), status)
    except OSError:
        return False


def _look(pid: int, fd: int) -> tuple[str, os.stat_result] | None:
    try:
        pidfd = open_pidfd(pid)
        try:
            with borrow_socket(pidfd, fd) as borrowed:
                file: int = fcntl.ioctl(borrowed.fileno(), _SIOCUNIXFILE)
        finally:
            os.close(pidfd)
        try:
            return os.readlink(f"/proc/self/fd/{file}"), os.fstat(file)
        finally:
            os.close(file)
    except (NoSuchProcess, OSError):
        return None
