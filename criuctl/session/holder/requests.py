"""Requests of the wire protocol on their way to the operations (`observing`, `writing`, `steering`) and back.

What is not an integer in range, not a known word or not allowed to this operator is refused before
anything is touched.  Nothing that a client sends can raise past `process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import protocol
from .connection import Connection
from .control_operations import Steering
from .master import Chunk
from .observe_operations import Observing
from .operators import Operator, Refused
from .request_values import LATER, Message, Operations
from .write_operations import Writing

if TYPE_CHECKING:
    from .holder import Holder


class Requests:
    """Does what clients ask of one holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        writing = Writing(holder, self)
        self._observing = Observing(holder, self, writing)
        self._type = writing.type
        self.wait_answer = self._observing.wait_answer
        self.operations: Operations = {
            **self._observing.operations,
            **writing.operations,
            **Steering(holder, self, writing).operations,
        }

    def process(self, connection: Connection) -> None:
        """Do what has come on this connection."""
        try:
            for kind, body in connection.decoder.frames():
                if connection.dead or connection.closing:
                    return
                if kind == protocol.JSON:
                    self._message(connection, protocol.parse_json(body))
                elif kind == protocol.INPUT:
                    request, data = protocol.parse_input(body)
                    self._answer(connection, request, partial(self._type, connection, data=data, request=request), "write")
                else:
                    raise protocol.ProtocolError(f"a frame of type {kind}")
            if not connection.decoder.held:  # else they may be of the frame that is still to come
                connection.drop_fds()
        except protocol.ProtocolError as error:
            connection.closing = True
            connection.send({"id": None, "error": {"code": "protocol", "message": str(error)}})

    def _message(self, connection: Connection, message: Message) -> None:
        request, op = message.get("id"), message.get("op")
        if not isinstance(request, int) or isinstance(request, bool) or not 0 < request < 1 << 32 or not isinstance(op, str):
            raise protocol.ProtocolError("a request needs an id from 1 to 4294967295 and an op")
        if op == "hello":
            self._answer(connection, request, lambda who: self._observing.hello(connection, message), None)
            return
        role, action = self.operations.get(op, (None, None))
        if action is None or role is None:
            self.refuse(connection, request, Refused("unknown-operation", f"no operation {op[:64]!r}"))
            return
        self._answer(connection, request, lambda who: action(connection, who, message), role)

    def _answer(self, connection: Connection, request: int, action: Callable[[Any], Message | None], role: str | None) -> None:
        operator = connection.operator
        try:
            if role is not None:
                if operator is None:
                    raise Refused("hello-first", "say hello first")
                self._holder.authority.touch(operator, time.monotonic())
                if not operator.may(role):
                    raise Refused("forbidden", f"this needs the role {role!r}, {operator.name!r} has {operator.role!r}")
            answer = action(operator)
        except Refused as refused:
            self.refuse(connection, request, refused)
        except OSError as error:
            self.refuse(connection, request, Refused("failed", f"{error.strerror or error}"))
        except Exception as error:
            self._holder.loop.bug()
            self.refuse(connection, request, Refused("failed", f"a bug in the holder: {type(error).__name__}"))
        else:
            if request and answer is not LATER:
                connection.send({"id": request, "ok": True, **(answer or {})})

    def refuse(self, connection: Connection, request: int, refused: Refused) -> None:
        """Answer by an error."""
        error: Message = {"code": refused.code, "message": refused.message}
        if refused.hint:
            error["hint"] = refused.hint
        if refused.details:
            error["details"] = refused.details
        connection.send({"id": request, "error": error})

    def refuse_dropped(self, chunks: Iterable[Chunk]) -> None:
        """Tell those whose queued input will never be written."""
        for chunk in chunks:
            connection = self._holder.connections.get(chunk.connection)
            if connection is not None and not chunk.answered:
                self.refuse(connection, chunk.request, Refused("busy", "the input was dropped before the terminal took it"))

    def record(self, what: str, by: Operator, **facts: Any) -> int:
        """Write down who did what."""
        return self._holder.audit.write(what, {**by.who(), "pid": by.pid}, self._holder.identity.incarnation, **facts)
