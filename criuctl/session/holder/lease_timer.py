"""The write lease in time: it is announced, runs out, and goes to the next one in the queue.

`operators.Authority` has the rules and no clock; here are the clock, the events and the audit log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .audit_log import AuditWriter
from .event_loop import Loop, Timer
from .events import Events
from .operators import Authority, Operator, Refused
from .session_state import SessionState

_FORGOTTEN_OPERATORS = 64  # operators that were lost; so many may still come back


class Leasing:
    """Keeps the lease of one session."""

    def __init__(
        self, loop: Loop, session: SessionState, events: Events, audit: AuditWriter
    ) -> None:
        self._loop, self._session, self._events, self._audit = loop, session, events, audit
        self.authority = Authority()
        self.save: Callable[[], None] = lambda: None  # writes the state file
        self._timer: Timer | None = None

    def current(self) -> dict[str, Any] | None:
        """Return the lease as the protocol shows it; None if its owner is not connected, unless it
        is held.
        """
        owner = self.authority.operators.get(self.authority.holder)
        if owner is None or not (owner.connected or self.authority.held):
            return None
        return self.authority.lease(time.monotonic(), time.time())

    def claim(
        self, by: Operator, ttl: float, how: str, *, soft: bool = False, polite: bool = False
    ) -> None:
        """Give the lease to `by`; `Refused` if another has it, or a human has halted the session.

        `soft` and `polite` are as in `Authority.request`.
        """
        self._check(by)
        if self.authority.request(by, ttl, time.monotonic(), soft=soft, polite=polite):
            self.changed(how, by)

    def take(self, by: Operator, ttl: float, hold: float) -> Operator | None:
        """Take the lease for `by`, held for so many seconds (0: not held); return its last owner.

        A lease that is held for longer for the same identity stays so.  `Refused`.
        """
        self._check(by)
        now = time.monotonic()
        kept = self.authority.held_until(by)
        other = self.authority.take(by, ttl, now)
        self.changed("take", by, **{"from": other.who() if other is not None else None})
        if hold and now + hold > kept:
            self.hold(by, hold)
        return other

    def _check(self, by: Operator) -> None:
        """Refuse the lease of a halted session to all but humans."""
        if self._session.halted and by.kind != "human":
            raise Refused(
                "state",
                "the session is halted: until it is resumed only humans write",
                state=self._session.state,
            )

    def hold(self, by: Operator, seconds: float) -> None:
        """Keep the lease, which `by` has just got, for its identity and so many seconds."""
        self.authority.hold(by, seconds, time.monotonic())
        self.changed("hold", by, seconds=seconds)

    def limit(self, kind: str, name: str, role: str | None, by: Operator) -> None:
        """Set the highest role of (kind, name); an operator that may not write loses the lease."""
        self._audit.record("set-role", by, of={"kind": kind, "name": name}, role=role)
        limited = self.authority.set_ceiling(kind, name, role)
        self.save()
        for operator in limited:
            self._events.emit("operator", **operator.who(), role=operator.role, how="role")
            if not operator.may("write"):
                self.withdraw("take", by, operator)

    def withdraw(self, how: str, by: Operator, owner: Operator) -> None:
        """Take the lease away from `owner`, if it has it, and give it to the next one in the
        queue.
        """
        if self.authority.holder == owner.id and self.authority.release(owner):
            self.changed(how, by, **{"from": owner.who()})
            self.free()

    def left(self, operator: Operator, how: str) -> None:
        """Handle the loss of an operator's last connection: it ``left``, or it was ``lost``."""
        operator.connected = False
        self._audit.record(how, operator)
        self._events.emit("operator", **operator.who(), role=operator.role, how=how)
        authority = self.authority
        held = authority.held and authority.holder == operator.id  # then it stays the owner
        if authority.holder == operator.id and not held:
            self._events.emit("lease", lease=None, how="lost", **{"from": operator.who()})
            if how == "left" or authority.queue:
                authority.release(operator)
                self.free()
        if how == "left" and not held:
            authority.operators.pop(operator.id, None)
        gone = [
            other.id
            for other in authority.operators.values()
            if not other.connected and other.id != authority.holder
        ]
        for identifier in gone[:-_FORGOTTEN_OPERATORS]:
            del authority.operators[identifier]

    def changed(self, how: str, by: Operator, **facts: Any) -> None:
        """Announce a change of the lease, and set the timer for its end."""
        self._audit.record(f"lease-{how}", by, **facts)
        self._events.emit("lease", lease=self.current(), how=how, by=by.who(), **facts)
        self.watch()

    def watch(self) -> None:
        """Set the timer for the end of the lease, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.authority.holder:
            left = max(0.0, self.authority.expires - time.monotonic())
            self._timer = self._loop.after(left, self._due)

    def free(self) -> None:
        """Give a free lease to the operator that waits longest."""
        heir = self.authority.next_in_queue(time.monotonic())
        if heir is not None:
            self.changed("request", heir)
        else:
            self.watch()  # no lease, no timer: an idle holder sleeps without a deadline

    def _due(self) -> None:
        self._timer = None
        expired = self.authority.expired(time.monotonic())
        if expired is not None:
            self.changed("expired", expired)
            self.free()
        else:
            self.watch()  # it was prolonged meanwhile

    # -- re-exec ----------------------------------------------------------------------------------

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `Authority.to_state` returned."""
        self.authority.restore(state)
        self.watch()
