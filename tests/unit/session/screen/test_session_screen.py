"""The screen that a log shows, and that a redraw shows the very same."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from criuctl.session.screen.cells import plain
from criuctl.session.screen.drawing import View, redraw
from criuctl.session.screen.grid import Cursor
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
            b"\x1b[2;8;53;58:5:9m",
            b"\x1b]8;id=1;http://a.example/\x07",
            b"\x1b]8;;\x1b\\",
            "⚠️".encode(),
            "e\u0301".encode(),
            "\u200d".encode(),
            "👩🏽\u200d🚀".encode(),
            "🇩🇪".encode(),
            b"\x1b[>5u",
            b"\x1b[=2;2u",
            b"\x1b[<u",
            b"\x1b]11;#102030\x07",
            b"\x1b]4;1;red;2;rgb:1/2/3\x07",
            b"\x1b]104;1\x07",
            b"\x1b]111\x07",
            b"\x1bH",
            b"\x1b[3g",
            b"\x1b[20h",
            b"\x1b[?6h",
            b"\x1b[?47h",
            b"\x1b[?1047l",
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
    """Return all that a program may notice of a screen."""
    main = None
    if screen.main is not None:
        main = [line.runs() for line in screen.main[0]], screen.main[1] or Cursor()
    return [
        [line.runs() for line in screen.rows],
        screen.cursor,
        screen.saved or Cursor(),
        main,
        (screen.top, screen.bottom, screen.tab_stops),
        (screen.insert_mode, screen.autowrap, screen.newline, screen.visible, screen.keypad),
        (screen.modes, screen.cursor_style, screen.modify_other_keys, screen.keyboard),
        (screen.title, screen.colours),
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
    drawn.feed(redraw(screen, 6, 20))
    assert _seen(drawn) == _seen(screen)


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
    assert redraw(screen, 6, 20, history=True) and len(screen.text()) == 6
    screen.cursor_report()


def test_the_alternate_screen_comes_and_goes() -> None:
    screen = Screen(10, 3)
    screen.feed(b"one\r\ntwo\x1b[?1049h\x1b[Hvim\x1b[?1049l!")
    assert screen.text() == ["one", "two!", ""]
    screen.feed(b"\x1b[?1049h\x1b[2J\x1b[Hagain")
    assert screen.text()[0] == "again" and screen.alternate
    both = Screen(10, 3)
    both.feed(redraw(screen, 3, 10) + b"\x1b[?1049l")
    assert both.text() == ["one", "two!", ""]


def test_a_test_picture_is_no_larger_than_any_window() -> None:
    small, large = Screen(4, 2), Screen(2048, 1024)
    for screen in (small, large):
        screen.feed(b"\x1b#8")
    assert small.text() == ["EEEE"] * 2 and not any(large.text())


def test_what_scrolls_by_is_history() -> None:
    screen = Screen(10, 3, history=4)
    screen.feed(b"".join(b"%d\r\n" % n for n in range(8)) + b"end")
    assert screen.text() == ["6", "7", "end"]
    assert screen.scrollback() == ["2", "3", "4", "5", "6", "7", "end"]
    terminal = Screen(10, 3)
    terminal.feed(redraw(screen, 3, 10, history=True))
    assert terminal.text() == screen.text()
    assert [line for line in terminal.scrollback() if line] == ["2", "3", "4", "5", "6", "7", "end"]


def test_a_smaller_terminal_shows_where_the_cursor_is() -> None:
    screen = Screen(40, 20)
    screen.feed(b"top\x1b[18;30Hhere")
    small = Screen(20, 5)
    small.feed(redraw(screen, 5, 20))
    assert (small.cursor.y, small.cursor.x) == (4, 19) and small.text()[4].endswith("here")


def test_a_redraw_keeps_attributes_colours_and_links() -> None:
    output = (
        "\x1b[2mdim\x1b[m \x1b[8mhidden\x1b[m \x1b[4:3;58:5:9mcurly\x1b[m \x1b[38;5;200mpink\x1b[m "
        "\x1b]8;id=a;http://a.example/?q=1\x1b\\link\x1b]8;;\x1b\\ \x1b[48:2::1:2:3mblue\x1b[m"
    )
    expected = [
        "\x1b[0;2mdim\x1b[m \x1b[0;8mhidden\x1b[m \x1b[0;4:3;58:5:9mcurly\x1b[m "
        "\x1b[0;38;5;200mpink\x1b[m \x1b]8;id=a;http://a.example/?q=1\x1b\\link\x1b]8;;\x1b\\ "
        "\x1b[0;48;2;1;2;3mblue\x1b[m"
    ]
    screen = Screen(60, 1)
    screen.feed(output.encode())
    drawn = Screen(60, 1)
    drawn.feed(redraw(screen, 1, 60))
    assert screen.ansi() == drawn.ansi() == expected


def test_characters_without_a_width_lose_nothing() -> None:
    for text in (
        "⚠️  Warning: the database will be DELETED",
        "a\u200bb\u200dc\u200fd\ufeffe\u2060f",
        "e\u0301 🇩🇪 👩🏽\u200d🚀 ❤️ 가 end",
    ):
        screen = Screen(60, 2)
        screen.feed(text.encode())
        drawn = Screen(60, 2)
        drawn.feed(redraw(screen, 2, 60))
        assert screen.text() == drawn.text() == [text, ""]
        assert screen.scrollback() == [text]


def test_what_scrolls_through_at_once_is_the_same_as_line_by_line() -> None:
    lines = [b"%d %s" % (n, b"x" * (n % 25)) for n in range(60)] + [b"", b"end"]
    for before in (
        b"",
        b"\x1b[31mone\r\ntwo",
        b"\x1b[?1049h",
        b"\x1b[2;3r",
        b"\x1b[4h",
        b"\x1b[44m",
    ):
        whole, parts = Screen(10, 4, history=30), Screen(10, 4, history=30)
        whole.feed(before + b"\r\n".join(lines) + b"\r\n")
        parts.feed(before)
        for line in lines:
            parts.feed(line)
            parts.feed(b"\r\n")
        assert _seen(whole) == _seen(parts)
        assert whole.scrollback(ansi=True) == parts.scrollback(ansi=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(_PIECES, max_size=30), st.lists(st.integers(1, 30), max_size=6))
def test_a_part_that_is_drawn_step_by_step_is_that_part(
    pieces: list[bytes], cuts: list[int]
) -> None:
    """On a smaller terminal: after each step its rows are those around the cursor."""
    screen, small = Screen(20, 6), Screen(11, 4)
    view = View(screen)
    for begin, end in pairwise(sorted({0, *cuts, 30})):
        screen.feed(b"".join(pieces[begin:end]))
        small.feed(view.update(4, 11).encode(errors="replace"))
        left = min(screen.cursor.x, 19) - small.cursor.x
        top = screen.cursor.y - small.cursor.y
        assert 0 <= left <= 9 and 0 <= top <= 2 and small.visible == screen.visible
        shown = [line.clipped(left, left + 11).runs() for line in screen.rows[top : top + 4]]
        assert [plain(line.runs()) for line in small.rows] == [plain(runs) for runs in shown]
