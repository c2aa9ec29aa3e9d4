"""A cloud's notice that it will take this machine away, or may do so soon."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol

from msgspec import Struct

from .metadata import MetadataUnavailable

Kind = Literal["interruption", "rebalance"]
_LONGEST = 200  # characters of a word that a cloud sends


class Notice(Struct, frozen=True):
    """One notice; the same one is returned by each look while it stands."""

    cloud: str
    kind: Kind  # rebalance: the risk is higher than usual, no time is set
    id: str
    action: str  # the cloud's word for what it will do
    window: float  # seconds that such a notice gives, if it names no time
    at: float | None = None  # UNIX seconds

    def left(self, now: float) -> float:
        """Return the seconds until it happens. A time that has passed by this host's clock counts
        for nothing: the window is what the cloud promises.
        """
        return self.at - now if self.at is not None and self.at > now else self.window


class Cloud(Protocol):
    """What a cloud's module offers."""

    name: str
    window: float  # seconds of its shortest notice
    pause: float  # seconds between two looks

    def present(self) -> bool:
        """Return whether this machine is one of this cloud's."""

    def look(self) -> Notice | None:
        """Return the notice that stands, None if there is none; `MetadataUnavailable`."""

    def acknowledge(self, notice: Notice) -> bool:
        """Tell the cloud that it need not wait; return False where there is no such thing."""


def moment(text: object) -> float | None:
    """Return a time as UNIX seconds, from RFC 3339 or from HTTP's format; None if it is none."""
    if not isinstance(text, str) or not text or len(text) > _LONGEST:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError):
            return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    try:
        seconds = found.timestamp()
    except (OverflowError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None


def word(value: object, default: str) -> str:
    """Return a short printable text that a cloud sends, else `default`."""
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LONGEST:
        return value
    return default


def object_in(text: str, what: str) -> dict[str, Any]:
    """Return a JSON object; `MetadataUnavailable` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MetadataUnavailable(f"the metadata service's {what} is no JSON object")
    return found
