"""Operators, their roles, and the write lease.

An operator is a client that said `hello`.  This module keeps the books and has no descriptors and
no clock: the time is passed in, and `lease_timer` reports changes.  An operator's role is the one
that it asked for, but never above the ceiling that an admin has set for that (kind, name), or else
for the kind.

The lease usually ends with its owner's connection.  A *held* lease does not: it belongs to the
user, kind and name of its owner until its time is over, so that commands, each with a connection of
its own, type under it.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from ..protocol import ANY, DEFAULT_TTL, MAX_HOLD, MAX_TTL, ROLES
from ..roles import ceiling, lower

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
    uid: int = -1  # of its user; -1: unknown

    def may(self, role: str) -> bool:
        """Return whether its role includes `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)

    @property
    def identity(self) -> tuple[int, str, str]:
        """User, kind and name: what it has in common with its later connections."""
        return self.uid, self.kind, self.name

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
    held: bool = False  # kept for the identity of its holder, connected or not, until it expires
    serial: int = 0

    # -- operators --------------------------------------------------------------------------------

    def join(
        self, kind: str, name: str, role: str, pid: int, since: float, uid: int = -1
    ) -> Operator:
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
            uid=uid,
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
        """Set or remove the highest role of (kind, name); return operators whose role changed.

        The name `ANY` stands for all of the kind, and replaces what was set for single ones.
        """
        if name == ANY:
            self.ceilings = {key: old for key, old in self.ceilings.items() if key[0] != kind}
        if role is None:
            self.ceilings.pop((kind, name), None)
        else:
            self.ceilings[kind, name] = role
        changed = []
        for operator in self.operators.values():
            if operator.kind == kind and name in (operator.name, ANY):
                new = self._capped(kind, operator.name, operator.wanted)
                if new != operator.role:
                    operator.role = new
                    changed.append(operator)
        return changed

    def _capped(self, kind: str, name: str, role: str) -> str:
        return lower(role, ceiling(self.ceilings, kind, name))

    # -- the lease --------------------------------------------------------------------------------

    def lease(self, now: float, wall: float) -> dict[str, Any] | None:
        """Return the lease as the protocol shows it; `wall` is the time of day at `now`."""
        if not self.holder:
            return None
        return {
            **self.operators[self.holder].who(),
            "expires": round(wall + self.expires - now, 3),
            "soft": self.soft,
            "held": self.held,
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
        does not keep others from typing.  A held lease is passed on like a soft one between
        operators of one identity, and stays held for as long as before.
        """
        other = self.operators.get(self.holder)
        if other is not None and other.id != operator.id and self.expires > now:
            if self._keeps(other, operator, now, polite=polite):
                does = (
                    f"keeps the lease for {self.expires - now:.0f} s" if self.held else "is writing"
                )
                raise Refused(
                    "lease-held",
                    f"{other.kind} {other.name!r} ({other.id}) {does}",
                    holder=other.who(),
                    soft=self.soft or (self.held and other.identity == operator.identity),
                )
        changed = self.holder != operator.id
        if self.owns(operator) and self.held:
            self.holder = operator.id
        else:
            kept = not changed and not self.soft
            self._give(operator, ttl, now)
            self.soft = soft and not kept
        if changed:
            self.wrote = now - QUIET
        return changed

    def _keeps(self, owner: Operator, other: Operator, now: float, *, polite: bool) -> bool:
        """Return whether `owner` keeps the lease when `other` asks for it."""
        if self.held and owner.identity != other.identity:
            return True
        typing = polite or now - self.wrote < QUIET
        return owner.connected and (typing or not (self.soft or self.held))

    def owns(self, operator: Operator) -> bool:
        """Return whether `operator` has the lease, or may act for the operator that holds it."""
        owner = self.operators.get(self.holder)
        if owner is None or owner is operator:
            return owner is operator
        return self.held and owner.identity == operator.identity

    def held_until(self, operator: Operator) -> float:
        """Return until when the lease is held for the identity of `operator`; 0.0: it is not."""
        return self.expires if self.held and self.owns(operator) else 0.0

    def hold(self, operator: Operator, seconds: float, now: float) -> None:
        """Keep the lease, which `operator` has, for its identity and so many seconds from now."""
        self._give(operator, DEFAULT_TTL, now)
        self.held, self.expires = True, now + min(max(seconds, 1.0), MAX_HOLD)

    def take(self, operator: Operator, ttl: float, now: float) -> Operator | None:
        """Give the lease to `operator`; return the one that had it, if another did.  `Refused`.

        One that is held for the same identity stays held for as long as before.
        """
        other = self.operators.get(self.holder)
        if self.held and self.owns(operator):
            self.holder = operator.id
            return other if other is not operator else None
        if other is not None and other.id != operator.id and (other.connected or self.held):
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
        if not self.owns(by) and not by.may("admin"):
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
        if not self.owns(operator):
            return False
        self.holder, self.held = "", False
        return True

    def touch(self, operator: Operator, now: float) -> None:
        """Prolong the lease of `operator`, which has sent a message."""
        if self.holder == operator.id and not self.held:
            self.expires = now + self.ttl

    def expired(self, now: float) -> Operator | None:
        """End a lease that has run out; return its owner, None if none has."""
        if self.holder and self.expires <= now:
            operator = self.operators[self.holder]
            self.holder, self.held = "", False
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
            "lease_held": self.held,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self.operators = {values["id"]: Operator(**values) for values in state["operators"]}
        self.ceilings = {(kind, name): role for kind, name, role in state["ceilings"]}
        self.holder, self.expires, self.ttl, queue, self.serial = state["lease"]
        self.queue.extend((operator, ttl) for operator, ttl in queue)
        self.soft, self.wrote = state.get("soft", (False, 0.0))
        self.held = state.get("lease_held", False)

    # -- inside -----------------------------------------------------------------------------------

    def _give(self, operator: Operator, ttl: float, now: float) -> None:
        self.queue = deque(entry for entry in self.queue if entry[0] != operator.id)
        self.soft = self.held = False
        self.holder, self.ttl = operator.id, min(max(ttl, 1.0), MAX_TTL)
        self.expires = now + self.ttl
