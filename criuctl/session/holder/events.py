"""The events of a session: sent to every subscriber, and kept for clients that come back."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from .. import protocol
from .base64_text import decoded, encoded
from .clients import Clients
from .session_files import SessionFiles
from .session_state import Identity

_REMEMBERED = 1000


class Events:
    """Numbers the events of one session and sends them."""

    def __init__(self, identity: Identity, files: SessionFiles, clients: Clients) -> None:
        self._identity, self._files, self._clients = identity, files, clients
        self.sequence = 0  # of the last event
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED)

    def emit(self, event: str, **facts: Any) -> None:
        """Send an event to every subscriber, at the present end of the output."""
        self.sequence += 1
        head = {"event": event, "sequence": self.sequence, "time": round(time.time(), 6)}
        session = {"incarnation": self._identity.incarnation, "session": self._identity.id}
        frame = protocol.json_frame({**head, **session, **facts})
        end = self._files.log.end
        self._remembered.append((self.sequence, frame))
        self._files.timeline.event(event, end, facts)
        for connection in self._clients.all():
            if connection.subscribed and not connection.dead:
                connection.event(frame, end)

    def since(self, sequence: int) -> list[bytes]:
        """Return the frames of the events after `sequence` that are still remembered."""
        return [frame for number, frame in self._remembered if number > sequence]

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        remembered = [[sequence, encoded(frame)] for sequence, frame in self._remembered]
        return {"sequence": self.sequence, "events": remembered}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self.sequence = state["sequence"]
        self._remembered.extend((sequence, decoded(frame)) for sequence, frame in state["events"])
