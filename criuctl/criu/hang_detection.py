"""A CRIU that does nothing any more while it restores: noticed, and ended with all that it has
made.

Nothing of the tree has run by then, so nothing is lost; a CRIU that dumps is never ended from here
(see `rpc`).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from ..errors import CriuctlError
from ..proc.procfs import read_text
from ..proc.tree import ProcessIdentity, children, read_process, read_tree

PATIENCE = 120.0  # seconds without a tick of CPU time, with nobody asked for anything
LOOK = 1.0  # seconds between two looks
ROLLBACK = 10.0  # the same of one that is to take back what it has made
_ROUNDS = 100  # looks for processes that are made meanwhile


class Watch:
    """Whether the CRIU that `pid` is, or is below, gets anything done."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._work, self._since = -1, time.monotonic()

    def idle(self) -> float:
        """Seconds since it last did something, as far as the looks tell."""
        work = sum(map(_ticks, _made_by(self._pid)))
        if work != self._work:
            self._work, self._since = work, time.monotonic()
        return time.monotonic() - self._since


def end(criu: int) -> None:
    """SIGKILL the CRIU that is, or is below, this process, and what it has made, until there is
    nothing more.
    """
    for _ in range(_ROUNDS):
        left = [pid for pid in _made_by(criu) if _ticks(pid) >= 0]
        for pid in left:
            with suppress(CriuctlError, ProcessLookupError):
                fd = ProcessIdentity.of(pid).open_pidfd()
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
        if not left:
            return
        time.sleep(0.02)


def _made_by(pid: int) -> list[int]:
    """CRIU, what is below it, and the root that it makes as its own sibling: that is CRIU's program
    still.
    """
    try:
        own = [process.pid for process in read_tree(pid)]
        parent, born = read_process(pid).ppid, ProcessIdentity.of(pid).start_time
        programs = {program for known in own if (program := _program(known))}
        beside = [
            c
            for c in children(parent)
            if c not in own and _program(c) in programs and _born(c) >= born
        ]
        return own + [process.pid for sibling in beside for process in read_tree(sibling)]
    except CriuctlError:
        return []  # it has ended


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _born(pid: int) -> int:
    try:
        return ProcessIdentity.of(pid).start_time
    except CriuctlError:
        return -1


def _ticks(pid: int) -> int:
    """CPU time that it has used; -1: it has ended, or is a zombie."""
    try:
        fields = read_text(pid, "stat").rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[11]) + int(fields[12])
    except CriuctlError:
        return -1
