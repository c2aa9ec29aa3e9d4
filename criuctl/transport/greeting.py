"""The first frames of a link: each side's hello, and what other programs send in its place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .. import __version__
from ..errors import CriuctlError, HostUnreachable, UnsupportedFormat
from . import frames
from .frames import Broken
from .streams import Cut, Inward, Silent

PROTOCOL = (1, 1)  # oldest and newest that this criuctl supports
_BANNER = 0.5  # seconds to read the rest of a message that is no hello
_BANNER_SIZE = 400
_UPDATE = "Install the same version of criuctl on both hosts."


class Hello(Struct, frozen=True):
    """The other side's hello."""

    said: dict[str, Any]
    protocol: int  # the version that both use
    timeout: float  # seconds of silence that it accepts
    window: int  # requests that it accepts unanswered


def our_hello(facts: Mapping[str, Any], timeout: float, window: int) -> list[memoryview]:
    """Return our first frame."""
    own = {"protocol": list(PROTOCOL), "criuctl": __version__, "timeout": timeout, "window": window}
    return frames.encode(frames.HELLO, 0, {**facts, **own})


def their_hello(inward: Inward, name: str) -> Hello:
    """Wait for the other side's first frame.

    `Broken`, `UnsupportedFormat`, `HostUnreachable`, and what `inward` raises.
    """
    header = memoryview(bytearray(frames.HEADER.size))
    done = 0
    while done < header.nbytes:
        if not (count := inward.try_some(header[done:])):
            inward.wait()
        done += count
        if not frames.MAGIC.startswith(header[: min(done, len(frames.MAGIC))]):
            raise _no_protocol(inward, bytes(header[:done]), name)
    kind, _request, length, _body = frames.decode_header(header)
    if kind != frames.HELLO:
        raise Broken("it did not say hello")
    text = memoryview(bytearray(length))
    inward.fill(text)
    return _understood(frames.decode_json(text), name)


def _understood(said: dict[str, Any], name: str) -> Hello:
    theirs, window, timeout = said.get("protocol"), said.get("window"), said.get("timeout")
    if (
        not isinstance(theirs, list)
        or len(theirs) != 2
        or not all(type(version) is int for version in theirs)
    ):
        raise Broken("its hello names no protocol")
    newest = min(PROTOCOL[1], theirs[1])
    if newest < max(PROTOCOL[0], theirs[0]):
        raise UnsupportedFormat(
            f"criuctl {str(said.get('criuctl'))[:40]} on {name} speaks the protocols {theirs[0]} "
            f"to {theirs[1]}, criuctl {__version__} here {PROTOCOL[0]} to {PROTOCOL[1]}: none in "
            "common",
            hint=_UPDATE,
        )
    if type(window) is not int or not 1 <= window <= 4096:
        raise Broken("its hello names no window")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6:
        raise Broken("its hello names no time-out")
    return Hello(said, newest, timeout, window)


def _no_protocol(inward: Inward, said: bytes, name: str) -> CriuctlError:
    """Return the error for what is no hello: a login script's greeting, an error of the shell.

    It includes what arrives soon.
    """
    buffer = memoryview(bytearray(_BANNER_SIZE))
    ends = time.monotonic() + _BANNER
    with contextlib.suppress(Cut, Silent):
        while len(said) < _BANNER_SIZE and (left := ends - time.monotonic()) > 0:
            count = inward.try_some(buffer)
            said += bytes(buffer[:count])
            if not count:
                inward.wait(left)
    words = "".join(
        c if c.isprintable() else " " for c in said[:_BANNER_SIZE].decode(errors="replace")
    ).split()
    return HostUnreachable(
        f"{name} said {' '.join(words)!r}: not criuctl's protocol",
        hint=(
            "Login scripts there (~/.bashrc) must print nothing when there is no terminal; the "
            "command must be criuctl."
        ),
    )
