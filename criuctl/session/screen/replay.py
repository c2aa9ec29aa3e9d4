"""The screen of a session, made from its log."""

from __future__ import annotations

from typing import Any, Protocol

from .replay_range import beginning
from .screen import MOUSE_MODES, Screen


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


def replay(session: Readable, status: dict[str, Any]) -> Screen:
    """Return the screen that the log shows; its ``end`` is the offset behind the last byte it has
    seen.
    """
    end, since = status["offset"], status["modes"].get("alternate_since")
    start = beginning(status["base"], end, since)
    output = session.read(start, end)
    screen = Screen(status["cols"], status["rows"])
    data = output.data
    if output.offset not in (0, since):
        data = data[data.find(b"\n") + 1 :]  # the middle of a line may be the middle of a sequence
    screen.feed(data)
    screen.end = output.end
    if start:
        _set_modes(screen, status["modes"])
    return screen


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
