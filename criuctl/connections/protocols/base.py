"""The interface of an application protocol: learning a session's state at the freeze, and setting
it up again.

Both sides work on a duplicate of the program's own socket (pidfd_getfd). File status flags belong
to the open file, so an implementation never changes O_NONBLOCK: it waits with poll and uses
MSG_DONTWAIT (`Wire` does). An implementation reads no byte beyond the answers to its own questions,
and leaves the socket with empty queues.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from ...checkpoint.connection_record import ConnectionRecord
from ...errors import CriuctlError


class CannotRebuild(CriuctlError):
    """The session at the peer has state that cannot be set up again, or the peer does not
    allow it.
    """

    code = "cannot-rebuild"


class PeerAway(CriuctlError):
    """The peer does not answer now; another try may help."""

    code = "peer-away"


class Settings(Struct, frozen=True):
    """The matching rule's settings for the protocol; a secret is only a reference."""

    # {env: NAME} | {file: PATH} | {command: [..]}; {} for none
    secret: Mapping[str, Any] = field(default_factory=dict)
    # specific to the protocol: user, preamble, expect, ...
    options: Mapping[str, Any] = field(default_factory=dict)
    # PID, as criuctl sees it, of a process that holds the socket; its environment is the program's
    process: int = 0


class ApplicationProtocol(Protocol):
    """One application protocol; implementations are stateless modules or objects."""

    name: str

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Return the peer's state of this session, as JSON for the record; the tree is frozen, the
        socket is connected.

        The PIDs of this `record` are those that criuctl sees, not the tree's: they may be looked up
        in /proc. Raise `CannotRebuild` with the reason (a transaction is open, a query is in
        flight, TLS). `deadline` is of `time.monotonic`. The session must not be changed: the tree
        may go on.
        """
        ...

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Set up the state from `inspect` (``record.session``) on the newly connected `sock`;
        return facts for the report.

        Raise `PeerAway` when another try (on a newly connected socket) may help, `CannotRebuild`
        when not.
        """
        ...
