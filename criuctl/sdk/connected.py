"""The part of a `Session` that is there for all the others: who it is, and its connection.

An object keeps one connection to the session's holder, which is the operator that types. It lasts
through a dump and a restore on this host, also by another program: meanwhile the session is
``checkpointed``, and calls that need its program raise `WrongState`. When the holder is gone,
because the host was restarted or the session has moved, calls raise `SessionGone`; once the session
runs here again, `reconnect` goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from ..errors import NotFound, NotHeld, SessionGone
from ..ops import sessions, typing
from ..ops.acting import acting
from ..session.client.session import Session as Connection
from ..session.protocol import DEFAULT_TTL
from .operator import RECONNECT, Operator
from .results import SessionInfo


class Connected:
    """One session of this host, and the connection of one operator."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._connection: Connection | None = None
        self._ttl = 0.0  # seconds, of the lease that this operator has asked for; 0: none

    @property
    def name(self) -> str:
        """The session's name."""
        return self._operator.session

    @property
    def id(self) -> str:
        """The session's id, which no other session ever has; "" if it has no holder."""
        return self._operator.id

    def status(self) -> SessionInfo:
        """Return the session's state, and in `facts` all that ``criuctl status`` shows."""
        with acting(self._operator):
            return SessionInfo.of(sessions.status(self._operator.config, self.name))

    def reconnect(self) -> None:
        """Connect again after `SessionGone`; as the same operator, if the holder still knows it.

        It goes on with the session that has the name now, as it is now: see `id`, and `status` for
        its incarnation. `SessionGone` if it has no holder here.
        """
        lost, known = self._connection, self._operator.id
        self._operator.id = ""
        try:
            if lost is not None:
                lost.close()
                with suppress(NotFound):  # another holder, which does not know this operator
                    self._connect((lost.operator, lost.token))
                    return
            self._connect()
        except BaseException:
            self._operator.id = known
            raise

    def close(self) -> None:
        """Give the lease up and leave the session, which runs on; `reconnect` comes back to it."""
        if self._connection is not None:
            self._connection.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<criuctl.Session {self.name!r} as {self._operator.kind}>"

    def _connect(self, resume: tuple[str, str] | None = None) -> Connection:
        """Make the connection that types."""
        operator = self._operator
        with acting(operator):
            self._connection = sessions.connect(
                operator.config, self.name, role=operator.role, resume=resume
            )
        return self._connection

    def _begin(self) -> Self:
        """Connect, if criuctl holds the session's terminal."""
        with suppress(NotHeld):
            self._connect()
        return self

    @contextmanager
    def _main(self) -> Iterator[Connection]:
        """Yield the connection that types."""
        connection = self._connection or self._connect()
        try:
            yield connection
        except SessionGone as gone:
            gone.hint = RECONNECT
            raise

    @contextmanager
    def _writing(self, *, take: bool) -> Iterator[Connection]:
        """Yield the connection when it holds the write lease."""
        with self._main() as connection:
            typing.hold_lease(connection, take=take, ttl=self._ttl or DEFAULT_TTL)
            yield connection
