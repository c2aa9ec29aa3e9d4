"""How much of the log a screen is made from, and what is known besides."""

from __future__ import annotations

import base64
from typing import Any

from criuctl.session.client.session import Output
from criuctl.session.screen.drawing import redraw
from criuctl.session.screen.modes import Modes
from criuctl.session.screen.replay import replay
from criuctl.session.screen.replay_range import REPLAY, REPLAY_MAX, beginning, first_whole
from criuctl.session.screen.screen import Screen

KEPT = 64 << 10  # bytes before a full-screen program


class Log:
    """A session whose output is `data`; the bytes below `base` are not kept."""

    def __init__(self, data: bytes, base: int = 0, screen: dict[str, Any] | None = None) -> None:
        self._data, self._base, self._screen, self.read_from = data, base, screen, -1
        modes = Modes()
        modes.feed(memoryview(data), 0)
        self.status = {"base": base, "offset": len(data), "modes": modes.to_dict()}
        self.status |= {"rows": 5, "cols": 20}

    def read(self, start: int, end: int | None = None, /) -> Output:
        self.read_from = start = max(start, self._base)
        return Output(start, self._data[start:end])

    def kept_screen(self) -> dict[str, Any] | None:
        return self._screen

    def replay(self) -> Screen:
        return replay(self, self.status)


def test_where_a_replay_begins() -> None:
    end = 100 << 20
    assert beginning(0, 1000, None) == 0
    assert beginning(0, end, None) == end - REPLAY
    assert beginning(end - 7, end, None) == end - 7
    assert beginning(0, end, end - 1000) == end - REPLAY
    assert beginning(0, end, end - REPLAY - 9) == end - REPLAY - 9 - KEPT
    assert beginning(end - REPLAY - 10, end, end - REPLAY - 9) == end - REPLAY - 10
    assert beginning(0, end, 5) == end - REPLAY_MAX
    assert beginning(0, end, 5, end - REPLAY - 3) == end - REPLAY - 3
    assert beginning(0, end, 5, 7) == end - REPLAY_MAX


def test_where_output_that_begins_anywhere_is_whole() -> None:
    for output, full_screen, expected in (
        (b"8;5mrest\nline", False, b"line"),
        (b"8;5mrest\x1b[mline", False, b"\x1b[mline"),
        (b"\x1b[mline\n", False, b"\x1b[mline\n"),
        (b"nothing", False, b"nothing"),
        (b"8;5mrest\x1b[mx\n\x1b[3;4Hplace", True, b"\x1b[3;4Hplace"),
        (b"rest\nline", True, b"line"),
    ):
        assert output[first_whole(output, full_screen=full_screen) :] == expected


def test_modes_that_were_set_long_ago_are_set() -> None:
    before = b"\x1b[?2004h\x1b[?1000;1006h\x1b[>5u\x1b[>4;2m\x1b=\x1b[?25l\x1b]2;title\x07"
    screen = Log(before + b"line\r\n" * 200_000).replay()
    assert screen.modes == {2004, 1000, 1006} and screen.keyboard == [5]
    assert (screen.modify_other_keys, screen.keypad, screen.visible) == (2, True, False)
    assert screen.title == "title" and b"\x1b[?2004h" in redraw(screen, 5, 20)


def _much(count: int) -> bytes:
    return b"main\r\n\x1b[?1049h\x1b[Hframe" + b"\x1b[3;1H\x1b[32mcounter\x1b[m" * count


def test_a_full_screen_program_that_began_long_ago() -> None:
    short, long = _much(50_000), _much(300_000)
    screen = Log(short).replay()
    assert screen.text()[0] == "frame" and screen.scrollback() == ["main"]
    # Without a kept screen: what it has drawn lately, on the right one of the two screens.
    screen = Log(long).replay()
    assert screen.alternate and screen.text() == ["", "", "counter", "", ""]
    kept = Screen(20, 5)
    kept.feed(long[:-1000])
    drawn = base64.b64encode(redraw(kept, 5, 20) + kept.pending).decode()
    since = long.index(b"\x1b[?1049h")
    for base in (0, len(long) - 2000):
        log = Log(long, base, {"offset": len(long) - 1000, "since": since, "base64": drawn})
        screen = log.replay()
        assert log.read_from == len(long) - 1000
        assert screen.text() == ["frame", "", "counter", "", ""]
        assert screen.scrollback() == ["main"]
    # One of a program that has ended is of no use.
    log = Log(long, 0, {"offset": len(long) - 1000, "since": since + 1, "base64": drawn})
    assert log.replay().text()[0] == ""
