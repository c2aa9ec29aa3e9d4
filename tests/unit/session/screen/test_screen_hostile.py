"""Output that is made to harm the program that shows it: neither time nor memory have no bound."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criuctl.session.screen import grid
from criuctl.session.screen.drawing import redraw
from criuctl.session.screen.screen import Screen
from criuctl.session.screen.widths import MAX_CLUSTER, NARROW, width

_BYTES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\x1b", b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b\\", b"\x18", b"\xf0\x9f", b"\x9b"]
    ),
    st.text(max_size=8).map(lambda text: text.encode(errors="surrogatepass")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_BYTES, max_size=30), st.integers(1, 30), st.integers(1, 12))
def test_any_bytes_are_shown_on_a_screen_of_any_size(
    pieces: list[bytes], columns: int, lines: int
) -> None:
    screen = Screen(columns, lines, history=10)
    for piece in pieces:
        screen.feed(piece)
    for rows, width_ in ((lines, columns), (1, 1), (lines + 3, columns + 3)):
        Screen(width_, rows).feed(redraw(screen, rows, width_, history=True))
    for line in screen.rows:
        assert len(line.cells) == len(line.pens) <= columns
    assert 0 <= screen.cursor.x <= columns and 0 <= screen.cursor.y < lines


def test_a_terminal_without_a_size_has_one_cell() -> None:
    screen = Screen(0, 0)
    screen.feed("abc\r\n世\x1b[5;5Hx\t\x1b[9@".encode() + b"y\r\n" * 9)
    assert (screen.columns, screen.lines) == (1, 1) and redraw(screen, 1, 1)


@pytest.mark.parametrize("start", [b"\x1b]2;", b"\x1bP", b"\x1b[", b"\x1b_G"])
def test_a_sequence_that_never_ends_is_not_kept(start: bytes) -> None:
    screen = Screen(20, 4)
    screen.feed(start)
    for _ in range(100):
        screen.feed(b"1" * 10_000)
        assert len(screen.pending) < 20_000
    assert screen.text() == [""] * 4
    screen.feed(b"m\x1b\\\r\nshown")
    assert screen.text()[1] == "shown"


def test_a_cell_takes_no_more_than_some_characters() -> None:
    screen = Screen(20, 2)
    screen.feed(b"a" + "\u0301".encode() * 100_000 + b"b")
    assert len(screen.text()[0]) == MAX_CLUSTER + 1 and screen.text()[0].endswith("b")


@pytest.mark.parametrize(
    "output",
    [
        b"\x1b[9999;9999Hx\x1b[9999A" * 2000,
        b"\x1b[9999b\x1b[9999@" * 5000,
        b"".join(b"\x1b[38;2;%d;%d;1mx" % (n % 256, n // 256) for n in range(20_000)),
        b"".join(b"\x1b]4;%d;#00%04x\x07" % (n, n) for n in range(20_000)),
        b"".join(b"\x1b]8;;http://%d/\x07x" % n for n in range(20_000)),
        b"\x1b[1u\x1b[>1u\x1b[=1u" * 10_000,
        b"\x1b#8" * 20,
    ],
)
def test_memory_has_a_bound(output: bytes) -> None:
    tracemalloc.start()
    try:
        screen = Screen(65535, 65535, history=100)
        screen.feed(output)
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


def test_the_history_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_MAX_HISTORY", 10_000)
    for output in (b"x" * 79, b"x", b"\x1b[31mx\x1b[32my"):
        screen = Screen(80, 3, history=sys.maxsize)
        screen.feed(b"".join(output + b"\r\n" for _ in range(1000)) + b"end")
        assert 20 < len(screen.history) < 250 and screen.scrollback()[-1] == "end"


def test_the_narrow_characters_are_narrow() -> None:
    named = NARROW.encode().decode("unicode_escape")
    found, at = "", 0
    while at < len(named):
        if named[at + 1 : at + 2] == "-":
            found += "".join(map(chr, range(ord(named[at]), ord(named[at + 2]) + 1)))
            at += 3
        else:
            found, at = found + named[at], at + 1
    assert len(found) > 1000 and {width(char) for char in found} == {1}
