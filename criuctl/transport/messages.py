"""Messages of a link, and requests under way."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from ..errors import CriuctlError, UnsupportedFormat, UsageError
from .frames import MAX_BODY, Broken, Data

_POOLED = 64 << 10  # bytes; smaller buffers are allocated each time
_KEPT = 8


class Request(Struct, frozen=True):
    """A request of the other side, or its `event`, which gets no answer.

    `body` may be used until the handler's answer is sent, and not longer: the buffer is used again.
    """

    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    body: bytes | memoryview = b""
    event: bool = False

    def argument(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return the argument `name`, checked; `UsageError`."""
        value = self.arguments.get(name, default)
        if value is not default and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is int)
        ):
            raise UsageError(f"{self.verb}: {name} has the wrong kind of value")
        if value is ...:
            raise UsageError(f"{self.verb}: {name} is missing")
        return value


class Answer(Struct, frozen=True):
    """An answer. A received body is a view of `into`, if that was given, or of new memory."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    body: Data = b""

    @property
    def view(self) -> memoryview:
        """Return the body of a received answer."""
        assert isinstance(self.body, bytes | bytearray | memoryview)
        return memoryview(self.body)


Handler = Callable[[Request], Answer | Mapping[str, Any] | None]


def unknown_verb(request: Request) -> UnsupportedFormat:
    """Return the error that a handler raises for a request that it does not know."""
    return UnsupportedFormat(
        f"this criuctl does not understand {request.verb[:100]!r}",
        hint="Install the same version of criuctl on both hosts.",
    )


class Waiting:
    """A request whose answer has not arrived."""

    def __init__(self, into: memoryview | None) -> None:
        self.lock = threading.Lock()  # held while a body is read into `into`
        self.into = into.cast("B") if into is not None else None
        self.placed = into is not None  # the answer's body must go there, or nowhere
        self.size = into.nbytes if into is not None else 0
        self.done = threading.Event()
        self._answer: Answer | None = None
        self._error: CriuctlError | None = None

    def settle(self, answer: Answer | None = None, error: CriuctlError | None = None) -> None:
        """Set the answer or the error; only the first call counts."""
        with self.lock:
            if not self.done.is_set():
                self._answer, self._error = answer, error
                self.done.set()

    def result(self) -> Answer:
        """Return the answer, or raise the error."""
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def abandon(self) -> None:
        """Give up the answer: once this returns, nothing is written into the buffer."""
        with self.lock:
            self.into = None


class Outgoing(Struct, eq=False):
    """A frame to send."""

    views: list[memoryview]
    after: Callable[[], None] | None = None  # called when it is sent or dropped

    def let_go(self) -> None:
        """Report that the frame is sent, or never will be."""
        if self.after is not None:
            self.after()


class Buffers:
    """Reused memory for the bodies of requests: the first touch of new memory costs more than a
    copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self, length: int) -> tuple[memoryview, Callable[[], None]]:
        """Return a buffer, and the function that gives it back."""
        if length > MAX_BODY:
            raise Broken("too long")
        if length < _POOLED:
            return memoryview(bytearray(length)), _nothing
        with self._lock:
            fitting = [buffer for buffer in self._free if len(buffer) >= length]
            if fitting:
                memory = min(fitting, key=len)
                self._free.remove(memory)
            else:
                memory = mmap.mmap(-1, -length % mmap.PAGESIZE + length)
        return memoryview(memory)[:length], lambda: self._give(memory)

    def _give(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.append(memory)
            if len(self._free) > _KEPT:
                self._free.remove(min(self._free, key=len))


def _nothing() -> None:
    """Do nothing: small buffers are just freed."""
