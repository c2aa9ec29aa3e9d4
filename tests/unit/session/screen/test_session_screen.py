"""The screen that a log shows: what pyte lacks, and that a redraw shows the very same."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from criuctl.session.screen.screen import Screen

_PIECES = st.one_of(
    st.text("abc XYZ é世", min_size=1, max_size=12).map(str.encode),
    st.sampled_from(
        [
            b"\r\n",
            b"\n",
            b"\r",
            b"\t",
            b"\b",
            b"\x1b[m",
            b"\x1b[1;31m",
            b"\x1b[38;5;200;48;2;1;2;3m",
            b"\x1b[4:3;38:2::9:8:7m",
            b"\x1b[2;4r",
            b"\x1b[r",
            b"\x1b[?1049h",
            b"\x1b[?1049l",
            b"\x1b[?25l",
            b"\x1b[?25h",
            b"\x1b[?1h\x1b=",
            b"\x1b[?2004h",
            b"\x1b[?1000h\x1b[?1006h",
            b"\x1b[?7l",
            b"\x1b[?7h",
            b"\x1b[4h",
            b"\x1b[4l",
            b"\x1b(0lqk\x1b(B",
            b"\x1b7",
            b"\x1b8",
            b"\x1bM",
            b"\x1bD",
            b"\x1b[2S",
            b"\x1b[T",
            b"\x1b[5b",
            b"\x1b[3Z",
            b"\x1b[J",
            b"\x1b[1K",
            b"\x1b[2J",
            b"\x1b[3L",
            b"\x1b[2P",
            b"\x1b[3@",
            b"\x1b[4X",
            b"\x1b]2;title\x07",
            b"\x1bP+q544e\x1b\\",
            b"\x1b[>4;2m",
            b"\x1b[?u",
            b"\x1b[6n",
            b"\x1b[3 q",
            b"\x1b[!p",
            b"\x1bc",
        ]
    ),
    st.tuples(st.integers(0, 9), st.integers(0, 22)).map(lambda at: b"\x1b[%d;%dH" % at),
    st.binary(max_size=6),
)


def _seen(screen: Screen) -> list[object]:
    cells = [[screen.buffer[y][x] for x in range(screen.columns)] for y in range(screen.lines)]
    cursor = screen.cursor
    return [
        cells,
        (cursor.y, cursor.x, cursor.hidden, cursor.attrs[1:]),
        screen.margins,
        screen.alternate,
        screen.keypad,
    ]


@settings(max_examples=500, deadline=None)
@given(st.lists(_PIECES, max_size=40), st.data())
def test_whatever_was_printed_a_redraw_shows_it_and_pieces_do_not_matter(
    pieces: list[bytes], data: st.DataObject
) -> None:
    output = b"".join(pieces)
    screen = Screen(20, 6)
    screen.feed(output)
    other = Screen(20, 6)
    cut = data.draw(st.integers(0, len(output)))
    other.feed(output[:cut])
    other.feed(output[cut:])
    assert _seen(other) == _seen(screen)
    drawn = Screen(20, 6)
    drawn.feed(screen.redraw(6, 20))
    assert drawn.text() == screen.text()
    assert _seen(drawn)[1:] == _seen(screen)[1:]


_PARAMETER = st.sampled_from(
    [
        "",
        "0",
        "1",
        "3",
        "5",
        "6",
        "22",
        "38",
        "256",
        "1049",
        "100000",
        "9" * 5000,
        "4:3",
        "38:2",
        ":",
    ]
)
_SEQUENCES = st.builds(
    lambda prefix, parameters, middle, final: (
        f"\x1b[{prefix}{';'.join(parameters)}{middle}{final}".encode()
    ),
    st.sampled_from(["", "", "?", ">"]),
    st.lists(_PARAMETER, max_size=4),
    st.sampled_from(["", "", "", " ", "!"]),
    st.characters(min_codepoint=0x40, max_codepoint=0x7E),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(_PIECES, _SEQUENCES), max_size=20))
@example([b"\x1b[22J"])  # kitty's
@example([b"\x1b[7K"])
@example([b"\x1b[?6h\x1b[5d"])  # origin mode without margins
@example([b"\x1b[" + b"1" * 5000 + b"m"])
def test_nothing_that_a_program_prints_is_too_much(pieces: list[bytes]) -> None:
    screen = Screen(20, 6)
    screen.feed(b"".join(pieces))
    assert screen.redraw(6, 20, history=True) and len(screen.text()) == 6
    screen.cursor_report()


def test_the_alternate_screen_comes_and_goes() -> None:
    screen = Screen(10, 3)
    screen.feed(b"one\r\ntwo\x1b[?1049h\x1b[Hvim\x1b[?1049l!")
    assert screen.text() == ["one", "two!", ""]
    screen.feed(b"\x1b[?1049h\x1b[2J\x1b[Hagain")
    assert screen.text()[0] == "again" and screen.alternate
    both = Screen(10, 3)
    both.feed(screen.redraw(3, 10) + b"\x1b[?1049l")
    assert both.text() == ["one", "two!", ""]


def test_a_test_picture_is_no_larger_than_any_window() -> None:
    small, large = Screen(4, 2), Screen(2048, 1024)
    for screen in (small, large):
        screen.feed(b"\x1b#8")
    assert small.text() == ["EEEE"] * 2 and not large.buffer


def test_what_scrolls_by_is_history() -> None:
    screen = Screen(10, 3, history=4)
    screen.feed(b"".join(b"%d\r\n" % n for n in range(8)) + b"end")
    assert screen.text() == ["6", "7", "end"]
    assert screen.scrollback() == ["2", "3", "4", "5", "6", "7", "end"]
    terminal = Screen(10, 3)
    terminal.feed(screen.redraw(3, 10, history=True))
    assert terminal.text() == screen.text()
    assert [line for line in terminal.scrollback() if line] == ["2", "3", "4", "5", "6", "7", "end"]


def test_a_smaller_terminal_shows_where_the_cursor_is() -> None:
    screen = Screen(40, 20)
    screen.feed(b"top\x1b[18;30Hhere")
    small = Screen(20, 5)
    small.feed(screen.redraw(5, 20))
    assert small.cursor.y in range(5) and small.cursor.x == 19
