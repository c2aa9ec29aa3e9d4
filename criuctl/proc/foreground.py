"""The foreground process group of a terminal: its processes, and whether one waits for input.

A process waits for input of the terminal when one of its threads sleeps in a system call that
returns as soon as the terminal has input: read(2) and its kin on a descriptor of the terminal, or
poll(2), select(2), epoll_wait(2) and their kin with such a descriptor among the watched ones.  The
number and the arguments of the call are in ``/proc/PID/task/TID/syscall``; the arrays to which they
point are read from the process's memory, the set of an epoll descriptor from its fdinfo.

A descriptor is the terminal's if it has the terminal's device number on the same file system, or if
it is ``/dev/tty`` and the terminal is the controlling terminal of the process.

Known limits: a 32-bit process on a 64-bit kernel and a process that waits in io_uring are never
seen to wait.  The kernel shows all this to root and to the owner of the process only.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import CriuctlError
from . import inodes
from .procfs import UNREADABLE, all_tids, read_bytes, read_memory, read_raw

_READ, _POLL, _SELECT, _EPOLL, _RESTART = "read", "poll", "select", "epoll", "restart"
_CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 17, 19), _READ),  # read, pread64, readv
        **dict.fromkeys((7, 271), _POLL),  # poll, ppoll
        **dict.fromkeys((23, 270), _SELECT),  # select, pselect6
        **dict.fromkeys((232, 281, 441), _EPOLL),  # epoll_wait, epoll_pwait, epoll_pwait2
        219: _RESTART,  # restart_syscall
    },
    "aarch64": {
        **dict.fromkeys((63, 67, 65), _READ),
        73: _POLL,
        72: _SELECT,
        **dict.fromkeys((22, 441), _EPOLL),
        128: _RESTART,
    },
}
_POLLFD = struct.Struct("=ihh")
_POLL_INPUT = 0x1 | 0x40 | 0x80  # POLLIN, POLLRDNORM, POLLRDBAND
_MAX_WATCHED = 4096  # descriptors of one poll or select
_MAX_THREADS = 256  # of one process that are looked at
_CONTROLLING = os.makedev(5, 0)  # /dev/tty
_LONGEST = 4096  # bytes of a command line that are reported


class Terminal(NamedTuple):
    """A terminal, as the files that are open on it show it."""

    device: int  # st_rdev
    filesystem: int  # st_dev of its devpts

    @classmethod
    def of(cls, slave: int) -> Terminal:
        """Return the terminal behind this descriptor of its slave side."""
        status = os.fstat(slave)
        return cls(status.st_rdev, status.st_dev)


class Program(NamedTuple):
    """A process in the foreground."""

    pid: int
    argv: list[str]
    cwd: str


def program(pid: int) -> Program | None:
    """Return what runs as `pid`; None if it has ended."""
    try:
        words = read_bytes(pid, "cmdline")[:_LONGEST].rstrip(b"\0").split(b"\0")
        if words == [b""]:  # a process that has no memory any more, or has overwritten it
            words = [read_bytes(pid, "comm").strip()]
    except CriuctlError:
        return None
    try:
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        cwd = ""
    return Program(pid, [os.fsdecode(word) for word in words], cwd)


def group_of(pid: int) -> int | None:
    """Return the process group of a process that lives; None if it has ended."""
    fields = _stat(f"/proc/{pid}/stat")
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[2])


def inner_pid(pid: int) -> int:
    """Return the PID that the process has in its own PID namespace; 0 if it has ended."""
    try:
        for line in read_raw(f"/proc/{pid}/status").split(b"\n"):
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return 0


def foreground(master: int, members: Callable[[], Iterable[int]]) -> list[int]:
    """Return the processes of the foreground group of the terminal behind `master`, leader first.

    A group whose leader has ended consists of the others; they are among `members`, which is called
    only then.  The list is empty if the terminal has no foreground group.
    """
    try:
        group = os.tcgetpgrp(master)
    except OSError:
        return []
    if group <= 0:
        return []
    if group_of(group) == group:
        return [group]
    return [pid for pid in members() if group_of(pid) == group]


def waits_for_input(pid: int, terminal: Terminal) -> bool:
    """Whether a thread of the process sleeps until the terminal has input."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return False
    return any(
        _waits(pid, f"/proc/{pid}/task/{tid}", calls, terminal)
        for tid in all_tids(pid)[:_MAX_THREADS]
    )


def _waits(pid: int, task: str, calls: dict[int, str], terminal: Terminal) -> bool:
    fields = _stat(f"{task}/stat")
    if fields is None or fields[0] != b"S":
        return False
    try:
        words = read_raw(f"{task}/syscall").split()
        if len(words) < 7:  # "running", or -1: asleep outside of a system call
            return False
        kind = calls.get(int(words[0]))
        arguments = [int(word, 16) for word in words[1:7]]
        if kind == _RESTART:
            # A poll that was interrupted by a stop; other calls that restart so watch nothing.
            kind = _POLL if b"poll" in read_raw(f"{task}/wchan") else None
        if kind is None:
            return False
        tty = int(fields[4])
        return any(
            _is_terminal(pid, fd, terminal, tty) for fd in _watched(pid, task, kind, arguments)
        )
    except (CriuctlError, *UNREADABLE):
        return False


def _stat(path: str) -> list[bytes] | None:
    """Return the fields of a stat file from the state on; None if the process is gone."""
    try:
        return read_raw(path).rpartition(b")")[2].split()
    except OSError:
        return None


def _watched(pid: int, task: str, kind: str, arguments: list[int]) -> Iterable[int]:
    """Return the descriptors from which a call of this kind waits for input; `OSError`."""
    if kind == _READ:
        return [arguments[0]]
    if kind == _POLL:
        count = arguments[1]
        if count > _MAX_WATCHED:
            return []
        return polled(read_memory(pid, arguments[0], count * _POLLFD.size))
    if kind == _SELECT:
        count = arguments[0]
        if count > _MAX_WATCHED or not arguments[1]:
            return []
        return selected(read_memory(pid, arguments[1], (count + 63) // 64 * 8), count)
    return epolled(read_raw(f"{task}/fdinfo/{arguments[0]}"))


def polled(array: bytes) -> list[int]:
    """Return the descriptors of an array of ``struct pollfd`` that are watched for input."""
    return [fd for fd, events, _ in _POLLFD.iter_unpack(array) if events & _POLL_INPUT and fd >= 0]


def selected(bits: bytes, count: int) -> list[int]:
    """Return the descriptors below `count` in an ``fd_set``."""
    return [fd for fd in range(count) if bits[fd // 8] >> fd % 8 & 1]


def epolled(fdinfo: bytes) -> list[int]:
    """Return the descriptors that an epoll descriptor watches for input, from its fdinfo."""
    found = []
    for line in fdinfo.split(b"\n"):
        words = line.split()
        if len(words) >= 4 and words[0] == b"tfd:" and int(words[3], 16) & _POLL_INPUT:
            found.append(int(words[1]))
    return found


def _is_terminal(pid: int, fd: int, terminal: Terminal, controlling: int) -> bool:
    try:
        filesystem, device = inodes.device(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return False
    if device == _CONTROLLING:
        return _device(controlling) == terminal.device
    return (device, filesystem) == tuple(terminal)


def _device(tty_nr: int) -> int:
    """Return the device number that field 7 of a stat file encodes in the kernel's old way."""
    return os.makedev(tty_nr >> 8 & 0xFFF, tty_nr & 0xFF | tty_nr >> 12 & 0xFFF00)
