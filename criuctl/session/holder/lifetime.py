"""When a holder is no longer needed: it then ends its event loop.

A session that is over keeps its holder until its exit status was collected, for `linger` seconds at
most, and until its last client has left.  A session that has moved to another host keeps it for a
while, for clients to follow.  A holder that was started for a restore ends if no restore brings a
tree.
"""

from __future__ import annotations

import time
from typing import Any

from ..protocol import MOVED_LINGER
from .clients import Clients, restores
from .connection import Connection
from .event_loop import Loop
from .session_state import SessionState

DEFAULT_LINGER = 3600.0  # seconds that an exit status is kept which no client collects
EXPECTED = 60.0  # seconds for a restore to connect to the holder that was started for it
_TOGETHER = 100.0  # seconds; systemd waits for 90 s before it kills


class Lifetime:
    """Decides when one holder ends."""

    def __init__(self, loop: Loop, session: SessionState, clients: Clients) -> None:
        self._loop, self._session, self._clients = loop, session, clients
        self.linger = DEFAULT_LINGER
        self.collected = False  # a client knows the exit status
        self.expecting = False  # started for a restore that has not brought its tree yet
        self.forsaken = False  # started for a restore that will bring no tree
        self._asked = float("-inf")  # when SIGTERM came

    def end(self) -> None:
        """End the holder as soon as the handlers of this round are through."""
        self._loop.running = False

    def end_if_done(self) -> None:
        """End the holder if nothing is left to do and no client is connected."""
        over = self._session.over and (self.collected or self.stopped)
        done = over or self._session.moved is not None or self.forsaken
        if done and not self._clients.connections:
            self.end()

    def collect(self) -> None:
        """Note that a client has got the exit status."""
        self.collected = True

    # -- SIGTERM ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """End the holder unless it still has a session to hold; called by the signal handler."""
        self._asked = time.monotonic()  # at once: what ends at the same time depends on it
        self._loop.soon(self._end_if_asked)

    def _end_if_asked(self) -> None:
        """End the holder after SIGTERM if its session is over or checkpointed.

        SIGTERM ends no session: it ends by itself, by the operation `kill`, or with the host.
        """
        waits = self._session.state == "checkpointed" and not self._clients.restorer_is_here()
        if self._session.over or waits:
            self.end()

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM came just now: a host that shuts down ends the holder and the tree."""
        return time.monotonic() - self._asked < _TOGETHER

    # -- waiting ----------------------------------------------------------------------------------

    def expect(self) -> None:
        """Wait for the restore that this holder was started for."""
        self.expecting = True
        self._loop.after(EXPECTED, self._give_up)

    def _give_up(self) -> None:
        self.forsaken = self.expecting and not self._clients.restorer_is_here()
        self.end_if_done()

    def arrived(self) -> None:
        """Note that the restore has brought a tree."""
        self.expecting = self.forsaken = False

    def lost(self, connection: Connection) -> None:
        """Note that a client is gone; without its restore the holder is of no use."""
        self.forsaken = self.forsaken or (self.expecting and restores(connection))

    def linger_for_status(self) -> None:
        """Wait, after the session's end, for a client that collects the exit status."""
        self._loop.after(self.linger, self._collected_by_none)

    def _collected_by_none(self) -> None:
        self.collected = True
        self.end_if_done()

    def linger_for_followers(self) -> None:
        """Wait, after the session has moved, for clients to follow it."""
        self._loop.after(MOVED_LINGER, self._followed)

    def _followed(self) -> None:
        if self._session.moved is not None:
            self.end()

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "collected": self.collected,
            "linger": self.linger,
            "expecting": self.expecting,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned, and wait for the same things."""
        self.collected, self.linger = state["collected"], state["linger"]
        if state.get("expecting"):
            self.expect()
        if self._session.moved is not None:
            self.linger_for_followers()
        if self._session.over:
            self.linger_for_status()
