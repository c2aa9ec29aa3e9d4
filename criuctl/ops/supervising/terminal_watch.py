"""A session's terminal, watched by its supervisor: its output, and whether a shell is at its
prompt.

One read-only connection to the holder is kept; it is made again when it breaks, for example when a
session is restored.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...config import Config
from ...errors import CriuctlError
from ..sessions import connect
from .decisions import Reason, Schedule

if TYPE_CHECKING:
    from ...session.client.session import Session

_SHORTEST, _LONGEST = 0.05, 0.5  # seconds between two looks
_NONE = 3600.0


class TerminalWatch:
    """Watches the terminal of one session, if the settings need it."""

    def __init__(self, config: Config, name: str, idle: float, step: bool) -> None:
        self._config, self._name, self._step = config, name, step
        self._wanted = bool(idle or step)
        self.pause = (
            max(_SHORTEST, min(_LONGEST, idle / 4 if idle else _LONGEST)) if self._wanted else _NONE
        )
        self._session: Session | None = None
        self._next = 0.0

    def look(self, schedule: Schedule, now: float) -> Reason | None:
        """Return whether a snapshot is due because of the terminal."""
        if not self._wanted or now < self._next:
            return None
        self._next = now + self.pause / 2
        try:
            status = self._connected().status()
        except CriuctlError:
            self.close()
            self._next = time.monotonic() + _LONGEST
            return None
        foreground = status.get("foreground") or {}
        at_prompt = self._step and bool(foreground.get("at_prompt"))
        return schedule.seen(now, int(status["offset"]), at_prompt=at_prompt)

    def _connected(self) -> Session:
        if self._session is None:
            self._session = connect(
                self._config,
                self._name,
                kind="service",
                role="observe",
                operator="criuctl-supervise",
            )
        return self._session

    def close(self) -> None:
        """Disconnect until the next look."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()
