"""Ending every process of a session, and knowing when that is done.

SIGTERM to all, after the grace SIGKILL to all, again and again until no process is found: a tree
that forks while it is killed is killed too.  A frozen tree is thawed once the signals are pending.
A holder looks by a timer, and only while it kills.

An interactive shell ignores SIGTERM and ends when its terminal is closed: what ignores SIGTERM and
has a terminal gets SIGHUP as well.  A program that handles SIGTERM does not: SIGHUP would end it in
the middle of that.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ...errors import CriuctlError
from ...proc.procfs import read_lines, read_text
from ...proc.tree import ProcessIdentity
from .event_loop import Loop
from .processes import Tree, adopts
from .session_state import SessionState

_LOOK = 0.02  # seconds between two looks


class Kills:
    """Kills the processes of one session.

    `finish` is called when the session was ``checkpointed``, where no end of the tree ends it.
    """

    def __init__(
        self, loop: Loop, tree: Tree, session: SessionState, finish: Callable[[], None]
    ) -> None:
        self._loop, self._tree, self._session, self._finish = loop, tree, session, finish
        self.under_way = 0

    def begin(self, grace: float, done: Callable[[int], None]) -> None:
        """Kill all, after `grace` seconds by SIGKILL; `done` gets the number of processes.

        While another kill waits for the tree, this one sends nothing before its grace is over: a
        program gets one SIGTERM, however many operators end the session.
        """
        self.under_way += 1
        members = self._tree.members()
        if not grace:
            self._tree.signal(signal.SIGKILL, members)
        elif self.under_way == 1:
            self._tree.signal(signal.SIGTERM, filter(self._is_no_init, members))
            self._tree.signal(signal.SIGHUP, filter(_wants_hangup, members))
        self._tree.thaw()
        if self._session.state == "paused":
            self._session.run_again()
            self._session.set_state("running")
        self._look(time.monotonic() + grace, set(members), done)

    def _is_no_init(self, process: ProcessIdentity) -> bool:
        """Return whether it is not the session's init, which would pass SIGTERM on to a program
        that has got it already.
        """
        return process != self._tree.root or not adopts(process.pid)

    def _look(self, hard: float, seen: set[ProcessIdentity], done: Callable[[int], None]) -> None:
        members = self._tree.members()
        seen.update(members)
        if not members:
            if self._session.state == "checkpointed":
                self._finish()
            self.under_way -= 1
            done(len(seen))
            return
        if time.monotonic() >= hard:
            self._tree.signal(signal.SIGKILL, members)
            self._tree.thaw()
        self._loop.after(_LOOK, lambda: self._look(hard, seen, done))


def _wants_hangup(process: ProcessIdentity) -> bool:
    """Return whether a process has a terminal and ignores SIGTERM."""
    try:
        terminal = read_text(process.pid, "stat").rpartition(")")[2].split()[4]
        status = read_lines(process.pid, "status")
        ignored = next(line for line in status if line.startswith("SigIgn:"))
    except (CriuctlError, StopIteration):
        return False  # it has ended
    return terminal != "0" and bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
