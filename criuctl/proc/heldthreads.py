"""Hold all threads of a restored tree but a few by ptrace, before any of them has run.

CRIU lets go of a restored tree by ending, and then every thread runs at once. Where one thread has
to work alone first (the one that gives a process its GPU back), the others must not run. So each
process is sent SIGSTOP while CRIU still traces it, stops before its first instruction, is traced
thread by thread, and is continued; traced threads stay stopped. The stop is dequeued and applied to
all threads of the process under one lock of the kernel, before any of them returns to its program.

If criuctl dies, the kernel kills every held process (PTRACE_O_EXITKILL): a tree that is half
restored must not run. A process that was stopped by job control is left alone: it does not run
anyway.
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
    """The threads of the tree `pids`, all held but `free`.

    Only the thread that makes the object may use it.
    """

    def __init__(self, pids: Iterable[int], free: Collection[int]) -> None:
        self._pids = list(pids)
        self._free = frozenset(free)
        self._held: list[int] = []

    def stop(self) -> None:
        """Stop each process as soon as it would run; another process traces them now."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def hold(self) -> None:
        """Trace every thread to hold, then continue the processes: the free threads run.

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
        # The end of a leader is reported only after all its other threads have been waited for.
        for tid in sorted(self._held, key=self._pids.__contains__):
            while not self._let_go(tid):
                _check(until, tid)
        self._held.clear()

    def kill(self) -> None:
        """Kill the tree; none of it has run."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.release()

    def _let_go(self, tid: int) -> bool:
        """Detach from a thread; return whether it runs, or has ended and was waited for.

        The tracer of a thread must wait for it.
        """
        with suppress(OSError):
            inject.let_go(tid)
            return True
        if _state(tid) == "":
            return True
        if tid in self._pids and _parent(tid) == os.getpid():
            return _state(tid) == "Z"  # our own child, whose exit status is awaited elsewhere
        with suppress(ChildProcessError):
            os.waitpid(tid, inject.WALL | os.WNOHANG)
        return False


def _parent(pid: int) -> int:
    try:
        return int(read_status(pid)["PPid"])
    except NoSuchProcess:
        return 0


def _state(tid: int) -> str:
    """Return the state letter of /proc/TID/status; "" if there is no such thread."""
    try:
        return read_status(tid)["State"].strip()[:1]
    except (NoSuchProcess, KeyError):
        return ""


def _check(until: float, tid: int) -> None:
    if time.monotonic() > until:
        raise TimedOut(f"thread {tid} has not stopped within {_STOPPING:g} s")
    time.sleep(_PAUSE)
