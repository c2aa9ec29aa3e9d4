"""Requests of the wire protocol on their way to the operations, and the answers on their way back.

A request that is not allowed to its operator is refused before anything is touched, and so is one
with a value that is not an integer in range or not a known word.  Nothing that a client sends can
raise an exception past `process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeGuard

from ...quoting import quoted
from .. import protocol
from .connection import Connection
from .event_loop import Loop
from .operators import Authority, Operator, Refused
from .replies import refuse
from .request_values import LATER, Message, Operations

Hello = Callable[[Connection, Message], Message]
TypeInput = Callable[[Connection, Operator, bytes, int], Message | None]


class Requests:
    """Does what clients ask of one holder.

    `hello` is the one operation that needs no operator, `type_input` what a frame of input does.
    """

    def __init__(
        self,
        loop: Loop,
        authority: Authority,
        hello: Hello,
        type_input: TypeInput,
        operations: Operations,
        name: str,
    ) -> None:
        self._name = name  # of the session
        self._loop, self._authority = loop, authority
        self._hello, self._type_input, self._operations = hello, type_input, operations

    def process(self, connection: Connection) -> None:
        """Do what has come on this connection."""
        try:
            for kind, body in connection.decoder.frames():
                if connection.dead or connection.closing:
                    return
                if kind == protocol.JSON:
                    self._message(connection, protocol.parse_json(body))
                elif kind == protocol.INPUT:
                    self._input(connection, *protocol.parse_input(body))
                else:
                    raise protocol.ProtocolError(f"a frame of type {kind}")
            if not connection.decoder.held:  # else they may be of the frame that is still to come
                connection.drop_fds()
        except protocol.ProtocolError as error:
            connection.closing = True
            answer = {"code": "protocol", "message": str(error)}
            connection.send({"id": None, "error": answer})

    def _input(self, connection: Connection, request: int, data: bytes) -> None:
        def action(who: Operator) -> Message | None:
            return self._type_input(connection, who, data, request)

        self._answer(connection, request, action, "write")

    def _message(self, connection: Connection, message: Message) -> None:
        request, op = message.get("id"), message.get("op")
        if not _is_number(request) or not isinstance(op, str):
            raise protocol.ProtocolError("a request needs an id from 1 to 4294967295 and an op")
        if op == "hello":
            self._answer(connection, request, lambda who: self._hello(connection, message), None)
            return
        role, action = self._operations.get(op, (None, None))
        if action is None or role is None:
            unknown = Refused("unknown-operation", f"no operation {op[:64]!r}")
            refuse(connection, request, unknown)
            return
        self._answer(connection, request, lambda who: action(connection, who, message), role)

    def _answer(
        self,
        connection: Connection,
        request: int,
        action: Callable[[Any], Message | None],
        role: str | None,
    ) -> None:
        """Do `action`, which needs this role, and answer the request, or not if it is `LATER`."""
        try:
            if role is not None:
                self._check(connection.operator, role)
            answer = action(connection.operator)
        except Refused as refused:
            refuse(connection, request, refused)
        except OSError as error:
            refuse(connection, request, Refused("failed", f"{error.strerror or error}"))
        except Exception as error:
            self._loop.bug()
            bug = f"a bug in the holder: {type(error).__name__}"
            refuse(connection, request, Refused("failed", bug))
        else:
            if request and answer is not LATER:
                connection.send({"id": request, "ok": True, **(answer or {})})

    def _check(self, operator: Operator | None, role: str) -> None:
        """Let the operator's lease live on, and refuse what its role does not allow."""
        if operator is None:
            raise Refused("hello-first", "say hello first")
        self._authority.touch(operator, time.monotonic())
        if not operator.may(role):
            text = f"this needs the role {role!r}, {operator.name!r} has {operator.role!r}"
            hint = ""
            if operator.role != operator.wanted:
                who = quoted(f"{operator.kind}:{operator.name}")
                hint = (
                    "It was limited by `criuctl role` or `resume --agent-stays-out`. A person "
                    f"lifts that, at a terminal: `criuctl role {quoted(self._name)} {who} write`."
                )
            raise Refused("forbidden", text, hint)


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a value may be the id of a request."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32
