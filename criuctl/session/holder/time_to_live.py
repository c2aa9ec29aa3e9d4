"""Ending a session when its time is over.

A copy that `fork` makes with a time to live has it among the facts of its holder, as a time of the
clock. The holder itself looks: no other program has to live until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .audit_log import AuditWriter
from .event_loop import Loop
from .events import Events
from .kill import Kills
from .session_state import SessionState

BY = {"operator": "", "kind": "service", "name": "time-to-live"}
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_LOOK = 30.0  # seconds between two looks, at most: the clock may be set
_BUSY = 0.2  # the same while a dump or a restore has the tree in its hands


class TimeToLive:
    """The time to live of one session; `busy` says whether a dump or a restore has its tree."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        kills: Kills,
        events: Events,
        audit: AuditWriter,
        busy: Callable[[], bool],
    ) -> None:
        self._loop, self._session, self._kills = loop, session, kills
        self._events, self._audit, self._busy = events, audit, busy

    @property
    def ends(self) -> float | None:
        """When the session ends, in Unix seconds; None: by itself."""
        ends = self._session.identity.facts.get("ends")
        return float(ends) if isinstance(ends, int | float) else None

    def begin(self) -> None:
        """Look for the first time; also in the next program of this holder."""
        if self.ends is not None:
            self._look()

    def _look(self) -> None:
        ends, session = self.ends, self._session
        if ends is None or session.over:
            return
        left = ends - time.time()
        if left > 0 or session.state not in ("running", "paused"):
            self._loop.after(max(_BUSY, min(left, _LOOK)), self._look)
        elif self._busy():
            self._loop.after(_BUSY, self._look)
        else:
            self._audit.write("kill", BY, grace=GRACE)
            self._events.emit("killed", by=BY)
            self._kills.begin(GRACE, lambda _killed: None)
