"""Parse foreign JSON only after its number of values has been checked.

A value of three bytes takes seventy in Python, so the length of a text alone does not limit the
memory that it needs.
"""

from __future__ import annotations

import json
from typing import Any


class TooManyValues(ValueError):
    """The text has more values than permitted."""


def values(text: bytes) -> int:
    """Return an upper bound of the number of values.

    Each value but the first follows one of these characters, which strings in the text may contain
    as well.
    """
    return sum(map(text.count, (b",", b"[", b"{")))


def decoded(text: bytes, most: int) -> Any:
    """Return the value of a text with at most `most` values; `TooManyValues`, `ValueError`."""
    if values(text) > most:
        raise TooManyValues(f"it has more than {most} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
