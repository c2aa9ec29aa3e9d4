"""JSON that others have written: how many values it has is found out before any of them is made.

A value of three bytes takes seventy in Python, so the length of a text alone says little of what
becomes of it.
"""

from __future__ import annotations

import json
from typing import Any


class TooManyValues(ValueError):
    """The text has more values than it may have."""


def values(text: bytes) -> int:
    """How many values it has at most: each but the first follows one of these, which texts in it
    may have as well.
    """
    return sum(map(text.count, (b",", b"[", b"{")))


def decoded(text: bytes, most: int) -> Any:
    """The value of a text with at most so many values; `TooManyValues`, `ValueError`."""
    if values(text) > most:
        raise TooManyValues(f"it has more than {most} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
