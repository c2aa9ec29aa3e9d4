"""Connections that were made to a server and have not asked anything yet: how many, and for how
long.

Anybody who reaches a port can open connections and leave them half open, or say one byte now and
then.  Each has one deadline for all that it has to say before the server knows what it wants,
however many bytes come meanwhile.  And there is room for so many: for one more, the oldest has to
go, first of its own peer.  So an honest client, which asks at once, is served however many others
wait, also where it has the same address as they have.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

Connection = TypeVar("Connection")

MOST = 128  # connections that wait
MOST_OF_ONE = 64  # of them those of one address
DEADLINE = 30.0  # seconds


class Waiting(Generic[Connection]):
    """Safe to use from several threads.  Whatever it returns must be cut off by the caller."""

    def __init__(
        self, most: int = MOST, of_one: int = MOST_OF_ONE, deadline: float = DEADLINE
    ) -> None:
        self._most, self._of_one, self._deadline = most, of_one, deadline
        self._lock = threading.Lock()
        self._since: dict[Connection, tuple[str, float]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._since)

    def begin(self, connection: Connection, peer: str) -> list[Connection]:
        """The connection waits from now on; those that have to go for it."""
        with self._lock:
            self._since.pop(connection, None)
            same = [other for other, (address, _since) in self._since.items() if address == peer]
            gone = (
                same[:1]
                if len(same) >= self._of_one
                else list(self._since)[: len(self._since) >= self._most]
            )
            for other in gone:
                del self._since[other]
            self._since[connection] = peer, time.monotonic()
            return gone

    def end(self, connection: Connection) -> bool:
        """It has asked, or is gone; whether it was waiting."""
        with self._lock:
            return self._since.pop(connection, None) is not None

    def overdue(self) -> list[Connection]:
        """Those whose time is over; they do not wait any more."""
        before = time.monotonic() - self._deadline
        with self._lock:
            gone = [
                connection for connection, (_peer, since) in self._since.items() if since < before
            ]
            for connection in gone:
                del self._since[connection]
            return gone
