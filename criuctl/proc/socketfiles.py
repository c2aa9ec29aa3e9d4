"""The files of unix sockets: where they are now, whatever names the sockets were bound to.

A file may be renamed after bind(2), as programs do that publish a socket in one step. It may also
get another name and lose the first one, where another socket's file must not be replaced. The
socket's name stays what it was. SIOCUNIXFILE opens the file itself. The path is given as seen from
the root of its mount namespace, which is where CRIU binds names again: it makes the sockets of a
process before it puts the process into its chroot.

`at` and `abstract_taken` ask the kernel whether a name is in use; no process notices it. `owner`
and `abstract_owner` find the process that uses it, for messages.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

from ..errors import NoSuchProcess
from .namespace_sockets import socket_inside
from .procfs import all_pids, open_pidfd
from .sockdiag import TYPES, Socket, unix_sockets
from .sockets import outside_holders
from .syscalls import borrow_socket

# the folder does not exist
_NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})

State = Literal["none", "dead", "alive", "other"]
_SIOCUNIXFILE = 0x89E0
_DELETED = " (deleted)"


def bound_file(pid: int, fd: int, *, deleted: bool = False) -> str | None:
    """Return the path of the file that this unix socket is bound to.

    None if it has no file, or the process is gone. None also if the file is deleted, unless
    `deleted` asks for its last path.
    """
    found = _look(pid, fd)
    if found is None:
        return None
    path, status = found
    if _is_deleted(path, status):
        return path.removesuffix(_DELETED) if deleted else None
    return path


def bound_inode(pid: int, fd: int) -> tuple[str, os.stat_result] | None:
    """Return the path, as the kernel shows it, and the status of the file of this unix socket."""
    return _look(pid, fd)


def renamed(pid: int, fd: int, name: str) -> str | None:
    """Return the present path of the file of a socket whose bound name no longer leads to it.

    For a file that has lost that name, another of its names in the same folder is returned. None if
    the name still leads there, or if the file has no name any more.
    """
    found = _look(pid, fd)
    if found is None:
        return None
    path, status = found
    if _is_deleted(path, status):
        path = _other_name(pid, path.removesuffix(_DELETED), status)
    if path in ("", name) or _leads_to(pid, name, status):
        return None
    return path


def _other_name(pid: int, path: str, status: os.stat_result) -> str:
    """Return another name, next to `path`, of a file that lost that name; "" if none is found."""
    if not status.st_nlink:
        return ""
    folder = os.path.dirname(path)
    try:
        there = ""
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt")):
            there = f"/proc/{pid}/root"
            if os.readlink(there) != "/":
                # a chroot in a mount namespace of its own: the folder is not reachable by its path
                return ""
        with os.scandir(there + folder) as entries:
            odd = (e for e in entries if not (e.is_symlink() or e.is_dir() or e.is_file()))
            names = [e.name for e in odd if os.path.samestat(e.stat(follow_symlinks=False), status)]
    except OSError:
        return ""
    return os.path.join(folder, min(names)) if names else ""


def _is_deleted(path: str, status: os.stat_result) -> bool:
    # one of its names may be deleted, and the others are unknown
    return not status.st_nlink or path.endswith(_DELETED)


def _leads_to(pid: int, name: str, status: os.stat_result) -> bool:
    """Return whether `name` is another way to the file, over a symlink.

    In a chroot it is not, because CRIU resolves it outside.
    """
    try:
        return os.readlink(f"/proc/{pid}/root") == "/" and os.path.samestat(
            os.lstat(f"/proc/{pid}/root{name}"), status
        )
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


# -- who has a name -------------------------------------------------------------------------------


def at(path: str) -> State:
    """Return the state of a path: nothing, the file of a closed or of a live socket, another file.

    The last component is not followed. The kernel's answer to connecting a datagram socket of ours
    is used. The other socket does not notice that, and one of another type is not even connected.
    It is found whichever net namespace it is in.
    """
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return "none" if error.errno in _NOWHERE else "alive"  # unknown
    try:
        name = os.path.basename(path)
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except OSError:
            return "none"
        if not stat.S_ISSOCK(mode):
            return "other"
        try:
            file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return "none"
        try:
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                return "other"
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                # The path, and the name alone, may be longer than what fits into an address.
                code = probe.connect_ex(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        if code == errno.ENOENT:  # it has just been removed
            return "none"
        return "dead" if code == errno.ECONNREFUSED else "alive"
    except OSError:
        return "alive"  # unknown: it must not be touched
    finally:
        os.close(folder)


def owner(path: str) -> tuple[int, int] | None:
    """Return (PID, descriptor) of a process that has the socket of the file at this path.

    Whichever net namespace it is in.
    """
    return owners([path]).get(path)


def owners(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the owner, as `owner` does, of each of these paths that has one.

    Every descriptor of the host is read once for all.
    """
    sought: dict[int, list[tuple[str, int]]] = {}
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            sought.setdefault(status.st_ino & 0xFFFFFFFF, []).append((path, status.st_dev))
    sockets: dict[int, str] = {}  # inode -> path
    left = {path for names in sought.values() for path, _ in names}
    for found in _namespaces() if left else ():
        for s in found:
            if s.type != "dgram" and s.state == "established":
                continue  # an accepted connection has the file of its listener
            for path, device in sought.get(s.file[1], ()):
                # On overlays and btrfs the kernel shows another device here than stat does.
                if s.file[0] == device or os.path.basename(s.name) == os.path.basename(path):
                    sockets[s.inode] = path
                    left.discard(path)
        if not left:
            break
    return {sockets[inode]: holder for inode, holder in outside_holders(sockets).items()}


def _namespaces() -> Iterator[list[Socket]]:
    """Yield the unix sockets of each net namespace that has processes, ours first."""
    own = os.stat("/proc/self/ns/net").st_ino
    seen = {own}
    with suppress(OSError):
        yield unix_sockets()
    for pid in all_pids():
        with suppress(OSError):
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if (number := os.fstat(namespace).st_ino) not in seen:
                    seen.add(number)
                    yield unix_sockets(namespace)
            finally:
                os.close(namespace)


def abstract_taken(name: bytes, kind: int, namespace: int | None = None) -> bool:
    """Return whether an abstract name is in use for this type of socket.

    `namespace`: a descriptor of the net namespace (None: ours).
    """
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(socket.AF_UNIX, kind, 0) as probe:
        try:
            probe.bind(name)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def abstract_owner(name: bytes, kind: int, namespace: int | None = None) -> tuple[int, int] | None:
    """Return (PID, descriptor) of a process that has the socket of this type and abstract name."""
    shown = "@" + os.fsdecode(name[1:])
    with suppress(OSError):
        inodes = [
            s.inode
            for s in unix_sockets(namespace)
            if s.name == shown and s.type == TYPES.get(kind)
        ]
        return next(iter(outside_holders(inodes).values()), None) if inodes else None
    return None
