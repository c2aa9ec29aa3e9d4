"""Drawing the screen of a session again from its log.

`beginning` says how much of the log that takes, `replay` does it, and `AlternateScreen` follows
which of a terminal's two screens the output has switched to.
"""

from __future__ import annotations

from typing import Any, Protocol

REPLAY = 256 << 10  # bytes of the log that a redraw looks at
_REPLAY_MAX = 2 << 20  # ... or more, if a full-screen program began that long ago
_ON = (b"\x1b[?1049h", b"\x1b[?1047h", b"\x1b[?47h")
_OFF = (b"\x1b[?1049l", b"\x1b[?1047l", b"\x1b[?47l", b"\x1bc")


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


def beginning(base: int, end: int, since: int | None) -> int:
    """Return the offset from which the log has to be replayed to know the screen at `end`.

    `base` is the oldest offset in the log, `since` where a full-screen program that still runs
    began.
    """
    start = max(base, end - REPLAY)
    if since is not None and base <= since < start:
        start = since if end - since <= _REPLAY_MAX else max(base, end - _REPLAY_MAX)
    return start


def replay(session: Readable, status: dict[str, Any]) -> Any:
    """Return the screen that the log shows; its ``end`` is the offset behind the last byte it has
    seen.
    """
    from .screen import Screen

    end, since = status["offset"], status["modes"].get("alternate_since")
    start = beginning(status["base"], end, since)
    output = session.read(start, end)
    screen = Screen(status["cols"], status["rows"])
    data = output.data
    if output.offset not in (0, since):
        data = data[data.find(b"\n") + 1 :]  # the middle of a line may be the middle of a sequence
    screen.feed(data)
    screen.end = output.end
    return screen


class AlternateScreen:
    """Follows whether a terminal that is given this output shows its alternate screen."""

    def __init__(self) -> None:
        self.shown = False
        self._escape = b""  # the end of the output, where a sequence may be cut in two

    def watch(self, data: bytes) -> None:
        """Look at more output."""
        if b"\x1b" not in data and not self._escape:
            return
        joined = self._escape + data
        on, off = max(map(joined.rfind, _ON)), max(map(joined.rfind, _OFF))
        if on >= 0 or off >= 0:
            self.shown = on > off
        self._escape = joined[-7:] if b"\x1b" in joined[-7:] else b""
