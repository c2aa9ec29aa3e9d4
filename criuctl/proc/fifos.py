"""Named pipes (FIFOs) of this host: who has one open, and what is queued in it, which stays there.

A named pipe lives, with what is in it, for as long as any process has it open; who opens it when
nobody has gets an empty one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Container
from contextlib import suppress
from typing import NamedTuple

from ..errors import NoSuchProcess, PreflightRefused
from .procfs import all_pids, read_text
from .syscalls import tee
from .tree import ProcessIdentity

Inode = tuple[int, int]  # st_dev, st_ino

_NO_PATHS = ("pipe:", "socket:", "anon_inode:")


class Opener(NamedTuple):
    """A process that has one open."""

    pid: int
    start_time: int
    command: str
    reads: bool

    def __str__(self) -> str:
        return f"PID {self.pid} ({self.command})"


def openers(sought: Container[Inode], but: Container[int] = ()) -> dict[Inode, list[Opener]]:
    """Who, of all that we may look at, has these files open to read or to write; not the processes
    `but`.  Nothing is opened.
    """
    found: dict[Inode, list[Opener]] = {}
    for pid in all_pids():
        if pid in but:
            continue
        # it ends just now, or is not ours to look at
        with suppress(OSError, NoSuchProcess, PreflightRefused):
            reads: dict[Inode, bool] = {}
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed meanwhile
                    link = f"/proc/{pid}/fd/{name}"
                    mode = os.lstat(link).st_mode
                    if not mode & (stat.S_IRUSR | stat.S_IWUSR) or os.readlink(link).startswith(
                        _NO_PATHS
                    ):
                        continue  # O_PATH has neither
                    status = os.stat(link)
                    inode = status.st_dev, status.st_ino
                    if inode in sought:
                        reads[inode] = reads.get(inode, False) or bool(mode & stat.S_IRUSR)
            if reads:
                start_time, command = (
                    ProcessIdentity.of(pid).start_time,
                    read_text(pid, "comm").strip(),
                )
                for inode, does in reads.items():
                    found.setdefault(inode, []).append(Opener(pid, start_time, command, does))
    return found


def open_both_ways(path: str) -> int:
    """A descriptor of a named pipe, to read and to write, which waits for nobody; `OSError`, also
    for what is none.
    """
    itself = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(itself).st_mode):
            raise OSError(errno.ESTALE, "it is no named pipe any more", path)
        return os.open(f"/proc/self/fd/{itself}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(itself)


def room(fd: int) -> int:
    """Bytes that have room in a pipe."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def put(fd: int, data: bytes) -> None:
    """Put into a pipe what was in it just now, and has room."""
    while data:
        data = data[os.write(fd, data) :]


def queued(fd: int) -> bytes:
    """What is in a pipe that is open to read and to write."""
    ours, theirs = os.pipe()
    try:
        with suppress(OSError):  # more than we may have: then what there is room for
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, room(fd))
        try:
            left = tee(fd, theirs, room(fd))
        except BlockingIOError:
            return b""
        data = b""
        while len(data) < left and (piece := os.read(ours, left - len(data))):
            data += piece
        return data
    finally:
        os.close(ours)
        os.close(theirs)
