"""Connecting again to a session: after a lost connection, or on the host that it has moved to.

Both try again for a while.  The caller does the waiting between two tries (`Pause`), so that its
keyboard works meanwhile and the user can give up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import CriuctlError, NotFound, SessionGone, TimedOut
from ...quoting import quoted
from .session import Session

Connect = Callable[[tuple[str, str] | None], Session]
"""Connects, and goes on as the operator (id, token) if one is given."""

Follow = Callable[[str], Connect]
"""Returns what connects to the address that a session has moved to."""

Pause = Callable[[float], bool]
"""Waits for so many seconds; returns False if the user has given up."""

RETRY = 0.2
_FOLLOW_SECONDS = 20.0  # for reaching the host that the session has moved to
_LINK_SECONDS = 3600.0  # in which a lost connection to another host must come back


class Moved(Exception):
    """The session is on another host."""

    def __init__(self, url: str, host: str) -> None:
        super().__init__(url)
        self.url, self.host = url, host


class Reconnection:
    """How one session is reached; a lost connection must come back within `patience` seconds."""

    def __init__(self, connect: Connect, patience: float, follow: Follow | None) -> None:
        self._connect, self._patience, self._follow = connect, patience, follow

    def again(self, lost: Session, why: CriuctlError, pause: Pause) -> Session | None:
        """Return a new connection of the same operator; None if `pause` returned False.

        `SessionGone`, or `Moved`.
        """
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
                    resume = None  # another holder, which does not know this operator
                if not pause(RETRY):
                    return None

    def after(self, moved: Moved, pause: Pause) -> Session | None:
        """Return a connection to the host that the session has moved to; later ones lead there too.

        None if `pause` returned False.
        """
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
                    text = (
                        f"it has moved to {moved.host}, and {error.message}: criuctl attach "
                        f"{quoted(moved.url)}"
                    )
                    raise SessionGone(text) from error
                if not pause(RETRY):
                    return None
