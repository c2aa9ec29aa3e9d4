"""The operations of operators that may write: input, window size, the lease, and roles."""

from __future__ import annotations

import base64
import time

from .. import protocol
from .audit_log import AuditWriter
from .connection import Connection
from .events import Events
from .lease_timer import Leasing
from .master import Chunk, Master
from .operators import Operator, Refused
from .output_log import OutputLog
from .request_values import (
    LATER,
    Message,
    Operations,
    boolean,
    number,
    one_of,
    text,
    window_size,
)
from .session_state import SessionState


class WriteOperations:
    """What changes the terminal and the lease."""

    def __init__(
        self,
        session: SessionState,
        log: OutputLog,
        master: Master,
        leasing: Leasing,
        events: Events,
        audit: AuditWriter,
    ) -> None:
        self._session, self._log, self._master = session, log, master
        self._leasing, self._events, self._audit = leasing, events, audit
        self._authority = leasing.authority
        self.operations: Operations = {
            "input": ("write", self._input),
            "resize": ("write", self._resize),
            "lease-request": ("write", self._lease_request),
            "lease-yield": ("write", self._lease_yield),
            "lease-take": ("write", self._lease_take),
            "lease-grant": ("write", self._lease_grant),
            "set-role": ("admin", self._set_role),
        }

    # -- input ------------------------------------------------------------------------------------

    def _input(self, connection: Connection, by: Operator, message: Message) -> Message | None:
        if "base64" in message:
            encoded = text(message, "base64", protocol.MAX_FRAME)
            try:
                data = base64.b64decode(encoded, validate=True)
            except ValueError:
                raise Refused("bad-request", "'base64' is not base64") from None
        else:
            typed = text(message, "text", protocol.MAX_FRAME)
            try:
                data = typed.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise Refused("bad-request", "'text' has half of a character") from None
        return self.type_input(connection, by, data, message["id"])

    def type_input(
        self, connection: Connection, by: Operator, data: bytes, request: int
    ) -> Message | None:
        """Queue input; the answer comes when the terminal has taken it, unless it is held."""
        session, master, authority = self._session, self._master, self._authority
        if session.state not in ("running", "paused"):
            reason = f"the session is {session.state}, no program reads what is typed"
            raise Refused("state", reason, state=session.state)
        if master.fd < 0:
            raise Refused("state", "the session has no terminal", state=session.state)
        if master.queued + len(data) > protocol.MAX_HELD_INPUT:
            raise Refused("busy", "too much input waits for the terminal already")
        ttl = authority.ttl if authority.holder == by.id else protocol.DEFAULT_TTL
        self._leasing.claim(by, ttl, "implicit", soft=True)
        authority.wrote = time.monotonic()
        fd, who = connection.sock.fileno(), {**by.who(), "pid": by.pid}
        chunk = Chunk(data, who, by.kind, fd, request, answered=master.held)
        master.put(chunk)
        session.input_offset = self._log.end
        return {"held": True, "offset": self._log.end} if chunk.answered else LATER

    # -- the window -------------------------------------------------------------------------------

    def _resize(self, connection: Connection, by: Operator, message: Message) -> None:
        self._leasing.claim(by, protocol.DEFAULT_TTL, "implicit", soft=True, polite=True)
        self._set_size(by, window_size(message))

    def attach(self, by: Operator, size: tuple[int, int, int, int] | None) -> None:
        """Ask for the lease politely; with it, give the terminal this size."""
        try:
            self._leasing.claim(by, protocol.DEFAULT_TTL, "request", soft=True, polite=True)
        except Refused as refused:
            if refused.code != "lease-held":
                raise
        else:
            if size is not None:
                self._set_size(by, size)

    def _set_size(self, by: Operator, size: tuple[int, int, int, int]) -> None:
        if self._master.resize(*size):
            self._audit.record("resize", by, rows=size[0], cols=size[1])
            self._events.emit("resize", rows=size[0], cols=size[1], by=by.who())

    # -- the lease --------------------------------------------------------------------------------

    def lease(self) -> Message:
        """Return the lease of now, as answers have it."""
        return {"lease": self._leasing.current()}

    def _lease_request(self, connection: Connection, by: Operator, message: Message) -> Message:
        ttl, hold = _ttl(message), _hold(message)
        soft = boolean(message, "soft")
        if hold and (soft or boolean(message, "queue")):
            raise Refused("bad-request", "'hold' goes with neither 'soft' nor 'queue'")
        try:
            self._leasing.claim(by, ttl, "request", soft=soft)
            if hold:
                self._leasing.hold(by, hold)
            if soft:
                self._authority.wrote = time.monotonic()
            self._leasing.watch()
        except Refused as refused:
            if refused.code != "lease-held" or not boolean(message, "queue"):
                raise
            queue = self._authority.queue
            if not any(waiting == by.id for waiting, _ttl in queue):
                queue.append((by.id, ttl))
            return {**self.lease(), "queued": True}
        return self.lease()

    def _lease_take(self, connection: Connection, by: Operator, message: Message) -> Message:
        other = self._leasing.take(by, _ttl(message), _hold(message))
        return {**self.lease(), "from": other.who() if other is not None else None}

    def _lease_grant(self, connection: Connection, by: Operator, message: Message) -> Message:
        heir = self._authority.grant(by, text(message, "to", 32), time.monotonic())
        self._leasing.changed("grant", by, to=heir.who())
        return self.lease()

    def _lease_yield(self, connection: Connection, by: Operator, message: Message) -> Message:
        if message.get("to") is not None:
            if not self._authority.owns(by):
                raise Refused("forbidden", "only the holder of the lease can yield it")
            return self._lease_grant(connection, by, message)
        if self._authority.release(by):
            self._leasing.changed("yield", by)
            self._leasing.free()
        return {}

    # -- roles ------------------------------------------------------------------------------------

    def _set_role(self, connection: Connection, by: Operator, message: Message) -> None:
        kind, name = one_of(message, "kind", protocol.KINDS), text(message, "name", 64)
        given = message.get("role")
        role = None if given is None else one_of(message, "role", protocol.ROLES)
        self._leasing.limit(kind, name, role, by)


def _hold(message: Message) -> float:
    """Return for how many seconds the lease is to be held; 0: as long as its owner is here."""
    return number(message, "hold", 1, protocol.MAX_HOLD, 0.0) if "hold" in message else 0.0


def _ttl(message: Message) -> float:
    return number(message, "ttl", 1, protocol.MAX_TTL, protocol.DEFAULT_TTL)
