"""The rounds in which memory is read while its tree runs."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Round(Struct, frozen=True):
    """The measured result of one round."""

    number: int
    read: int  # bytes
    new: int  # bytes that the store did not have: all, or the changes since the round before
    stored: int  # bytes written to the store for them
    seconds: float  # until everything was durable

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "round": self.number,
            "read": self.read,
            "new": self.new,
            "seconds": round(self.seconds, 3),
        }
