"""Checked values of requests: of the right type and in range, or refused with the key's name.

Also what all operations share: their type, and the answer `LATER`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import protocol
from .connection import Connection
from .operators import Operator, Refused

Message = dict[str, Any]
# Name -> (least role, function).
Operations = Mapping[str, tuple[str, Callable[[Connection, Operator, Message], Message | None]]]
FAR = 1 << 62  # beyond any offset and any sequence
LATER: Message = {"later": True}  # returned by an operation that will answer later


def integer(message: Message, key: str, least: int, most: int, default: int | None = None) -> int:
    """Return an integer from `least` to `most`."""
    value = message.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused("bad-request", f"{key!r} must be an integer from {least} to {most}")
    return value


def number(message: Message, key: str, least: float, most: float, default: float) -> float:
    """Return a number from `least` to `most`."""
    value = message.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise Refused("bad-request", f"{key!r} must be a number from {least:g} to {most:g}")
    return float(value)


def text(message: Message, key: str, most: int = 256) -> str:
    """Return text of at most `most` characters."""
    value = message.get(key)
    if not isinstance(value, str) or not value or len(value) > most:
        raise Refused("bad-request", f"{key!r} must be text of 1 to {most} characters")
    return value


def one_of(message: Message, key: str, choices: Sequence[str], default: str | None = None) -> str:
    """Return one of `choices`."""
    value = message.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise Refused("bad-request", f"{key!r} must be one of {', '.join(choices)}")
    return value


def boolean(message: Message, key: str) -> bool:
    """Return a boolean; False if the key is missing."""
    value = message.get(key, False)
    if not isinstance(value, bool):
        raise Refused("bad-request", f"{key!r} must be true or false")
    return value


def window_size(message: Message) -> tuple[int, int, int, int]:
    """Return rows, columns, and both in pixels, 0 if the client does not know them."""
    rows, cols = integer(message, "rows", 1, 65535), integer(message, "cols", 1, 65535)
    return (
        rows,
        cols,
        integer(message, "xpixel", 0, 65535, 0),
        integer(message, "ypixel", 0, 65535, 0),
    )


def fitting(things: Iterable[Message]) -> list[Message]:
    """Return the first `things`, as many as fit into an answer."""
    found, left = list[Message](), protocol.MAX_FRAME // 2
    for one in things:
        left -= len(json.dumps(one)) + 1
        if left < 0:
            break
        found.append(one)
    return found
