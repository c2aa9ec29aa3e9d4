"""Bytes as text, in JSON that a holder leaves for the next program."""

from __future__ import annotations

import base64


def encoded(data: bytes | bytearray) -> str:
    """Return `data` as base64."""
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    """Return what `encoded` was given."""
    return base64.b64decode(text)
