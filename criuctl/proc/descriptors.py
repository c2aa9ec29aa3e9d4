"""Open descriptors of a process, from ``/proc/PID/fd`` and ``/proc/PID/fdinfo``.

Each is described by what the kernel shows to a bystander: nothing is opened, duplicated or
disturbed.  Everything is read relative to one directory descriptor, which pins the very process:
after a PID changed hands, reads through it fail instead of answering for the wrong process.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import Literal, NamedTuple

from .procfs import read_raw, reading, target_of

Kind = Literal[
    "file",
    "dir",
    "symlink",
    "pipe",
    "socket",
    "tty",
    "memfd",
    "namespace",
    "eventfd",
    "epoll",
    "timerfd",
    "signalfd",
    "inotify",
    "fanotify",
    "io_uring",
    "pidfd",
    "device",
    "other",
]

_ANONYMOUS: dict[str, Kind] = {
    "[eventfd]": "eventfd",
    "[eventpoll]": "epoll",
    "[timerfd]": "timerfd",
    "[signalfd]": "signalfd",
    "inotify": "inotify",
    "[inotify]": "inotify",
    "[fanotify]": "fanotify",
    "[io_uring]": "io_uring",
    "[pidfd]": "pidfd",
}
_DELETED = " (deleted)"
_O_CLOEXEC = 0o2000000
# at one that becomes another file meanwhile, as a shell's do; some file systems tell two inodes of
# the same file
_LOOKS = 3

# Majors of character devices that are terminals: consoles and tty0.., /dev/tty and ptmx, BSD and
# Unix98 ptys, serial.
TTY_MAJORS = frozenset({2, 3, 4, 5, 204, 229, *range(128, 144)})
_MISC_TTYLESS = frozenset({(5, 3)})  # /dev/ttyprintk is write-only output, not a terminal


class Descriptor(NamedTuple):
    """One open descriptor as a bystander sees it."""

    fd: int
    kind: Kind
    # where /proc/PID/fd/N points, without " (deleted)"; "" to a path that is too long to be told
    target: str
    inode: int
    device: int  # st_dev
    rdev: int  # st_rdev; of devices and terminals
    mode: int  # st_mode
    size: int  # bytes
    nlink: int
    offset: int
    flags: int  # open(2) flags, without O_CLOEXEC
    cloexec: bool
    deleted: bool
    mnt_id: int
    extra: tuple[str, ...]  # the lines of fdinfo after the common ones: locks, epoll targets, ...

    @property
    def writable(self) -> bool:
        """Opened for writing."""
        return self.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR) and not self.flags & os.O_PATH

    @property
    def leased(self) -> bool:
        """Whether there is a write lease on it (fcntl F_SETLEASE), which whoever opens the file
        breaks.

        Of one that is being broken, the kernel tells what it is to become.  Whoever opens the file
        then waits for its holder.
        """
        return any(
            line.startswith("lock:") and "LEASE" in line and ("WRITE" in line or "BREAKING" in line)
            for line in self.extra
        )


def descriptors(pid: int) -> list[Descriptor]:
    """All open descriptors of `pid`, ascending; none for a zombie.  `NoSuchProcess`,
    `PreflightRefused`.

    Descriptors that are closed while we look are left out.
    """
    found = []
    with reading(pid):
        base = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fds = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
            try:
                infos = os.open("fdinfo", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
                try:
                    for name in sorted(os.listdir(fds), key=int):
                        try:
                            found.append(_read(name, fds, infos, f"/proc/{pid}/root"))
                        except (FileNotFoundError, ProcessLookupError):
                            continue
                finally:
                    os.close(infos)
            finally:
                os.close(fds)
        finally:
            os.close(base)
    return found


def _read(name: str, fds: int, infos: int, root: str) -> Descriptor:
    for _ in range(_LOOKS):
        lines = os.fsdecode(read_raw(name, dir_fd=infos)).splitlines()
        # of one file, whatever the program does meanwhile
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=fds)
        try:
            target, status = target_of(f"/proc/self/fd/{handle}"), os.fstat(handle)
        finally:
            os.close(handle)
        # older kernels do not tell the inode
        common = {"pos": "0", "flags": "0", "mnt_id": "-1", "ino": str(status.st_ino)}
        extra = []
        for line in lines:
            key, _, value = line.partition(":")
            if key in common:
                common[key] = value
            else:
                extra.append(line)
        if int(common["ino"]) == status.st_ino:
            break
    flags = int(common["flags"], 8)
    deleted = target.endswith(_DELETED) and (
        status.st_nlink == 0 or not _is_there(root + target, status)
    )
    return Descriptor(
        fd=int(name),
        kind=_kind(target, status),
        target=target.removesuffix(_DELETED) if deleted else target,
        inode=status.st_ino,
        device=status.st_dev,
        rdev=status.st_rdev,
        mode=status.st_mode,
        size=status.st_size,
        nlink=status.st_nlink,
        offset=int(common["pos"]),
        flags=flags & ~_O_CLOEXEC,
        cloexec=bool(flags & _O_CLOEXEC),
        deleted=deleted,
        mnt_id=int(common["mnt_id"]),
        extra=tuple(extra),
    )


def _is_there(path: str, status: os.stat_result) -> bool:
    """Whether a name that ends in the kernel's mark of deleted names is simply called so."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except OSError:
        return False


def is_tty(rdev: int) -> bool:
    """Whether a character device of this number is a terminal."""
    return os.major(rdev) in TTY_MAJORS and (os.major(rdev), os.minor(rdev)) not in _MISC_TTYLESS


@lru_cache(maxsize=1)
def _shared_memory() -> int:
    """The device of memory that has no name: memfds, and anonymous shared memory that was opened by
    ``/proc/PID/map_files``.
    """
    try:
        fd = os.memfd_create("criuctl", os.MFD_CLOEXEC)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _kind(target: str, status: os.stat_result) -> Kind:
    mode = status.st_mode
    if target.startswith("anon_inode:"):
        return _ANONYMOUS.get(target.removeprefix("anon_inode:"), "other")
    if stat.S_ISSOCK(mode):
        # The file of a bound unix socket, open as a path (O_PATH), has an inode of its file system.
        return "socket" if target.startswith("socket:") else "other"
    if stat.S_ISFIFO(mode):
        return "pipe"
    if stat.S_ISCHR(mode):
        return "tty" if is_tty(status.st_rdev) else "device"
    if stat.S_ISBLK(mode):
        return "device"
    if stat.S_ISDIR(mode):
        return "dir"
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISREG(mode):
        if target.startswith("/memfd:") or status.st_dev == _shared_memory():
            return "memfd"
        if target.startswith("/"):
            return "file"
        if target.endswith("]") and ":[" in target:
            return "namespace"
    return "other"
