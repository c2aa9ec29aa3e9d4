"""Freezing a session when its home is no longer confirmed.

`extend` confirms the home for some seconds.  When they are over without another call every process
is frozen, as the operation `pause` does it, until the home is confirmed again.  In the middle of a
dump that is done as soon as the tree is let go.  The clock goes on while the host sleeps.  The
holder itself
counts: the program that confirms the home may be killed, stopped or cut off.

A person who resumes a session that stands still for this reason has decided that it is to run, and
nothing is counted any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from .audit_log import AuditWriter
from .event_loop import Loop, Timer
from .events import Events
from .processes import Tree
from .session_state import SessionState

BY: Final[dict[str, Any]] = {"operator": "", "kind": "service", "name": "self-fence"}
_LOOK = 0.2  # seconds between two looks, at most
_BUSY = 0.02  # seconds between two looks while a dump has seized the tree


def clock() -> float:
    """Return the seconds since the boot, those in which the host slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SelfFence:
    """The self-fence of one session; `seizing` says whether a dump or a restore has its tree."""

    def __init__(
        self,
        loop: Loop,
        tree: Tree,
        session: SessionState,
        events: Events,
        audit: AuditWriter,
        seizing: Callable[[], bool],
    ) -> None:
        self._loop, self._tree, self._session = loop, tree, session
        self._events, self._audit, self._seizing = events, audit, seizing
        self.until: float | None = None  # by `clock`; None: the home needs no confirmation
        self._timer: Timer | None = None

    def extend(self, seconds: float) -> None:
        """Confirm the home for so many seconds; 0: for ever."""
        self.resume(clock() + seconds if seconds else None)

    def resume(self, until: float | None) -> None:
        """Confirm the home until this time of `clock`; None: for ever."""
        self.until = until
        self._look()

    def stop(self) -> None:
        """Count no more; a session that stands still stays so."""
        self.until = None

    @property
    def holds(self) -> bool:
        """Whether the tree stands still for this reason."""
        return self._session.state == "paused" and self._session.paused_by == BY

    def _look(self) -> None:
        session = self._session
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if session.state not in ("running", "paused"):
            self.until = None
            return
        left = self.until - clock() if self.until is not None else _LOOK
        due = session.state == "running" if left <= 0 else self.holds and not session.halted
        busy = due and self._seizing()
        if due and not busy:
            self._freeze() if left <= 0 else self._thaw()
        if self.until is not None or busy:
            pause = _BUSY if busy else min(left, _LOOK) if left > 0 else _LOOK
            self._timer = self._loop.after(pause, self._look)

    def _freeze(self) -> None:
        method, count = self._tree.freeze()
        self._audit.write("self-fence", BY, method=method, processes=count)
        self._session.paused_by = BY
        self._events.emit("paused", by=BY, method=method)
        self._session.set_state("paused")

    def _thaw(self) -> None:
        self._tree.thaw()
        self._audit.write("resume", BY)
        self._session.paused_by = None
        self._events.emit("resumed", by=BY)
        self._session.set_state("running")
