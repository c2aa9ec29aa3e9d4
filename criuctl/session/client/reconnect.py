"""The way back to a session: to the same holder after a lost connection, and to another host when the session has moved there.

Both wait and try again for a while.  Waiting is the caller's, `Pause`, so that its keyboard works meanwhile: it may find that
nobody wants to come back any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import CriuctlError, NotFound, SessionGone, TimedOut
from ...quoting import quoted
from .session import Session

Connect = Callable[[tuple[str, str] | None], Session]
"""Makes a connection, resuming the operator (id, token) if one is given."""

Follow = Callable[[str], Connect]
"""Makes what connects to a session by its address, which has moved there."""

Pause = Callable[[float], bool]
"""Waits for so many seconds; False when it is no longer wanted."""

RETRY = 0.2
_FOLLOW_SECONDS = 20.0  # for reaching the host that the session has moved to
_LINK_SECONDS = 3600.0  # that a lost connection to another host may take to come back


class Moved(Exception):
    """The session is on another host."""

    def __init__(self, url: str, host: str) -> None:
        super().__init__(url)
        self.url, self.host = url, host


class Wayback:
    """How one session is reached; `patience` is how many seconds a lost connection may take to come back."""

    def __init__(self, connect: Connect, patience: float, follow: Follow | None) -> None:
        self._connect, self._patience, self._follow = connect, patience, follow

    def again(self, lost: Session, why: CriuctlError, pause: Pause) -> Session | None:
        """A new connection of the same operator; None when `pause` has ended it.  `SessionGone`, or `Moved`."""
        resume: tuple[str, str] | None = (lost.operator, lost.token)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._connect(resume)
            except (NotFound, TimedOut) as gone:
                if gone.details.get("moved_to"):
                    raise Moved(gone.details["moved_to"], gone.details["home"]) from gone
                if time.monotonic() >= deadline:
                    raise SessionGone(gone.message or why.message) from gone
                if not isinstance(gone, SessionGone | TimedOut):
                    resume = None  # another holder than before, who does not know us: as somebody new
                if not pause(RETRY):
                    return None

    def after(self, moved: Moved, pause: Pause) -> Session | None:
        """A connection to where the session is now, and from now on the way back leads there; None when `pause` has ended it."""
        if self._follow is None:
            raise SessionGone(f"it has moved to {moved.host}: criuctl attach {quoted(moved.url)}")
        try:
            self._connect, self._patience = self._follow(moved.url), _LINK_SECONDS
        except CriuctlError as error:
            raise SessionGone(f"it has moved to {moved.host}, and {error.message}") from error
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while True:
            try:
                return self._connect(None)
            except CriuctlError as error:
                if time.monotonic() >= deadline:
                    told = f"it has moved to {moved.host}, and {error.message}: criuctl attach {quoted(moved.url)}"
                    raise SessionGone(told) from error
                if not pause(RETRY):
                    return None
