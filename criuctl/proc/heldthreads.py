"""All threads of a tree but a few held by ptrace, from a moment at which none of them has run.

CRIU lets go of a restored tree by ending, and then every thread runs at once.  Where one thread has
to work alone first (that which gives a process its GPU back), the others must not: so each process
is sent SIGSTOP while CRIU still traces it, stops with its first step, is traced thread by thread,
and is continued; what we trace stays where it is.  The stop is dequeued and applied to all threads
of the process under one lock of the kernel, before any of them returns to its program.

If we die, the kernel kills every held process (PTRACE_O_EXITKILL): a tree that is half restored
must not run.  A process that was stopped by job control is left alone: it does not run anyway.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from ..errors import NoSuchProcess, TimedOut
from . import inject
from .procfs import all_tids, read_status

_PAUSE = 0.002
_STOPPING = 30.0  # seconds for all threads of a tree to stop


class HeldThreads:
    """The tree `pids`, of whose threads all but `free` are held.  The thread that makes it must do
    all with it.
    """

    def __init__(self, pids: Iterable[int], free: Collection[int]) -> None:
        self._pids = list(pids)
        self._free = frozenset(free)
        self._held: list[int] = []

    def stop(self) -> None:
        """Have each process stop as soon as it would run; they are traced by another process
        now.
        """
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def hold(self) -> None:
        """Trace every thread that is to be held, then continue the processes: the free threads run.
        `TimedOut`.
        """
        until = time.monotonic() + _STOPPING
        for pid in self._pids:
            while _state(pid) not in ("T", "", "Z"):
                _check(until, pid)
        for pid in self._pids:
            for tid in all_tids(pid):
                if tid not in self._free:
                    with suppress(ProcessLookupError):
                        inject.seize(tid, exit_kill=True)
                        self._held.append(tid)
        for tid in self._held:
            with suppress(ProcessLookupError):
                inject.interrupt(tid)
        for tid in self._held:
            while _state(tid) not in ("t", "", "Z"):
                _check(until, tid)
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def release(self) -> None:
        """Let every held thread run."""
        until = time.monotonic() + _STOPPING
        # A leader's end is seen when all its other threads have been waited for.
        for tid in sorted(self._held, key=self._pids.__contains__):
            while not self._let_go(tid):
                _check(until, tid)
        self._held.clear()

    def kill(self) -> None:
        """End the tree: nothing of it has run."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.release()

    def _let_go(self, tid: int) -> bool:
        """Whether it runs, or has ended and was waited for, as whoever traces a thread must."""
        with suppress(OSError):
            inject.let_go(tid)
            return True
        if _state(tid) == "":
            return True
        if tid in self._pids and _parent(tid) == os.getpid():
            return _state(tid) == "Z"  # our own child, whose exit status somebody waits for
        with suppress(ChildProcessError):
            os.waitpid(tid, inject.WALL | os.WNOHANG)
        return False


def _parent(pid: int) -> int:
    try:
        return int(read_status(pid)["PPid"])
    except NoSuchProcess:
        return 0


def _state(tid: int) -> str:
    """The letter of /proc/TID/status; "" when there is no such thread."""
    try:
        return read_status(tid)["State"].strip()[:1]
    except (NoSuchProcess, KeyError):
        return ""


def _check(until: float, tid: int) -> None:
    if time.monotonic() > until:
        raise TimedOut(f"thread {tid} has not stopped within {_STOPPING:g} s")
    time.sleep(_PAUSE)
