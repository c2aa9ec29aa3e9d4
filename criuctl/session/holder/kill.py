"""Ending every process of a session, and knowing that it is so.

SIGTERM to all, after the grace SIGKILL to all, again and again until a look finds nobody: a tree that forks while it is
killed is killed too.  A frozen tree is thawed once the signals are pending.  A holder looks by a timer, only while it kills.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...proc.tree import ProcessIdentity

if TYPE_CHECKING:
    from .holder import Holder

_LOOK = 0.02


class Kill:
    """One kill under way; `done` gets the number of processes that are gone."""

    def __init__(self, holder: Holder, grace: float, done: Callable[[int], None]) -> None:
        self._holder, self._done = holder, done
        self._hard = time.monotonic() + grace
        holder.kills += 1
        self._seen: set[ProcessIdentity] = set()
        members = holder.tree.members()
        holder.tree.signal(signal.SIGTERM if grace else signal.SIGKILL, members)
        self._seen.update(members)
        self._thaw()
        self._look()

    def _thaw(self) -> None:
        holder = self._holder
        holder.tree.thaw()
        if holder.state == "paused":
            holder.paused_by, holder.halted = None, False
            holder.set_state("running")

    def _look(self) -> None:
        holder = self._holder
        members = holder.tree.members()
        self._seen.update(members)
        if not members:
            if holder.state == "checkpointed":
                holder.finish("exited", None, None)
            holder.kills -= 1
            self._done(len(self._seen))
            return
        if time.monotonic() >= self._hard:
            holder.tree.signal(signal.SIGKILL, members)
            holder.tree.thaw()
        holder.loop.after(_LOOK, self._look)
