"""The operations of every operator that concern neither output nor tree: greeting, status,
audit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import protocol
from .audit_log import AuditWriter
from .clients import Clients
from .connection import Connection
from .events import Events
from .lease_timer import Leasing
from .operators import Operator, Refused
from .request_values import FAR, Message, Operations, fitting, integer, one_of, text


class PresenceOperations:
    """What every role may do, and `hello`, by which a client gets its role."""

    def __init__(
        self,
        clients: Clients,
        leasing: Leasing,
        events: Events,
        audit: AuditWriter,
        status: Callable[[], Message],
    ) -> None:
        self._clients, self._leasing, self._events = clients, leasing, events
        self._audit, self._status_of_session = audit, status
        self.operations: Operations = {
            "status": ("observe", self._status),
            "audit": ("observe", self._entries),
            "heartbeat": ("observe", self._heartbeat),
            "bye": ("observe", self._bye),
        }

    def hello(self, connection: Connection, message: Message) -> Message:
        """Make this client an operator, a new one or one that lost its connection."""
        if connection.operator is not None:
            raise Refused("bad-request", "hello was said")
        kind = _kind(message)
        role = one_of(message, "role", protocol.ROLES)
        name, authority = text(message, "name", 64), self._leasing.authority
        if message.get("operator") is not None:
            operator, how = self._come_back(message, role), "resumed"
        else:
            since = round(time.time(), 3)
            pid, uid = connection.pid, connection.uid
            operator, how = authority.join(kind, name, role, pid, since, uid), "joined"
        operator.pid = connection.pid
        connection.operator = operator
        authority.touch(operator, time.monotonic())
        self._audit.record(how, operator, role=operator.role)
        self._events.emit("operator", **operator.who(), role=operator.role, how=how)
        return {
            "operator": operator.id,
            "token": operator.token,
            "role": operator.role,
            "version": connection.decoder.version,
            "features": list(protocol.FEATURES),
            "status": self._status_of_session(),
        }

    def _come_back(self, message: Message, role: str) -> Operator:
        """Return the operator that lost its connection; an older connection of it is closed."""
        identifier, token = text(message, "operator", 32), text(message, "token", 64)
        authority = self._leasing.authority
        for other in self._clients.all():
            known = authority.operators.get(identifier)
            if other.operator is not None and other.operator is known and known.token == token:
                other.close("came back on another connection")
        operator = authority.comes_back(identifier, token, role)
        if operator is None:
            raise Refused("not-found", f"there was no operator {identifier!r} with this token")
        return operator

    def _status(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"status": self._status_of_session()}

    def _heartbeat(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"lease": self._leasing.current()}

    def _bye(self, connection: Connection, by: Operator, message: Message) -> Message:
        connection.closing = True
        return {}

    def _entries(self, connection: Connection, by: Operator, message: Message) -> Message:
        since = integer(message, "since", 0, FAR, 0)
        limit = integer(message, "limit", 1, 1000, 1000)
        return {"entries": fitting(self._audit.log.entries(since, limit))}


def _kind(message: Message) -> str:
    """Return the kind that a client claims.  It has to: `halt` does not stop a human."""
    if "kind" not in message:
        raise Refused(
            "bad-request",
            "a client must say what it is: 'kind' is missing",
            hint=f"It is one of {', '.join(protocol.KINDS)}.",
        )
    return one_of(message, "kind", protocol.KINDS)
