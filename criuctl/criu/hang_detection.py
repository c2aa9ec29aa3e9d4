"""Notice a CRIU that hangs while it restores, and kill it with all that it has made.

Nothing of the tree has run by then, so nothing is lost; a CRIU that dumps is never killed from here
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

PATIENCE = 120.0  # seconds without a tick of CPU time, while CRIU waits for no answer
LOOK = 1.0  # seconds between two looks
ROLLBACK = 10.0  # the same for a CRIU that rolls back
_ROUNDS = 100  # repetitions, for processes that are made meanwhile


class Watch:
    """Whether CRIU, the process `pid` or a descendant, makes progress."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._work, self._since = -1, time.monotonic()

    def idle(self) -> float:
        """Return the seconds since it last did something, as far as the looks show."""
        work = sum(map(_ticks, _made_by(self._pid)))
        if work != self._work:
            self._work, self._since = work, time.monotonic()
        return time.monotonic() - self._since


def end(criu: int) -> None:
    """SIGKILL CRIU, the process or a descendant, and what it has made, until nothing is left."""
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
    """Return CRIU, its descendants, and the root that it makes as its sibling.

    That root still runs CRIU's program.
    """
    try:
        own = [process.pid for process in read_tree(pid)]
        parent, born = read_process(pid).ppid, ProcessIdentity.of(pid).start_time
        programs = {program for known in own if (program := _program(known))}
        siblings = [
            c
            for c in children(parent)
            if c not in own and _program(c) in programs and _born(c) >= born
        ]
        return own + [process.pid for sibling in siblings for process in read_tree(sibling)]
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
    """Return the CPU time that it has used; -1: it has ended, or is a zombie."""
    try:
        fields = read_text(pid, "stat").rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[11]) + int(fields[12])
    except CriuctlError:
        return -1
