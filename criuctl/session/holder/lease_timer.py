"""The lease in time: everybody is told who writes now, a lease that nobody keeps ends, and who waits for it gets it.

`lease.Authority` knows the rules and has no clock; here are the clock, the events and the audit log.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .event_loop import Timer
from .operators import Operator

if TYPE_CHECKING:
    from .holder import Holder

_FORGOTTEN_OPERATORS = 64  # of those who left, this many may still come back


class Leasing:
    """Keeps the lease of one holder's session."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._timer: Timer | None = None

    def left(self, operator: Operator, how: str) -> None:
        """An operator has no connection any more."""
        operator.connected = False
        self._holder.audit.write(how, {**operator.who(), "pid": operator.pid}, self._holder.identity.incarnation)
        self._holder.emit("operator", **operator.who(), role=operator.role, how=how)
        authority = self._holder.authority
        if authority.holder == operator.id:
            self._holder.emit("lease", lease=None, how="lost", **{"from": operator.who()})
            if how == "left" or authority.queue:
                authority.release(operator)
                self.free()
        if how == "left":
            authority.operators.pop(operator.id, None)
        gone = [o.id for o in authority.operators.values() if not o.connected and o.id != authority.holder]
        for identifier in gone[:-_FORGOTTEN_OPERATORS]:
            del authority.operators[identifier]

    def changed(self, how: str, by: Operator, **facts: Any) -> None:
        """Tell who writes now, and watch over its time."""
        self._holder.audit.write(f"lease-{how}", {**by.who(), "pid": by.pid}, self._holder.identity.incarnation, **facts)
        self._holder.emit("lease", lease=self._holder.lease(time.monotonic()), how=how, by=by.who(), **facts)
        self.watch()

    def watch(self) -> None:
        """Set the timer for the end of the lease, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._holder.authority.holder:
            self._timer = self._holder.loop.after(max(0.0, self._holder.authority.expires - time.monotonic()), self._due)

    def free(self) -> None:
        """Give the lease to who waits for it."""
        heir = self._holder.authority.next_in_queue(time.monotonic())
        if heir is not None:
            self.changed("request", heir)
        else:
            self.watch()  # nobody's lease runs out: a holder that idles has no deadline
        self._holder.answer_waits()

    def _due(self) -> None:
        self._timer = None
        expired = self._holder.authority.expired(time.monotonic())
        if expired is not None:
            self.changed("expired", expired)
            self.free()
        else:
            self.watch()  # it was prolonged meanwhile
