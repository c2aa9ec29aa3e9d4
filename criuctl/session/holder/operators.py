"""Operators, their roles, and the write lease.

An operator is a client that said `hello`.  This module keeps the books and has no descriptors and
no
clock: the time is passed in, and `lease_timer` reports changes.  An operator's role is the one that
it asked for, but never above the ceiling that an admin has set for that (kind, name).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from ..protocol import DEFAULT_TTL, MAX_TTL, ROLES

QUIET = 1.0  # seconds without typing after which another operator may take a soft lease


class Refused(Exception):
    """A request is refused; `code` and `details` as in the protocol."""

    def __init__(self, code: str, message: str, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.details = code, message, hint, details


@dataclass(slots=True)
class Operator:
    """An operator that is connected, or was lately."""

    id: str
    kind: str
    name: str
    wanted: str  # the role that it asked for
    role: str
    token: str = field(default_factory=lambda: os.urandom(16).hex())
    since: float = 0.0
    connected: bool = True
    pid: int = 0  # of the process at the other end; 0: unknown

    def may(self, role: str) -> bool:
        """Return whether its role includes `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def who(self) -> dict[str, Any]:
        """Return it as events and answers name it."""
        return {"operator": self.id, "kind": self.kind, "name": self.name}


@dataclass(slots=True)
class Authority:
    """The operators of a session and its lease."""

    operators: dict[str, Operator] = field(default_factory=dict)
    ceilings: dict[tuple[str, str], str] = field(default_factory=dict)
    holder: str = ""  # operator id; "": the lease is free
    expires: float = 0.0  # on the clock that is passed in
    ttl: float = DEFAULT_TTL
    queue: deque[tuple[str, float]] = field(default_factory=deque)  # (operator id, ttl)
    # The lease came by typing or attaching: the next operator that types gets it once its owner
    # has not typed for a while.
    soft: bool = False
    wrote: float = 0.0  # when its holder typed last
    serial: int = 0

    # -- operators --------------------------------------------------------------------------------

    def join(self, kind: str, name: str, role: str, pid: int, since: float) -> Operator:
        """Add and return a new operator."""
        self.serial += 1
        operator = Operator(
            f"op-{self.serial}",
            kind,
            name,
            role,
            self._capped(kind, name, role),
            since=since,
            pid=pid,
        )
        self.operators[operator.id] = operator
        return operator

    def comes_back(self, operator: str, token: str, role: str) -> Operator | None:
        """Return the operator that lost its connection if the token is right; else None."""
        from hmac import compare_digest  # loads libcrypto: megabytes that few holders need

        found = self.operators.get(operator)
        if found is None or not compare_digest(found.token.encode(), token.encode()):
            return None
        found.wanted, found.role = role, self._capped(found.kind, found.name, role)
        found.connected = True
        return found

    def set_ceiling(self, kind: str, name: str, role: str | None) -> list[Operator]:
        """Set or remove the highest role of (kind, name); return operators whose role changed."""
        if role is None:
            self.ceilings.pop((kind, name), None)
        else:
            self.ceilings[kind, name] = role
        changed = []
        for operator in self.operators.values():
            if (operator.kind, operator.name) == (kind, name):
                new = self._capped(kind, name, operator.wanted)
                if new != operator.role:
                    operator.role = new
                    changed.append(operator)
        return changed

    def _capped(self, kind: str, name: str, role: str) -> str:
        ceiling = self.ceilings.get((kind, name), "admin")
        return min(role, ceiling, key=ROLES.index)

    # -- the lease --------------------------------------------------------------------------------

    def lease(self, now: float, wall: float) -> dict[str, Any] | None:
        """Return the lease as the protocol shows it; `wall` is the time of day at `now`."""
        if not self.holder:
            return None
        return {
            **self.operators[self.holder].who(),
            "expires": round(wall + self.expires - now, 3),
            "soft": self.soft,
        }

    def request(
        self,
        operator: Operator,
        ttl: float,
        now: float,
        *,
        soft: bool = False,
        polite: bool = False,
    ) -> bool:
        """Give the lease to `operator` unless another one has it; return whether it changed hands.

        `Refused`.  A `soft` lease goes to the next operator that asks, unless that one is `polite`,
        as soon as its owner has not typed for `QUIET` seconds: an operator that is only attached
        does not keep others from typing.
        """
        if (
            self.holder
            and self.holder != operator.id
            and self.operators[self.holder].connected
            and self.expires > now
        ):
            if polite or not self.soft or now - self.wrote < QUIET:
                other = self.operators[self.holder]
                raise Refused(
                    "lease-held",
                    f"{other.kind} {other.name!r} ({other.id}) is writing",
                    holder=other.who(),
                )
        changed = self.holder != operator.id
        kept = not changed and not self.soft
        self._give(operator, ttl, now)
        self.soft = soft and not kept
        if changed:
            self.wrote = now - QUIET
        return changed

    def take(self, operator: Operator, ttl: float, now: float) -> Operator | None:
        """Give the lease to `operator`; return the one that had it, if another did.  `Refused`."""
        other = self.operators.get(self.holder)
        if other is not None and other.id != operator.id and other.connected:
            if not (operator.may("admin") or (operator.kind == "human" and other.kind != "human")):
                raise Refused(
                    "forbidden",
                    f"{other.kind} {other.name!r} ({other.id}) is writing, and only an admin may "
                    "take that lease",
                    holder=other.who(),
                )
        self._give(operator, ttl, now)
        return other if other is not None and other.id != operator.id else None

    def grant(self, by: Operator, to: str, now: float) -> Operator:
        """Hand the lease to operator `to`, and return that.  `Refused`."""
        if self.holder != by.id and not by.may("admin"):
            raise Refused("forbidden", "only an admin or the holder of the lease may grant it")
        heir = self.operators.get(to)
        if heir is None or not heir.connected:
            raise Refused("not-found", f"there is no operator {to!r} here")
        if not heir.may("write"):
            raise Refused("forbidden", f"{heir.kind} {heir.name!r} may only observe")
        self._give(heir, DEFAULT_TTL, now)
        return heir

    def release(self, operator: Operator) -> bool:
        """Give up the lease and the place in the queue; return whether it had the lease."""
        self.queue = deque(entry for entry in self.queue if entry[0] != operator.id)
        if self.holder != operator.id:
            return False
        self.holder = ""
        return True

    def touch(self, operator: Operator, now: float) -> None:
        """Prolong the lease of `operator`, which has sent a message."""
        if self.holder == operator.id:
            self.expires = now + self.ttl

    def expired(self, now: float) -> Operator | None:
        """End a lease that has run out; return its owner, None if none has."""
        if self.holder and self.expires <= now:
            operator = self.operators[self.holder]
            self.holder = ""
            return operator
        return None

    def next_in_queue(self, now: float) -> Operator | None:
        """Give a free lease to the operator that has waited longest, and return that."""
        while self.queue and not self.holder:
            waiting, ttl = self.queue.popleft()
            operator = self.operators.get(waiting)
            if operator is not None and operator.connected and operator.may("write"):
                self._give(operator, ttl, now)
                return operator
        return None

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "operators": [asdict(operator) for operator in self.operators.values()],
            "ceilings": [[kind, name, role] for (kind, name), role in self.ceilings.items()],
            "lease": [self.holder, self.expires, self.ttl, list(self.queue), self.serial],
            "soft": [self.soft, self.wrote],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self.operators = {values["id"]: Operator(**values) for values in state["operators"]}
        self.ceilings = {(kind, name): role for kind, name, role in state["ceilings"]}
        self.holder, self.expires, self.ttl, queue, self.serial = state["lease"]
        self.queue.extend((operator, ttl) for operator, ttl in queue)
        self.soft, self.wrote = state.get("soft", (False, 0.0))

    # -- inside -----------------------------------------------------------------------------------

    def _give(self, operator: Operator, ttl: float, now: float) -> None:
        self.queue = deque(entry for entry in self.queue if entry[0] != operator.id)
        self.soft = False
        self.holder, self.ttl = operator.id, min(max(ttl, 1.0), MAX_TTL)
        self.expires = now + self.ttl
