"""Limit the connections to a server that have not sent their request yet, in number and in time.

Any client that reaches a port can open connections and leave them half open, or send one byte now
and then. Each has one deadline for its whole request, however many bytes come meanwhile. Their
number is limited: for one more, the oldest is closed, preferably one of the same peer. So an honest
client, which sends its request at once, is served however many others wait, even from the same
address.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

Connection = TypeVar("Connection")

MOST = 128  # waiting connections
MOST_OF_ONE = 64  # of these, from one address
DEADLINE = 30.0  # seconds


class Waiting(Generic[Connection]):
    """The waiting connections.

    Safe to use from several threads. The caller must close what the methods return.
    """

    def __init__(
        self, most: int = MOST, of_one: int = MOST_OF_ONE, deadline: float = DEADLINE
    ) -> None:
        self._most, self._of_one, self._deadline = most, of_one, deadline
        self._lock = threading.Lock()
        self._since: dict[Connection, tuple[str, float]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._since)

    def begin(self, connection: Connection, peer: str) -> list[Connection]:
        """Add a waiting connection; return those to close for it."""
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
        """Remove a connection that has sent its request or is gone.

        Return whether it was waiting.
        """
        with self._lock:
            return self._since.pop(connection, None) is not None

    def overdue(self) -> list[Connection]:
        """Remove and return the connections whose time is over."""
        before = time.monotonic() - self._deadline
        with self._lock:
            gone = [
                connection for connection, (_peer, since) in self._since.items() if since < before
            ]
            for connection in gone:
                del self._since[connection]
            return gone
