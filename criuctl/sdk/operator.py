"""The operator that a `Session` is, and the connections that it opens.

A connection must not be used by two threads at once, and a request that waits would keep others
waiting. So what types holds one connection for the life of the object, and everything else, waits
before all, is an operation on behalf of the `Operator` (`ops.acting`), which opens a connection of
its own. `Cancellable` can break its connections off from another thread: the holder then forgets
the request, and nothing in the session notices.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

from ..config import Config
from ..errors import NotFound, SessionGone, UsageError
from ..ops import sessions
from ..ops.acting import Open, Resume, acting
from ..session.client.session import Session as Connection
from ..session.roles import lower
from ..session.sessions import state_of

Kind = Literal["human", "agent", "service"]
Role = Literal["observe", "write", "admin"]
_KINDS, _ROLES = get_args(Kind), get_args(Role)
RECONNECT = "Session.reconnect() connects to it again, if it runs on this host."


class Operator:
    """Who speaks to one session of this host."""

    def __init__(self, config: Config, session: str, kind: Kind, name: str, role: Role) -> None:
        if kind not in _KINDS:
            raise UsageError(f"kind is {kind!r}, and must be human, agent or service")
        if role not in _ROLES:
            raise UsageError(f"role is {role!r}, and must be observe, write or admin")
        self.config, self.session = config, session
        self.kind: Kind = kind
        self.name, self.role = name, role
        self.id = ""  # of the session: known from the first connection on

    def capped(self, role: str) -> str:
        """Return `role`, or this operator's if that is lower."""
        return lower(role, self.role)

    def connect(self, session: str, role: str, resume: Resume, open_: Open) -> Connection:
        """Return a connection to the session, for `ops.sessions.connect`.

        `NotFound` if another session has the name by now: not `SessionGone`, after which the
        operations look at what a session has left.
        """
        try:
            connection = open_(self.capped(role), resume)
        except SessionGone:
            self._check(state_of(self.config, session))
            raise
        try:
            self._check(connection.hello["status"])
        except NotFound:
            connection.leave()
            raise
        return connection

    def check_same(self) -> None:
        """Raise `NotFound` if another session has the name by now, or none has."""
        with acting(self):
            self._check(sessions.describe(self.config, self.session))

    def _check(self, found: Mapping[str, Any] | None) -> None:
        """Note the session's id at first, and compare it later."""
        if found is None:
            return
        self.id = self.id or found["id"]
        if self.id != found["id"]:
            raise NotFound(
                f"session {self.session!r} has ended, and another one has its name",
                hint="Session.connect() connects to that.",
            )


class Cancellable(Operator):
    """The same operator in one call that another thread may cancel."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(
            operator.config, operator.session, operator.kind, operator.name, operator.role
        )
        self.id = operator.id
        self._lock = threading.Lock()
        self._opened: list[socket.socket] = []  # duplicates, so that no number is used again
        self._cancelled = False

    def connect(self, session: str, role: str, resume: Resume, open_: Open) -> Connection:
        """Return a connection, unless the call is cancelled."""
        connection = super().connect(session, role, resume, open_)
        with self._lock:
            if not self._cancelled:
                self._opened.append(socket.socket(fileno=os.dup(connection.fileno())))
                return connection
        connection.close()
        raise SessionGone("the call was cancelled")

    def cancel(self) -> None:
        """Break the connections off: the call ends soon, in its own thread."""
        with self._lock:
            self._cancelled = True
            for one in self._opened:
                with suppress(OSError):  # it is closed already
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what `cancel` would need."""
        with self._lock:
            while self._opened:
                self._opened.pop().close()
