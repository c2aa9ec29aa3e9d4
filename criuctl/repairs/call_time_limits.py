"""Time limits of the system calls that a freeze interrupts, and the calls' numbers, as seen just
before the freeze.

poll and epoll_wait get their limit as a number of milliseconds, from when they are entered. Entered
again with the same number (`interrupted_calls`), a limit that is longer than the time from one
snapshot to the next would never run out: in an event loop that waits for nothing else, a timer
would never fire.

A sleep reads its duration from a struct in memory, and what is left goes to another, if the program
gave one; CRIU has it end with EINTR.  If none was given (``usleep``), what is left is waited for in
poll without descriptors: it ends as the sleep would.  epoll_pwait2, whose limit is such a struct,
goes on as epoll_pwait.  That puts a number where the program has a pointer, or nothing at all, so
only the C library's own calls are changed, which do not read the arguments afterwards; and no call
of a process with a seccomp filter, which may allow one call and not the other.  A long sleep
elsewhere keeps its EINTR.

A stopped thread does not show when it entered its call, because it has run since, into the stop.
So each is examined just before the freeze: since when it sleeps (the scheduler's ``exec_start``),
in which call, and how often it has gone to sleep.  When it is frozen, it must have gone to sleep
once more only, for the freeze: then it is still in that call.  The time is rather a little too
short: a limit may end late, and hardly ever early (see below).  If the kernel does not report all
of that (no /proc/PID/sched), limits begin again, as do those of the other calls, which are read
from memory.  The register stays changed after the call, which the kernel never does: code that
keeps the limit there for its next call waits shorter then.

A call that was interrupted before, by SIGSTOP or an earlier freeze, is restart_syscall to the
kernel and to CRIU from then on.  Which call it was, which must be known to enter it again, is
visible only from where in the kernel it waits.

The scheduler's clock may differ between processors, so it is read on the one that the thread was
on.  (Newer kernels may move a thread that has only just fallen asleep: then the elapsed time is
wrong by the difference of the two clocks.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..criu.images import ImageSet, read, write
from ..errors import CriuctlError
from ..proc.procfs import UNREADABLE, read_memory, read_status, read_text
from ..proc.tree import walk

_MINUS_EINTR = (1 << 64) - errno.EINTR
_NATIVE = 1  # not a 32-bit process, whose calls have other numbers
_POLL, _NANOSLEEP, _CLOCK_NANOSLEEP, _FUTEX, _EPOLL_PWAIT, _EPOLL_PWAIT2 = 7, 35, 230, 202, 281, 441
# number of the call -> which argument the limit is; 232: epoll_wait
_LIMITED = {_POLL: 2, 232: 3, _EPOLL_PWAIT: 3}
# which argument is the address of the limit
_SPANS = {_NANOSLEEP: 0, _CLOCK_NANOSLEEP: 2, _EPOLL_PWAIT2: 3}
_LEFT = {_NANOSLEEP: 1, _CLOCK_NANOSLEEP: 3}  # which argument is the address for what is left
_RESTART = 219  # restart_syscall
_LOOKED_AT = frozenset((*_LIMITED, *_SPANS, _RESTART))
_NO_CALL = (1 << 64) - 1
_PASSING = (0, 1, 7)  # the clocks that go on by themselves: real time, monotonic, since boot
_TIMESPEC = struct.Struct("qq")
_LONGEST = (1 << 31) - 1  # milliseconds
_C_LIBRARY = re.compile(r"(libc|libpthread)[.-]|ld-musl-")
_ARGUMENTS = ("di", "si", "dx", "r10", "r8", "r9")
_PATIENCE = 1.0  # seconds for the clocks of processors
# milliseconds; shorter limits run out between two snapshots and are left alone
_LEAST = 100
_RESTARTED = {  # where in the kernel -> the call
    "poll_schedule_timeout": _POLL,
    "do_sys_poll": _POLL,  # Linux 6.12
    "do_poll": _POLL,
    "do_restart_poll": _POLL,
    "futex_do_wait": _FUTEX,
    "futex_wait_queue": _FUTEX,
    "futex_wait_queue_me": _FUTEX,
    # all of a sleep's own functions are the scheduler's, which are not shown
    "do_syscall_64": _NANOSLEEP,
    "__x64_sys_restart_syscall": _NANOSLEEP,
    "hrtimer_nanosleep_restart": _NANOSLEEP,
    "alarm_timer_nsleep_restart": _CLOCK_NANOSLEEP,
    "alarmtimer_do_nsleep": _CLOCK_NANOSLEEP,
}
_CLOCKS = 16  # below this it is the number of a clock, not an address


class Waiting(Struct, frozen=True):
    """A thread in a call with a time limit."""

    words: tuple[int, ...]  # of the call: its number, six arguments, the stack pointer
    limit: int  # milliseconds
    then: int  # the call that waits for what is left, `_NO_CALL` for none
    passed: int  # milliseconds of the limit
    switches: int  # how often the thread has gone to sleep


class Waits:
    """The limits of one tree, for one dump: `look`, then `frozen`, then `amend`."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Waiting] = {}  # process, thread
        self._still: dict[int, Waiting] = {}  # thread, by its ID in its namespace
        # arguments and stack pointer -> number of the call
        self._restarted: dict[tuple[int, ...], int] = {}

    def look(self, root: int) -> None:
        """Examine the threads just before the tree is frozen."""
        self._waiting, self._restarted = {}, {}
        library = cache(_c_library)
        # processor -> threads, and since when they sleep
        slept: dict[int, list[tuple[tuple[int, int], Waiting, float]]] = {}
        for pid, tid in _threads(root):
            # it has ended, or the kernel does not report it
            with suppress(CriuctlError, *UNREADABLE):
                if (words := _call(pid, tid)) is None:
                    continue
                if words[0] == _RESTART:
                    self._restarted[words[1:]] = _restarted(pid, tid, words)
                    continue
                if (limit := _limit(pid, words)) < _LEAST or not (
                    then := _successor(pid, tid, words, limit, library)
                ):
                    continue
                waiting = Waiting(words, limit, then, 0, _switches(pid, tid))
                since = _exec_start(pid, tid)
                processor = int(read_text(pid, f"task/{tid}/stat").rpartition(")")[2].split()[36])
                # 0: sched statistics were reset, by SysRq
                if since > 0 and words == _call(pid, tid):
                    slept.setdefault(processor, []).append(((pid, tid), waiting, since))
        for processor, now in _clocks(slept).items() if slept else ():
            self._waiting |= {
                key: replace(one, passed=max(0, int(now - since)))
                for key, one, since in slept[processor]
            }

    def frozen(self, stops: int) -> None:
        """Compare the frozen threads; `stops`: how often a thread has gone to sleep for the
        freeze.
        """
        self._still = {}
        for (pid, tid), one in self._waiting.items():
            with suppress(CriuctlError, *UNREADABLE):
                if _switches(pid, tid) == one.switches + stops:
                    self._still[
                        int(read_status(pid, f"task/{tid}/status")["NSpid"].split()[-1])
                    ] = one

    def amend(self, images: ImageSet) -> None:
        """Edit the images in post-dump: a repeated call waits for what is left, and restarted calls
        get their number.
        """
        for number, one in self._still.items():
            for registers in _registers(images, f"core-{number}.img"):
                if _words(registers) == one.words:
                    registers.orig_ax = one.then
                    if one.then != _NO_CALL:
                        setattr(
                            registers,
                            _ARGUMENTS[_LIMITED[one.then]],
                            max(0, one.limit - one.passed),
                        )
        for name in images.names() if self._restarted else ():
            for registers in _registers(images, name) if name.startswith("core-") else ():
                words = _words(registers)
                if words[0] == _RESTART:
                    registers.orig_ax = self._restarted.get(words[1:], _RESTART)


def _registers(images: ImageSet, name: str) -> Iterator[Any]:
    """Yield the registers of the thread of an image, if it was interrupted; they are written
    back.
    """
    messages = read(images.folder, name, "CORE") if images.size(name) else []
    if messages and messages[0].HasField("thread_info"):
        registers = messages[0].thread_info.gpregs
        if (registers.ax, registers.mode) == (_MINUS_EINTR, _NATIVE):
            before = registers.SerializeToString()
            yield registers
            if registers.SerializeToString() != before:
                write(images.folder, name, "CORE", messages)


def _words(registers: Any) -> tuple[int, ...]:
    return (
        registers.orig_ax,
        *(getattr(registers, argument) for argument in _ARGUMENTS),
        registers.sp,
    )


def _threads(root: int) -> list[tuple[int, int]]:
    """Return (process, thread) of a tree; it may end meanwhile."""
    found: list[tuple[int, int]] = []
    with suppress(CriuctlError):
        for pid in walk(root):
            with suppress(OSError):
                found += [(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task")]
    return found


def _call(pid: int, tid: int) -> tuple[int, ...] | None:
    """Return the call in which a thread sleeps, if more must be known of it: number, six arguments,
    stack pointer.
    """
    fields = read_text(pid, f"task/{tid}/syscall").split()
    if len(fields) < 9 or int(fields[0]) not in _LOOKED_AT:
        return None
    return tuple(int(word, 0) for word in fields[:8])


def _restarted(pid: int, tid: int, words: tuple[int, ...]) -> int:
    """Return the call that a thread in `_RESTART` has made, or `_RESTART` if it is not known."""
    number = _RESTARTED.get(read_text(pid, f"task/{tid}/wchan").partition(".")[0], _RESTART)
    return _CLOCK_NANOSLEEP if number == _NANOSLEEP and words[1] < _CLOCKS else number


def _limit(pid: int, words: tuple[int, ...]) -> int:
    """Return milliseconds, rounded up; negative: no limit, or the call itself reports what is
    left.
    """
    call, arguments = words[0], words[1:7]
    if call in _LIMITED:
        # the kernel uses 32 bits
        return ctypes.c_int32(arguments[_LIMITED[call]] & 0xFFFFFFFF).value
    if (call in _LEFT and arguments[_LEFT[call]]) or not arguments[_SPANS[call]]:
        return -1
    # 1: until some time
    if call == _CLOCK_NANOSLEEP and (arguments[0] not in _PASSING or arguments[1]):
        return -1
    seconds, nanoseconds = _TIMESPEC.unpack(
        read_memory(pid, arguments[_SPANS[call]], _TIMESPEC.size)
    )
    return int(seconds * 1000 - -nanoseconds // 1_000_000)


def _successor(
    pid: int, tid: int, words: tuple[int, ...], limit: int, library: Callable[[int], list[range]]
) -> int:
    """Return the call that waits for the rest of another one's limit; 0: it begins again."""
    if words[0] in _LIMITED:
        return words[0]
    if limit <= _LONGEST and not int(read_status(pid, f"task/{tid}/status").get("Seccomp", "0")):
        at = int(read_text(pid, f"task/{tid}/syscall").split()[8], 0)
        if any(at in part for part in library(pid)):
            return _EPOLL_PWAIT if words[0] == _EPOLL_PWAIT2 else _POLL
    return 0 if words[0] == _EPOLL_PWAIT2 else _NO_CALL


def _c_library(pid: int) -> list[range]:
    """Return the address ranges of the C library in a process."""
    found = []
    for line in read_text(pid, "maps").splitlines():
        words = line.split(None, 5)
        if _C_LIBRARY.match(PurePosixPath(words[-1]).name):
            begin, end = words[0].split("-")
            found.append(range(int(begin, 16), int(end, 16)))
    return found


def _switches(pid: int, tid: int) -> int:
    return int(read_status(pid, f"task/{tid}/status")["voluntary_ctxt_switches"])


def _exec_start(pid: int, tid: int) -> float:
    """Return when it ran last, in milliseconds of its processor's clock."""
    for line in read_text(pid, f"task/{tid}/sched").splitlines():
        if line.startswith("se.exec_start"):
            return float(line.split(":")[1])
    raise ValueError("no exec_start")


def _clocks(processors: Collection[int]) -> dict[int, float]:
    """Return the clocks of those processors that criuctl can run on.

    A thread reads them, because it may wait without end for a busy processor.
    """
    found: dict[int, float] = {}

    def read_all() -> None:
        for processor in processors:
            with suppress(CriuctlError, *UNREADABLE):
                os.sched_setaffinity(0, {processor})
                found[processor] = _exec_start(os.getpid(), threading.get_native_id())

    reader = threading.Thread(target=read_all, daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        reader.start()
        reader.join(_PATIENCE)
    return dict(found)
