"""On whose behalf this process works on sessions: for servers, and for the Python API.

The command line works for the user that typed it.  Others work as an `Actor`, which is the one of
its thread while it works (`acting`): every connection to a holder that an operation opens meanwhile
(`criuctl.ops.sessions.connect`) is an operator of the actor's kind and name, and never has a higher
role than the actor may have.  So operations need not be given what they connect as.

A server does each piece of work inside a `Call` of one of its `Client`s, which are agents.  Between
two calls a client has no connection; in the next one the same operator comes back, and has its
lease again if no other operator has asked for it.

A call blocks, in a thread.  `Call.cancel`, from another thread, ends what it waits for: its
connections break, and no others are opened.  What it has started in the session runs on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

from ..errors import NotFound, SessionGone
from ..session.client import caller
from ..session.protocol import OWN
from ..session.roles import lower

if TYPE_CHECKING:
    from ..session.client.session import Session

Resume = tuple[str, str] | None  # operator id and token
Open = Callable[[str, Resume], "Session"]  # with a role, as an operator to resume
_MOST_KEPT = 256  # sessions whose operator is remembered


class Actor(caller.Operator, Protocol):
    """On whose behalf a thread works."""

    def connect(self, session: str, role: str, resume: Resume, open_: Open) -> Session:
        """Return a connection to `session` that `open_` has opened."""


def current() -> Actor | None:
    """Return the actor on whose behalf this thread works; None: the user of the command line."""
    return cast("Actor | None", caller.current())


def acting(actor: Actor) -> AbstractContextManager[None]:
    """Work on behalf of `actor`, in this thread, inside a ``with``."""
    return caller.acting(actor)


class Direct:
    """An actor that may do what the sessions allow to its kind and name."""

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name = kind, name

    def capped(self, role: str) -> str:
        """Return `role`."""
        return role

    def connect(self, _session: str, role: str, _resume: Resume, open_: Open) -> Session:
        """Return a connection that `open_` has opened."""
        return open_(role, None)


def undoing() -> AbstractContextManager[None]:
    """Undo, inside a ``with``, what an operation has made itself, whatever its caller may do."""
    return acting(Direct("service", f"{OWN}undo"))


class Client:
    """A program that is served: its name as an operator, and the highest role it may have."""

    kind = "agent"

    def __init__(self, name: str, role: str) -> None:
        self.name, self.role = name, role
        self._away: dict[str, tuple[str, str]] = {}  # session -> operator that may come back

    def capped(self, role: str) -> str:
        """Return `role`, or the client's if that is lower."""
        return lower(role, self.role)

    def take(self, session: str) -> Resume:
        """Return its operator of this session that has no connection now, if there is one."""
        return self._away.pop(session, None)

    def keep(self, session: str, operator: str, token: str) -> None:
        """Remember an operator whose connection is closed."""
        while len(self._away) >= _MOST_KEPT:
            self._away.pop(next(iter(self._away)), None)
        self._away[session] = operator, token


class Call:
    """One piece of work for a client; enter it in the thread that does the work."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._opened: list[tuple[str, Session]] = []
        self._cancelled = False
        self._acting: AbstractContextManager[None] = acting(self)

    @property
    def kind(self) -> str:
        """Clients of servers are agents."""
        return self.client.kind

    @property
    def name(self) -> str:
        """The client's name."""
        return self.client.name

    def capped(self, role: str) -> str:
        """Return `role`, or the client's if that is lower."""
        return self.client.capped(role)

    def connect(self, session: str, role: str, resume: Resume, open_: Open) -> Session:
        """Return a connection that `open_` has opened; as the same operator as before."""
        role = self.capped(role)
        resume = self._resumed(session) or self.client.take(session)
        try:
            connected = open_(role, resume)
        except SessionGone:
            raise
        except NotFound:  # the holder has forgotten the operator, or is another one
            connected = open_(role, None)
        connected.comes_back = True
        with self._lock:
            self._opened.append((session, connected))
            if self._cancelled:
                connected.break_off()
        return connected

    def cancel(self) -> None:
        """Break the connections of this call; called from another thread."""
        with self._lock:
            self._cancelled = True
            for _session, connected in self._opened:
                connected.break_off()

    def _resumed(self, session: str) -> Resume:
        """Return the operator of a connection to `session` that this call has closed already."""
        with self._lock:
            for at, (name, connected) in enumerate(self._opened):
                if name == session and connected.closed:
                    del self._opened[at]
                    return connected.operator, connected.token
        return None

    def __enter__(self) -> Self:
        self._acting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._acting.__exit__(None, None, None)
        with self._lock:
            for session, connected in self._opened:
                connected.close()
                self.client.keep(session, connected.operator, connected.token)
            self._opened.clear()
