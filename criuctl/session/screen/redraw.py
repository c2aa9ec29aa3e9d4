"""The screen of a session, made anew from its log: how much of the log that takes, and which screen the output switched to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..client.session import Session

REPLAY = 256 << 10  # bytes of the log that a redraw looks at
_REPLAY_MAX = 2 << 20  # ... or more, if a full-screen program began that long ago
_ON = (b"\x1b[?1049h", b"\x1b[?1047h", b"\x1b[?47h")
_OFF = (b"\x1b[?1049l", b"\x1b[?1047l", b"\x1b[?47l", b"\x1bc")


def beginning(base: int, end: int, since: int | None) -> int:
    """From where on the log is to be replayed for the screen at `end`; a full-screen program began at `since`."""
    start = max(base, end - REPLAY)
    if since is not None and base <= since < start:
        start = since if end - since <= _REPLAY_MAX else max(base, end - _REPLAY_MAX)
    return start


def replay(session: Session, status: dict[str, Any]) -> Any:
    """The screen that the log shows, as far back as is needed; its ``end`` is the offset behind what it has seen."""
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
    """Whether a terminal that is shown this output shows its alternate screen, for the moment when we leave it."""

    def __init__(self) -> None:
        self.shown = False
        self._escape = b""  # the end of the output, where a sequence may be cut in two

    def watch(self, data: bytes) -> None:
        """More output."""
        if b"\x1b" not in data and not self._escape:
            return
        joined = self._escape + data
        on, off = max(map(joined.rfind, _ON)), max(map(joined.rfind, _OFF))
        if on >= 0 or off >= 0:
            self.shown = on > off
        self._escape = joined[-7:] if b"\x1b" in joined[-7:] else b""
