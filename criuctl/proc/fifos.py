"""Named pipes (FIFOs) of this host: the processes that have one open, and its queued data.

Reading the queue here leaves it unchanged. A named pipe exists, with its data, while any process
has it open; opening it when no process has it open gives an empty one.
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
    """A process that has a named pipe open."""

    pid: int
    start_time: int
    command: str
    reads: bool

    def __str__(self) -> str:
        return f"PID {self.pid} ({self.command})"


def openers(sought: Container[Inode], but: Container[int] = ()) -> dict[Inode, list[Opener]]:
    """Return the processes that have these files open to read or to write, except `but`.

    Processes that may not be read are skipped. Nothing is opened.
    """
    found: dict[Inode, list[Opener]] = {}
    for pid in all_pids():
        if pid in but:
            continue
        # it ends at the moment, or may not be read
        with suppress(OSError, NoSuchProcess, PreflightRefused):
            reads: dict[Inode, bool] = {}
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed meanwhile
                    link = f"/proc/{pid}/fd/{name}"
                    mode = os.lstat(link).st_mode
                    if not mode & (stat.S_IRUSR | stat.S_IWUSR) or os.readlink(link).startswith(
                        _NO_PATHS
                    ):
                        continue  # an O_PATH descriptor can do neither
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
    """Open a named pipe to read and to write, without waiting; `OSError`, also for other files."""
    itself = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(itself).st_mode):
            raise OSError(errno.ESTALE, "it is not a named pipe any more", path)
        return os.open(f"/proc/self/fd/{itself}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(itself)


def room(fd: int) -> int:
    """Return the capacity of a pipe in bytes."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def put(fd: int, data: bytes) -> None:
    """Write back data that a pipe held just before, and so has room for."""
    while data:
        data = data[os.write(fd, data) :]


def queued(fd: int) -> bytes:
    """Return the data in a pipe that is open to read and to write."""
    ours, theirs = os.pipe()
    try:
        with suppress(OSError):  # larger than permitted: then only what fits
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
