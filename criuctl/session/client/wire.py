"""The client's end of the wire: requests out; output, events and answers in, in the order sent.

What comes while a blocking call waits for its answer is kept for `receive`, in that order.  The
holder's errors become criuctl's own, so that callers need to know one kind only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import (
    CommandFailed,
    Conflict,
    CriuctlError,
    DataError,
    Forbidden,
    LeaseHeld,
    NotFound,
    SessionGone,
    TimedOut,
    UsageError,
    WrongState,
)
from .. import protocol
from ..protocol import ANSWER_TIMEOUT

_ERRORS: dict[str, type[CriuctlError]] = {
    "bad-request": UsageError,
    "busy": Conflict,
    "failed": CommandFailed,
    "forbidden": Forbidden,
    "lease-held": LeaseHeld,
    "not-found": NotFound,
    "protocol": DataError,
    "state": WrongState,
}
_READ = 1 << 20
_INPUT = protocol.MAX_FRAME // 4
_LOOK = 86400.0  # seconds; poll(2) takes no more than 24 days


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of the session's output; `offset` is that of the first."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Return the offset behind the last byte."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened in the session; `body` has all keys (PROTOCOL.md, section 6)."""

    name: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to request `id`.

    `error` is what a blocking call would have raised, `data` are the bytes of a `read`.
    """

    id: int
    body: dict[str, Any]
    error: CriuctlError | None = None
    data: bytes = b""


Message = Output | Event | Answer


class Wire:
    """A connection that speaks the protocol: the preface is sent, `hello` is not."""

    def __init__(self, sock: socket.socket, program: str) -> None:
        self._socket = sock
        self._decoder = protocol.Decoder()
        self._inbox: deque[Message] = deque()
        # Request -> (end, bytes so far) of a `read`.
        self._pieces: dict[int, tuple[int, bytearray]] = {}
        self._last = 0
        self.end = 0  # of the output that was received: where to attach again
        sock.setblocking(True)
        self._send(protocol.preface(program))

    def close(self) -> None:
        """Close the connection; the operator may come back with ``resume``."""
        self._socket.close()

    def break_off(self) -> None:
        """End the connection from another thread: what blocks in this one raises `SessionGone`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `receive` may have something.

        See `pending`, too.
        """
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether `receive` has something without reading from the descriptor."""
        return bool(self._inbox)

    def submit(self, op: str, *, fds: Sequence[int] = (), **arguments: Any) -> int:
        """Send a request and return its id; `receive` returns the `Answer`."""
        self._last += 1
        frame = protocol.json_frame({"id": self._last, "op": op, **arguments})
        self._send(frame, fds)
        return self._last

    def submit_input(self, data: bytes, *, answered: bool = False) -> int:
        """Send input without waiting.  Return the id of its `Answer`; 0: only a refusal comes."""
        if answered:
            self._last += 1
        request = self._last if answered else 0
        for at in range(0, max(len(data), 1), _INPUT):
            last = at + _INPUT >= len(data)
            self._send(protocol.input_frame(request if last else 0, data[at : at + _INPUT]))
        return request

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None if none came in `timeout` seconds.

        `SessionGone` when the connection is lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._inbox:
            if not self._fill(deadline):
                return None
        return self._inbox.popleft()

    def request(
        self,
        op: str,
        *,
        timeout: float | None = ANSWER_TIMEOUT,
        fds: Sequence[int] = (),
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a request and return its answer; raise its error, or `TimedOut`."""
        return self._await(self.submit(op, fds=fds, **arguments), op, timeout).body

    def _await(self, request: int, what: str, timeout: float | None) -> Answer:
        deadline = None if timeout is None else time.monotonic() + timeout
        looked = 0
        while True:
            while looked < len(self._inbox):
                message = self._inbox[looked]
                if isinstance(message, Answer) and (
                    message.id == request or (message.id == 0 and what == "input")
                ):
                    del self._inbox[looked]
                    if message.error is not None:
                        raise message.error
                    return message
                looked += 1
            if not self._fill(deadline):
                raise TimedOut(f"the holder did not answer {what!r} in {timeout:g} s")

    def _send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        try:
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else 0
            self._socket.sendall(frame[sent:])
        except OSError as error:
            raise SessionGone(
                f"the connection to the session was lost ({error.strerror or error})"
            ) from error

    def _fill(self, deadline: float | None) -> bool:
        """Wait for bytes and sort their messages; return False at the deadline."""
        if deadline is not None:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            while not poller.poll(min(_LOOK, max(0.0, deadline - time.monotonic())) * 1000):
                if time.monotonic() >= deadline:
                    return False
        try:
            data = self._socket.recv(_READ)
        except OSError as error:
            raise SessionGone(
                f"the connection to the session was lost ({error.strerror or error})"
            ) from error
        if not data:
            raise SessionGone("the holder closed the connection")
        self._decoder.feed(data)
        try:
            for kind, body in self._decoder.frames():
                self._sort(kind, body)
        except protocol.ProtocolError as error:
            raise DataError(str(error)) from error
        return True

    def _sort(self, kind: int, body: bytes) -> None:
        if kind == protocol.OUTPUT:
            offset, data = protocol.parse_output(body)
            self.end = offset + len(data)
            self._inbox.append(Output(offset, bytes(data)))
        elif kind == protocol.DATA:
            request, offset, data = protocol.parse_data(body)
            behind, collected = self._pieces.get(request, (offset, bytearray()))
            if offset != behind:
                collected = bytearray()  # the log has dropped what was between
            collected += data
            self._pieces[request] = (offset + len(data), collected)
        elif kind == protocol.JSON:
            message = protocol.parse_json(body)
            if "event" in message:
                self._inbox.append(Event(str(message["event"]), message))
            elif isinstance(message.get("id"), int):
                request = message["id"]
                self._inbox.append(
                    Answer(
                        request,
                        message,
                        _error(message),
                        bytes(self._pieces.pop(request, (0, b""))[1]),
                    )
                )
            else:
                raise _error(message) or DataError(
                    "the holder sent a message that is neither an answer nor an event"
                )


def _error(message: dict[str, Any]) -> CriuctlError | None:
    error = message.get("error")
    if not isinstance(error, dict):
        return None
    kind = _ERRORS.get(str(error.get("code")), CriuctlError)
    details = error.get("details")
    return kind(
        str(error.get("message", "the holder refused")),
        hint=str(error.get("hint", "")),
        **(
            {k: v for k, v in details.items() if k not in ("message", "hint")}
            if isinstance(details, dict)
            else {}
        ),
    )
