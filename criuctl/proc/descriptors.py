"""Open descriptors of a process, from ``/proc/PID/fd`` and ``/proc/PID/fdinfo``.

Each is described by what the kernel shows to other processes: nothing is opened, duplicated or
disturbed. Everything is read relative to one directory descriptor, which pins the process: if the
PID is reused, reads through it fail instead of describing the wrong process.
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
# How often to look at a descriptor that becomes another file meanwhile, as a shell's do. Some file
# systems report two inodes for one file.
_PLAIN = (stat.S_IFREG, stat.S_IFDIR)
_ATTEMPTS = 3

# Majors of character devices that are terminals: consoles and tty0.., /dev/tty and ptmx, BSD and
# Unix98 ptys, serial.
TTY_MAJORS = frozenset({2, 3, 4, 5, 204, 229, *range(128, 144)})
_MISC_TTYLESS = frozenset({(5, 3)})  # /dev/ttyprintk is write-only output, not a terminal


class Descriptor(NamedTuple):
    """One open descriptor as another process sees it."""

    fd: int
    kind: Kind
    # where /proc/PID/fd/N points, without " (deleted)"; "" for a path too long to show
    target: str
    inode: int
    device: int  # st_dev
    rdev: int  # st_rdev of devices and terminals
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
        """Whether it is open for writing."""
        return self.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR) and not self.flags & os.O_PATH

    @property
    def leased(self) -> bool:
        """Whether it has a write lease (fcntl F_SETLEASE), which is broken when the file is opened.

        For a lease that is being broken, the kernel shows the type that it is to become. A process
        that opens the file then waits for the lease holder.
        """
        return any(
            line.startswith("lock:") and "LEASE" in line and ("WRITE" in line or "BREAKING" in line)
            for line in self.extra
        )


def descriptors(pid: int, *, still: bool = False, special: bool = False) -> list[Descriptor]:
    """Return all open descriptors of `pid`, ascending; none for a zombie.

    `still`: the process is frozen, which needs fewer system calls. With `special`, only those that
    are neither of regular files nor of folders, which may be many.

    `NoSuchProcess`, `PreflightRefused`. Descriptors that are closed meanwhile are left out.
    """
    found, root = [], f"/proc/{pid}/root"
    with reading(pid):
        base = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fds = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
            try:
                infos = os.open("fdinfo", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
                try:
                    for name in sorted(os.listdir(fds), key=int):
                        try:
                            if special and stat.S_IFMT(os.stat(name, dir_fd=fds).st_mode) in _PLAIN:
                                continue
                            found.append(_read(name, fds, infos, root, still=still))
                        except (FileNotFoundError, ProcessLookupError):
                            continue
                finally:
                    os.close(infos)
            finally:
                os.close(fds)
        finally:
            os.close(base)
    return found


def open_file(pid: int, fd: int) -> tuple[int, int]:
    """Return position and flags, O_CLOEXEC among them, of an open file; `NoSuchProcess`."""
    with reading(pid):
        lines = read_raw(f"/proc/{pid}/fdinfo/{fd}").split()
        return int(lines[lines.index(b"pos:") + 1]), int(lines[lines.index(b"flags:") + 1], 8)


def _read(name: str, fds: int, infos: int, root: str, *, still: bool) -> Descriptor:
    for _ in range(_ATTEMPTS):
        lines = os.fsdecode(read_raw(name, dir_fd=infos)).splitlines()
        if still:
            target, status = target_of(name, fds), os.stat(name, dir_fd=fds)
        else:
            # all answers are about one file, even if the program reopens the descriptor meanwhile
            handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=fds)
            try:
                target, status = target_of(f"/proc/self/fd/{handle}"), os.fstat(handle)
            finally:
                os.close(handle)
        # older kernels do not show the inode
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
    """Return whether a file's real name ends in the kernel's mark of deleted names."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except OSError:
        return False


def is_tty(rdev: int) -> bool:
    """Return whether a character device with this number is a terminal."""
    return os.major(rdev) in TTY_MAJORS and (os.major(rdev), os.minor(rdev)) not in _MISC_TTYLESS


@lru_cache(maxsize=1)
def _shared_memory() -> int:
    """Return the device of memory that has no name.

    That is memfds, and anonymous shared memory opened by ``/proc/PID/map_files``.
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
        # The file of a bound unix socket, opened as a path (O_PATH), has an inode of its file
        # system.
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
