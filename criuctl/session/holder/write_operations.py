"""The operations of who writes: input, window size, the lease, and the roles that limit it."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

from .. import protocol
from .connection import Connection
from .master import Chunk
from .operators import Operator, Refused
from .request_values import LATER, Message, Operations, boolean, number, one_of, text, window_size

if TYPE_CHECKING:
    from .holder import Holder
    from .requests import Requests


class Writing:
    """What changes the terminal, and who may."""

    def __init__(self, holder: Holder, requests: Requests) -> None:
        self._holder, self._requests = holder, requests
        self.operations: Operations = {
            "input": ("write", self._input),
            "resize": ("write", self._resize),
            "lease-request": ("write", self._lease_request),
            "lease-yield": ("write", self._lease_yield),
            "lease-take": ("write", self._lease_take),
            "lease-grant": ("write", self._lease_grant),
            "set-role": ("admin", self._set_role),
        }

    # -- writing ----------------------------------------------------------------------------------

    def claim(self, by: Operator, ttl: float, how: str, *, soft: bool = False, polite: bool = False) -> None:
        """Make `by` the holder of the lease unless somebody else is, or a human has halted the session.

        `soft` and `polite` are as in `Authority.request`.
        """
        if self._holder.halted and by.kind != "human":
            raise Refused("state", "the session is halted: until it is resumed only humans write", state=self._holder.state)
        if self._holder.authority.request(by, ttl, time.monotonic(), soft=soft, polite=polite):
            self._holder.leasing.changed(how, by)

    def _input(self, connection: Connection, by: Operator, message: Message) -> Message | None:
        if "base64" in message:
            try:
                data = base64.b64decode(text(message, "base64", protocol.MAX_FRAME), validate=True)
            except ValueError:
                raise Refused("bad-request", "'base64' is not base64") from None
        else:
            try:
                data = text(message, "text", protocol.MAX_FRAME).encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise Refused("bad-request", "'text' has half of a character") from None
        return self.type(connection, by, data=data, request=message["id"])

    def type(self, connection: Connection, by: Operator, *, data: bytes, request: int) -> Message | None:
        """Input came."""
        holder, master = self._holder, self._holder.master
        if holder.state not in ("running", "paused"):
            raise Refused("state", f"the session is {holder.state}, nobody reads what is typed", state=holder.state)
        if master.fd < 0:
            raise Refused("state", "the session has no terminal", state=holder.state)
        if master.queued + len(data) > protocol.MAX_HELD_INPUT:
            raise Refused("busy", "too much input waits for the terminal already")
        self.claim(by, holder.authority.ttl if holder.authority.holder == by.id else protocol.DEFAULT_TTL, "implicit", soft=True)
        holder.authority.wrote = time.monotonic()
        fd = connection.sock.fileno()
        chunk = Chunk(data, {**by.who(), "pid": by.pid}, by.kind, fd, request, answered=master.held)
        master.put(chunk)
        holder.input_offset = holder.log.end
        return {"held": True, "offset": holder.log.end} if chunk.answered else LATER

    def _resize(self, connection: Connection, by: Operator, message: Message) -> None:
        self.claim(by, protocol.DEFAULT_TTL, "implicit", soft=True, polite=True)
        self.set_size(by, window_size(message))

    def set_size(self, by: Operator, size: tuple[int, int, int, int]) -> None:
        """Give the terminal the writer's size."""
        if self._holder.master.resize(*size):
            self._requests.record("resize", by, rows=size[0], cols=size[1])
            self._holder.emit("resize", rows=size[0], cols=size[1], by=by.who())

    # -- the lease --------------------------------------------------------------------------------

    def _lease(self) -> Message:
        return {"lease": self._holder.lease(time.monotonic())}

    def _lease_request(self, connection: Connection, by: Operator, message: Message) -> Message:
        ttl = number(message, "ttl", 1, protocol.MAX_TTL, protocol.DEFAULT_TTL)
        try:
            soft = boolean(message, "soft")
            self.claim(by, ttl, "request", soft=soft)
            if soft:
                self._holder.authority.wrote = time.monotonic()
            self._holder.leasing.watch()
        except Refused as refused:
            if refused.code != "lease-held" or not boolean(message, "queue"):
                raise
            queue = self._holder.authority.queue
            if not any(waiting == by.id for waiting, _ttl in queue):
                queue.append((by.id, ttl))
            return {**self._lease(), "queued": True}
        return self._lease()

    def _lease_take(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        other = holder.authority.take(by, number(message, "ttl", 1, protocol.MAX_TTL, protocol.DEFAULT_TTL), time.monotonic())
        whom = other.who() if other is not None else None
        holder.leasing.changed("take", by, **{"from": whom})
        return {**self._lease(), "from": whom}

    def _lease_grant(self, connection: Connection, by: Operator, message: Message) -> Message:
        heir = self._holder.authority.grant(by, text(message, "to", 32), time.monotonic())
        self._holder.leasing.changed("grant", by, to=heir.who())
        return self._lease()

    def _lease_yield(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        if message.get("to") is not None:
            if holder.authority.holder != by.id:
                raise Refused("forbidden", "only the holder of the lease can yield it")
            return self._lease_grant(connection, by, message)
        if holder.authority.release(by):
            holder.leasing.changed("yield", by)
            holder.leasing.free()
        return {}

    def _set_role(self, connection: Connection, by: Operator, message: Message) -> None:
        kind, name = one_of(message, "kind", protocol.KINDS), text(message, "name", 64)
        role = None if message.get("role") is None else one_of(message, "role", protocol.ROLES)
        holder = self._holder
        self._requests.record("set-role", by, of={"kind": kind, "name": name}, role=role)
        for operator in holder.authority.set_ceiling(kind, name, role):
            holder.emit("operator", **operator.who(), role=operator.role, how="role")
            if not operator.may("write") and holder.authority.release(operator):
                holder.leasing.changed("take", by, **{"from": operator.who()})
                holder.leasing.free()
