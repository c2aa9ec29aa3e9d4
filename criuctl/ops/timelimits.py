"""Time limits of system calls that the freeze interrupts: what has passed of one is taken off when its call is entered again.

poll and epoll_wait get their limit as a number of milliseconds, from when they are entered.  Entered again with the same number
(`interrupted`), a limit that is longer than the time from one snapshot to the next would never run out: in an event loop that
waits for nothing else, a timer would never come.

No look at a stopped thread tells when it has entered its call, for it has run since, into the stop.  So each is looked at just
before the freeze: since when it sleeps (the scheduler's ``exec_start``), in which call, and how often it has gone to sleep.  When
it is frozen, it must have gone to sleep once more only, for that: then it is still in that call.  The time is a little too
short, never too long: a limit may end late, not early.  Where the kernel does not tell all of that (no /proc/PID/sched) limits
begin anew, as those do that a call reads from memory.

The scheduler's clock may be another one on each processor, so it is read on the one that the thread was on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ..criu.images import ImageSet, read, write
from ..errors import CriuctlError
from ..proc.procfs import read_status, read_text
from ..proc.tree import walk

_MINUS_EINTR = (1 << 64) - errno.EINTR
_NATIVE = 1  # not a 32-bit process, whose calls have other numbers
_LIMITED = {7: 2, 232: 3, 281: 3}  # poll, epoll_wait, epoll_pwait: which argument the limit is
_ARGUMENTS = ("di", "si", "dx", "r10", "r8", "r9")
_LEAST = 100  # milliseconds of a limit that is looked at: what is shorter runs out between two snapshots


class Waiting(Struct, frozen=True):
    """A thread in a call with a time limit."""

    words: tuple[int, ...]  # of the call: its number, six arguments, the stack pointer
    passed: int  # milliseconds of the limit
    switches: int  # how often the thread has gone to sleep


class TimeLimits:
    """Those of one tree, for one dump: `look`, then `frozen`, then `shorten`."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Waiting] = {}  # process, thread
        self._still: dict[int, Waiting] = {}  # thread, by its own number

    def look(self, root: int) -> None:
        """The tree is about to be frozen."""
        self._waiting = {}
        slept: dict[int, list[tuple[tuple[int, int], Waiting, float]]] = {}  # processor -> threads, and since when they sleep
        for pid, tid in _threads(root):
            with suppress(OSError, CriuctlError, ValueError, KeyError):  # it has ended, or the kernel does not tell
                if (words := _call(pid, tid)) is None:
                    continue
                waiting = Waiting(words, 0, _switches(pid, tid))
                since = _exec_start(pid, tid)
                processor = int(read_text(pid, f"task/{tid}/stat").rpartition(")")[2].split()[36])
                if words == _call(pid, tid):
                    slept.setdefault(processor, []).append(((pid, tid), waiting, since))
        for processor, threads in slept.items():
            if (now := _now(processor)) is not None:
                self._waiting |= {key: replace(waiting, passed=max(0, int(now - since))) for key, waiting, since in threads}

    def frozen(self, stops: int) -> None:
        """It is, and nothing else has been done to it; `stops`: how often a thread has gone to sleep for that."""
        self._still = {}
        for (pid, tid), one in self._waiting.items():
            with suppress(OSError, CriuctlError, ValueError, KeyError):
                if _switches(pid, tid) == one.switches + stops:
                    self._still[int(read_status(pid, f"task/{tid}/status")["NSpid"].split()[-1])] = one

    def shorten(self, images: ImageSet) -> None:
        """In post-dump: who enters such a call again waits for what is left."""
        for number, one in self._still.items():
            name = f"core-{number}.img"
            messages = read(images.folder, name, "CORE") if images.size(name) else []
            if not messages or not messages[0].HasField("thread_info"):
                continue
            registers = messages[0].thread_info.gpregs
            words = (registers.orig_ax, *(getattr(registers, argument) for argument in _ARGUMENTS), registers.sp)
            if (registers.ax, registers.mode, words) == (_MINUS_EINTR, _NATIVE, one.words):
                setattr(registers, _ARGUMENTS[_LIMITED[one.words[0]]], max(0, _limit(one.words) - one.passed))
                write(images.folder, name, "CORE", messages)


def _threads(root: int) -> list[tuple[int, int]]:
    """(process, thread) of a tree; it may end meanwhile."""
    found: list[tuple[int, int]] = []
    with suppress(CriuctlError):
        for pid in walk(root):
            with suppress(OSError):
                found += [(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task")]
    return found


def _call(pid: int, tid: int) -> tuple[int, ...] | None:
    """The call with a limit worth looking at in which a thread sleeps: number, six arguments, stack pointer."""
    told = read_text(pid, f"task/{tid}/syscall").split()
    if len(told) < 9 or int(told[0]) not in _LIMITED:
        return None
    words = tuple(int(word, 0) for word in told[:8])
    return words if _limit(words) >= _LEAST else None


def _limit(words: tuple[int, ...]) -> int:
    """Milliseconds; the kernel looks at 32 bits, negative is for ever."""
    return ctypes.c_int32(words[1 + _LIMITED[words[0]]] & 0xFFFFFFFF).value


def _switches(pid: int, tid: int) -> int:
    return int(read_status(pid, f"task/{tid}/status")["voluntary_ctxt_switches"])


def _exec_start(pid: int, tid: int) -> float:
    """When it ran last, in milliseconds of its processor's clock."""
    for line in read_text(pid, f"task/{tid}/sched").splitlines():
        if line.startswith("se.exec_start"):
            return float(line.split(":")[1])
    raise ValueError("no exec_start")


def _now(processor: int) -> float | None:
    """The clock of a processor; None where we may not run on it."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {processor})
        return _exec_start(os.getpid(), threading.get_native_id())
    except (OSError, CriuctlError, ValueError):
        return None
    finally:
        with suppress(OSError):  # they are not ours any more: the kernel has chosen others
            os.sched_setaffinity(0, allowed)
