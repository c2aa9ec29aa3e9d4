"""File locks: those that CRIU forgets or loses, and those that another process holds at the
restore.

CRIU leaves out the locks of a descriptor whose open file it has met in another process already,
because they are noted with that one.  That is right for flock and OFD locks, but not for a POSIX
lock, which belongs to the process: a child's, on a file that its parent has opened.  And at a
restore the POSIX locks of a file that the process has also mapped are lost: the restorer closes a
descriptor of the file after it has set them.

CRIU takes flock and POSIX locks with calls that block, and another holder may keep a lock as long
as it lives: the original next to which a copy is to run, or a second instance that was started
meanwhile.  So each lock is tried here without waiting (`held`): a range is only queried; a flock is
taken and given back at once, because there is no query for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ..criu import schema
from ..criu.images import ImageSet, path_of, read, write
from ..errors import CriuctlError, NoSuchProcess
from ..proc import inject
from ..proc.descriptors import Descriptor
from ..proc.procfs import read_text
from ..report import Finding
from .base import FrozenTree, Repair, RestoredTree

_POSIX, _FLOCK, _OFD = 1, 2, 4  # in the images, CRIU's file-lock.h
_MAND = 32
_F_SETLK, _F_OFD_GETLK = 6, 36
_IMAGE = "filelocks.img"
_RANGE = struct.Struct("=hhxxxxqqixxxx")  # struct flock on 64-bit Linux
_HELD = re.compile(r"lock:\t\d+: POSIX +\S+ +(READ|WRITE) +\S+ \S+ (\d+) (\d+|EOF)")
# of /proc/locks
_LEASE = re.compile(r"\d+: LEASE +\S+ +(READ|WRITE) +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
# seconds in which a process that holds a lock briefly, or is just ending, releases it
_PATIENCE = 1.0


class FileLocks(Repair):
    """POSIX locks: those of children that CRIU forgets, and those that its restorer loses."""

    loses = "CRIU 4.2 loses POSIX locks of children, and of files that the process has also mapped."

    def amend_dump(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Add the POSIX locks that CRIU has forgotten."""
        entries = _entries(images)
        known = len(entries)
        for process in frozen.processes:
            held = frozen.opened.get(process.pid, ())
            files = {d.fd: (d.device, d.inode) for d in held}
            own = (e for e in entries if e.pid == process.ns_pid and e.flag & _POSIX)
            noted = {(files.get(e.fd), e.type, e.start, e.len) for e in own}
            for d in held:
                for kind, start, length in _posix_locks(d):
                    if (files[d.fd], kind, start, length) in noted:
                        continue
                    noted.add((files[d.fd], kind, start, length))
                    lock = {
                        "type": kind,
                        "pid": process.ns_pid,
                        "fd": d.fd,
                        "start": start,
                        "len": length,
                    }
                    entries.append(schema.message("FILE_LOCKS")(flag=_POSIX, **lock))
        if len(entries) > known:
            write(images.folder, _IMAGE, "FILE_LOCKS", entries)

    def mend(self, tree: RestoredTree) -> None:
        """Have each process set its POSIX locks again; one that it still has is not changed by
        that.
        """
        locks = [e for e in _entries(tree.images) if e.flag & _POSIX]
        for inner in {lock.pid for lock in locks}:
            try:
                with inject.stopped(tree.pids[inner]):
                    for lock in (lk for lk in locks if lk.pid == inner):
                        _set(tree.pids[inner], lock)
            except (OSError, KeyError, CriuctlError) as error:
                tree.reporter.warning(
                    f"PID {inner}: its file locks may not all be restored: {error}"
                )


def _entries(images: ImageSet) -> list[Any]:
    """Return CRIU's file_lock_entry of each lock."""
    return read(images.folder, _IMAGE, "FILE_LOCKS") if images.size(_IMAGE) else []


def _posix_locks(d: Descriptor) -> Iterator[tuple[int, int, int]]:
    """Return type, start and length of the POSIX locks that fdinfo shows; a length of 0 reaches to
    the end.
    """
    for kind, start, end in (found.groups() for found in map(_HELD.match, d.extra) if found):
        length = 0 if end == "EOF" else int(end) - int(start) + 1
        yield fcntl.F_RDLCK if kind == "READ" else fcntl.F_WRLCK, int(start), length


def _set(pid: int, lock: Any) -> None:
    with inject.placed(
        pid, _RANGE.pack(lock.type, os.SEEK_SET, lock.start, lock.len, 0)
    ) as address:
        result = inject.call(pid, inject.FCNTL, lock.fd, _F_SETLK, address)
    if result < 0:
        raise OSError(-result, f"lock of descriptor {lock.fd}: {os.strerror(-result)}")


class WantedLock(Struct, frozen=True):
    """One lock that the tree will take."""

    path: str
    pid: int
    fd: int
    flag: int
    type: int  # F_RDLCK, F_WRLCK
    start: int
    length: int


def wanted(images: ImageSet) -> list[WantedLock]:
    """Return the locks of the images on files that have a path."""
    locks = [e for e in _entries(images) if e.flag & (_POSIX | _FLOCK | _OFD)]
    if not locks:
        return []
    number = {
        holder: file_id for file_id, holders in images.holders().items() for holder in holders
    }
    # deleted files: the tree's own, even if another file has their name now
    remapped = images.remapped()
    paths = {
        e.id: path_of(e.reg) for e in images.files() if e.HasField("reg") and e.id not in remapped
    }
    return [
        WantedLock(paths[number[e.pid, e.fd]], e.pid, e.fd, e.flag, e.type, e.start, e.len)
        for e in locks
        if number.get((e.pid, e.fd)) in paths and not e.type & _MAND
    ]


def locked_elsewhere(images: ImageSet, own: Container[str], *, copy: bool) -> Iterator[Finding]:
    """Report the locks of the images that another process holds, and keeps, as errors.

    Locks on files that become the tree's own are left out.  `copy`: the original may run.
    """
    return errors([lock for lock in wanted(images) if lock.path not in own], copy=copy)


def leased_elsewhere(images: ImageSet) -> list[Finding]:
    """Report files of the images on which another process has a lease (F_SETLEASE) that the restore
    would break, as errors.

    Call it before any of them is opened: the kernel then sends that process a signal, which ends a
    program that does not expect it, and blocks the open.
    """
    leased = _leases()
    if not leased:
        return []
    remapped, holders = images.remapped(), images.holders()
    found = []
    for entry in images.files():
        if not entry.HasField("reg") or entry.id in remapped:
            continue
        with suppress(OSError):
            status = os.stat(path_of(entry.reg))
            kind, pid = leased.get((status.st_dev, status.st_ino), ("", 0))
            if kind == "WRITE" or (kind and entry.reg.flags & os.O_ACCMODE != os.O_RDONLY):
                text = (
                    f"{path_of(entry.reg)}: PID {pid} has a lease on it, which a restore would "
                    "break"
                )
                hint = (
                    "End that process first: the signal for a broken lease ends a program that "
                    "does not expect it."
                )
                found.append(
                    Finding(
                        "error",
                        "file-leased",
                        text,
                        hint,
                        *next(iter(holders.get(entry.id, ())), (None, None)),
                    )
                )
    return found


def _leases() -> dict[tuple[int, int], tuple[str, int]]:
    """Return the files of this host with leases: device and inode -> the kind (READ, WRITE) and the
    PID.
    """
    found = {}
    with open("/proc/locks", encoding="ascii") as file:
        for line in map(_LEASE.match, file):
            if line is not None:
                kind, pid, major, minor, inode = line.groups()
                found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = kind, int(pid)
    return found


def held(locks: list[WantedLock]) -> list[WantedLock]:
    """Return those of `locks` that another process has, and does not release within a second."""
    deadline = time.monotonic() + _PATIENCE
    while (refused := [lock for lock in locks if _is_held(lock)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return refused


def errors(locks: list[WantedLock], *, copy: bool) -> Iterator[Finding]:
    """Report those of `locks` that are not available."""
    for lock in held(locks):
        hint = "End that process, then restore."
        if copy:
            hint = (
                "A lock has one holder, and the copy cannot have this file, or another one that "
                "both write to, for its own: end the original first, or dump with --with-files. "
                "`criuctl verify --restore` tries a copy with files of its own."
            )
        text = f"{lock.path} is locked by {holder(lock.path)}, and the tree has a lock on it, too"
        yield Finding("error", "file-locked", text, hint, lock.pid, lock.fd)


def _is_held(lock: WantedLock) -> bool:
    try:
        # Neither a lease nor a FIFO that has replaced the file makes this wait.
        fd = os.open(lock.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # it is missing, or another kind of file: other checks report that
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) and not stat.S_ISDIR(os.fstat(fd).st_mode):
            return False
        if lock.flag & _FLOCK:
            with suppress(BlockingIOError):
                fcntl.flock(
                    fd,
                    (fcntl.LOCK_SH if lock.type == fcntl.F_RDLCK else fcntl.LOCK_EX)
                    | fcntl.LOCK_NB,
                )
                return False
            return True
        asked = _RANGE.pack(lock.type, os.SEEK_SET, lock.start, lock.length, 0)
        return bool(_RANGE.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(fd)


def holder(path: str) -> str:
    """Return the process that has a lock on this file.

    It is not the one of /proc/locks, which may have ended and left the lock to a child.
    """
    try:
        status = os.stat(path)
    except OSError:
        return "another process"
    key = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, NoSuchProcess):
            for fd in os.listdir(f"/proc/{pid}/fdinfo"):
                text = read_text(int(pid), f"fdinfo/{fd}")
                if any(line.startswith("lock:") and key in line for line in text.splitlines()):
                    return f"process {pid} ({read_text(int(pid), 'comm').strip()})"
    return "another process"
