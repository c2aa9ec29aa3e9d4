"""RESP2 and RESP3, Redis's wire format, as far as sending commands and reading answers needs it.

`Resp.ask` sends one command and reads exactly its answer. Messages that the server pushes (RESP3
type ``>``) and attributes (``|``) are skipped and pushes are counted: on the program's own
connection they are lost to the program, so code that asks there must check `pushes`. Answers are
data from outside: sizes, depth and numbers of elements are bounded. Data that is not RESP raises
`NotRedis`; TLS is recognised by its first byte.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .base import CannotRebuild
from .wire import LARGEST, Wire

_DEEPEST = 16
_MOST = 1 << 20  # elements of one answer, all levels together
_TLS_RECORDS = (0x14, 0x15, 0x16, 0x17)


class NotRedis(CannotRebuild):
    """The peer's answer is not in the Redis protocol."""


class ErrorReply(Struct, frozen=True):
    """An answer that begins with ``-`` (or ``!``): an error."""

    text: str

    @property
    def code(self) -> str:
        """Its first word: ERR, NOAUTH, WRONGPASS, LOADING, ..."""
        return self.text.partition(" ")[0]


class Resp:
    """Commands and answers over one `Wire`."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.pushes = 0  # pushed messages that were read before an answer
        self.kind = ""  # RESP type character of the last answer
        self._elements = 0

    def ask(self, *words: str | int) -> Any:
        """Send one command and return its answer: str, int, float, bool, None, list, dict or
        `ErrorReply`.
        """
        self.wire.send(command(*words))
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer; pushes are skipped."""
        self._elements = 0
        while True:
            self.kind, value = self._value(0)
            if self.kind == ">":
                self.pushes += 1
            elif self.kind != "|":
                return value

    def _value(self, depth: int) -> tuple[str, Any]:
        self._elements += 1
        if depth > _DEEPEST or self._elements > _MOST:
            raise NotRedis(f"{self.wire.peer} sent an answer that is nested too deeply or too long")
        first = self.wire.peek(1)
        if first and first[0] not in b"+-:$*_#,(=%~>!|":
            how = "TLS" if first[0] in _TLS_RECORDS else "something else"
            raise NotRedis(f"{self.wire.peer} does not speak plain Redis but {how}")
        line = self.wire.line(b"\r\n")
        kind, rest = chr(line[0]), _text(line[1:-2])
        if kind in "+-":
            return kind, ErrorReply(rest) if kind == "-" else rest
        if kind == "_":
            return kind, None
        if kind == "#":
            return kind, rest == "t"
        if kind == ",":
            return kind, self._number(rest, float)
        size = self._number(rest, int)
        if kind in ":(":
            return kind, size
        if size == -1 and kind in "$*":
            return kind, None
        if not 0 <= size <= LARGEST:
            raise NotRedis(f"{self.wire.peer} announces an answer of {size} bytes or elements")
        if kind in "$=!":
            body = self.wire.receive(size + 2)
            if body[-2:] != b"\r\n":
                raise NotRedis(f"{self.wire.peer} sent an answer of another length than announced")
            # verbatim strings begin with "txt:"
            text = _text(body[4:-2] if kind == "=" else body[:-2])
            return kind, ErrorReply(text) if kind == "!" else text
        if kind in "%|":
            return kind, self._map(size, depth)
        return kind, [self._value(depth + 1)[1] for _ in range(size)]

    def _map(self, size: int, depth: int) -> dict[str, Any]:
        pairs = ((self._value(depth + 1)[1], self._value(depth + 1)[1]) for _ in range(size))
        return {str(key): value for key, value in pairs}

    def _number(self, text: str, convert: Any) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise NotRedis(f"{self.wire.peer} sent a number that is not valid") from None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def command(*words: str | int) -> bytes:
    """Return one command as RESP: an array of bulk strings, so words need no quoting."""
    parts = [str(word).encode("utf-8", "surrogateescape") for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%s\r\n" % (len(part), part) for part in parts
    )


def as_map(answer: Any) -> dict[str, Any]:
    """Return a map, which RESP2 sends as a flat list; {} for an answer that is no map."""
    if isinstance(answer, dict):
        return answer
    if isinstance(answer, list):
        return {str(key): value for key, value in zip(answer[::2], answer[1::2], strict=False)}
    return {}
