"""The write lease of a session: at most one operator types.

Typing takes a free lease by itself, softly: once its owner has not typed for a second, the next
operator that types gets it. A lease that was asked for here is kept, until it is yielded, taken, or
its time is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import CriuctlError
from ..session import protocol
from ..session.protocol import ANSWER_TIMEOUT

if TYPE_CHECKING:
    from .connected import Connected

HOLD = 600.0  # seconds


class Lease:
    """`Session.lease`."""

    def __init__(self, session: Connected) -> None:
        self._session = session

    def request(
        self,
        ttl: float = protocol.DEFAULT_TTL,
        *,
        queue: bool = False,
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> Mapping[str, Any]:
        """Ask for the lease, for `ttl` seconds (1 to 3600) after the last call; return it.

        `LeaseHeld` if another operator has it. With `queue`, wait for it; `TimedOut` after
        `timeout` seconds.
        """
        with self._session._main() as connection:
            found = connection.lease_request(ttl, queue=queue, timeout=timeout)
        self._session._ttl = ttl
        return found

    def take(self, ttl: float = protocol.DEFAULT_TTL) -> Mapping[str, Any]:
        """Take the lease from the operator that has it; ``from`` of the answer is that, or None.

        `Forbidden` unless the role is admin, or a human takes it from an agent or a service.
        """
        with self._session._main() as connection:
            found = connection.lease_take(ttl)
        self._session._ttl = ttl
        return found

    def yield_(self, to: str | None = None) -> None:
        """Give the lease up, or hand it to the operator with the id `to`.

        `WrongState` or `Forbidden` if this operator does not have it.
        """
        self._session._ttl = 0.0
        with self._session._main() as connection:
            connection.lease_yield(to)

    @contextmanager
    def hold(self, ttl: float = HOLD, *, take: bool = False) -> Iterator[None]:
        """Hold the lease inside a ``with``; it is lost `ttl` seconds after the last call."""
        if take:
            self.take(ttl)
        else:
            self.request(ttl)
        try:
            yield
        finally:
            with suppress(CriuctlError):  # another operator has it by now, or the session is gone
                self.yield_()

    def owner(self) -> Mapping[str, Any] | None:
        """Return the operator that has the lease: operator, kind, name, expires; None: it is
        free.
        """
        lease: Mapping[str, Any] | None = self._session.status().facts.get("lease")
        return lease
