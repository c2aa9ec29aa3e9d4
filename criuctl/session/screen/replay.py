"""The screen of a session, made from its log."""

from __future__ import annotations

import base64
import time
from typing import Any, Protocol

from .replay_range import beginning, first_whole
from .screen import MOUSE_MODES, Screen

_SECONDS = 10.0  # of processor time for a replay
_PIECE = 64 << 10
_MAX_AFTER_KEPT = 8 << 20  # bytes of output behind a kept screen that are replayed


class Piece(Protocol):
    """Output that was read: its bytes, and the offsets of the first one and behind the last one."""

    @property
    def offset(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def data(self) -> bytes: ...


class Readable(Protocol):
    """A session whose log can be read: `client.session.Session`."""

    def read(self, start: int, end: int | None = None, /) -> Piece: ...
    def kept_screen(self) -> dict[str, Any] | None: ...


def replay(session: Readable, status: dict[str, Any]) -> Screen:
    """Return the screen that the log shows; its ``end`` is the offset behind the last byte it has
    seen.
    """
    modes, base, end = status["modes"], status["base"], status["offset"]
    since, cleared = modes.get("alternate_since"), modes.get("cleared_at")
    screen = Screen(status["cols"], status["rows"])
    start = beginning(base, end, since, cleared)
    whole = start in (0, cleared)
    if since is not None and since < start:
        kept = session.kept_screen()
        if kept is not None and kept["since"] == since and end - kept["offset"] <= _MAX_AFTER_KEPT:
            start, whole = int(kept["offset"]), True
            screen.feed(base64.b64decode(kept["base64"]))
        else:
            screen.feed(b"\x1b[?1049h")
    output = session.read(start, max(start, end))
    data = output.data
    if not whole or output.offset != start:
        data = data[first_whole(data, full_screen=since is not None and start > since) :]
    _feed(screen, data)
    screen.end = output.end
    if start:
        _set_modes(screen, modes)
    return screen


def _feed(screen: Screen, data: bytes) -> None:
    """Show output; when that takes too long, as a program may see to it, only the end of it."""
    began, last = time.process_time(), len(data) - _PIECE
    for at in range(0, len(data), _PIECE):
        if at < last and time.process_time() - began > _SECONDS:
            screen.feed(b"\x18" + data[last:])
            return
        screen.feed(data[at : at + _PIECE])


def _set_modes(screen: Screen, modes: dict[str, Any]) -> None:
    """Set what the holder knows from all output, and the part that was replayed may not show."""
    for name, number in (("cursor_keys", 1), ("focus", 1004), ("bracketed_paste", 2004)):
        if name in modes:
            (screen.modes.add if modes[name] else screen.modes.discard)(number)
    if "mouse" in modes:
        screen.modes -= MOUSE_MODES
        screen.modes |= MOUSE_MODES & set(modes["mouse"])
    screen.keypad = bool(modes.get("keypad", screen.keypad))
    screen.visible = bool(modes.get("cursor_visible", screen.visible))
    screen.keyboard = list(modes.get("keyboard", screen.keyboard))
    screen.other_keyboard = list(modes.get("other_keyboard", screen.other_keyboard))
    screen.modify_other_keys = int(modes.get("modify_other_keys", screen.modify_other_keys))
    if modes.get("title"):
        screen.set_title(modes["title"])
