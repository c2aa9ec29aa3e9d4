"""Standing still when nobody says any more that this is the session's home.

`extend` says that it is, for some seconds; when they are over without another word every process is frozen, as `pause` does it,
until it is said again.  In the middle of a dump that is done as soon as the tree is let go.  The seconds are counted by a clock
that goes on while the host sleeps.  It is the holder who counts: whoever says it may be killed, stopped or cut off.

A person who resumes a session that stands still for this reason has decided that it is to run, and nothing is counted any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .event_loop import Timer
    from .holder import Holder

BY: Final[dict[str, Any]] = {"operator": "", "kind": "service", "name": "self-fence"}
_LOOK = 0.2  # seconds between two looks, at most
_BUSY = 0.02  # while a dump has the tree in its hands


def clock() -> float:
    """Seconds since the boot, those in which the host slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class DeadMan:
    """Of one holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.until: float | None = None  # by `clock`; None: nobody counts
        self._timer: Timer | None = None

    def extend(self, seconds: float) -> None:
        """The tree may run for so long; 0: for ever."""
        self.go_on(clock() + seconds if seconds else None)

    def go_on(self, until: float | None) -> None:
        """As `extend`, by `clock`."""
        self.until = until
        self._look()

    @property
    def holds(self) -> bool:
        """Whether the tree stands still for this reason."""
        return self._holder.state == "paused" and self._holder.paused_by == BY

    def _look(self) -> None:
        holder = self._holder
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if holder.state not in ("running", "paused"):
            self.until = None
            return
        left = self.until - clock() if self.until is not None else _LOOK
        due = holder.state == "running" if left <= 0 else self.holds and not holder.halted
        busy = due and holder.checkpointing.seizing
        if due and not busy:
            self._freeze() if left <= 0 else self._thaw()
        if self.until is not None or busy:
            self._timer = holder.loop.after(_BUSY if busy else min(left, _LOOK) if left > 0 else _LOOK, self._look)

    def _freeze(self) -> None:
        holder = self._holder
        method, count = holder.tree.freeze()
        holder.audit.write("self-fence", BY, holder.identity.incarnation, method=method, processes=count)
        holder.paused_by = BY
        holder.emit("paused", by=BY, method=method)
        holder.set_state("paused")

    def _thaw(self) -> None:
        holder = self._holder
        holder.tree.thaw()
        holder.audit.write("resume", BY, holder.identity.incarnation)
        holder.paused_by = None
        holder.emit("resumed", by=BY)
        holder.set_state("running")
