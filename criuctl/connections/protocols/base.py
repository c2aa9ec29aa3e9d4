"""What an application protocol offers: to learn a session's state at the freeze, and to set it up
again.

Both sides work on a duplicate of the program's very socket (pidfd_getfd).  File status flags belong
to the open file, so an implementation never changes O_NONBLOCK: it waits with poll and uses
MSG_DONTWAIT (`Wire` does).  An implementation reads no byte beyond the answers to its own
questions, and leaves the socket with empty queues.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from ...checkpoint.manifest import ConnectionRecord
from ...errors import CriuctlError


class CannotRebuild(CriuctlError):
    """The session at the peer holds something that cannot be set up again, or the peer does not let
    us.
    """

    code = "cannot-rebuild"


class PeerAway(CriuctlError):
    """The peer does not answer now; trying again may help."""

    code = "peer-away"


class Settings(Struct, frozen=True):
    """What the matching rule says about the protocol; never holds a secret, only where one is
    found.
    """

    # {env: NAME} | {file: PATH} | {command: [..]}; {} for none
    secret: Mapping[str, Any] = field(default_factory=dict)
    # the protocol's own: user, preamble, expect, ...
    options: Mapping[str, Any] = field(default_factory=dict)
    # our PID of a process that holds the socket; what it has in its environment is the program's
    # own
    process: int = 0


class ApplicationProtocol(Protocol):
    """One application protocol; implementations are stateless modules or objects."""

    name: str

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """What the peer holds for this session, as JSON for the record; the tree is frozen, the
        socket is connected.

        The PIDs of this `record` are ours, not the tree's: they may be looked up in /proc.
        Raises `CannotRebuild` with the reason (a transaction is open, a query is in flight, TLS).
        `deadline` is of `time.monotonic`.  Nothing about the session may be changed by it: the tree
        may go on.
        """
        ...

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Set up on the freshly connected `sock` what `inspect` found (``record.session``); facts
        for the report.

        Raises `PeerAway` when it is worth another try (on a socket connected anew), `CannotRebuild`
        when not.
        """
        ...
