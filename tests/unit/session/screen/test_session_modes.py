"""Mode tracking sees every switch, however the reads cut the output."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from criuctl.session.screen.modes import Modes

SEQUENCES = [
    *(
        b"\x1b[?%s" % mode
        for mode in (
            b"1049h",
            b"1049l",
            b"2004h",
            b"2004l",
            b"1000;1006h",
            b"1006l",
            b"25l",
            b"25h",
            b"1h",
            b"1004h",
        )
    ),
    *(
        b"\x1b=",
        b"\x1b>",
        b"\x1bc",
        b"\x1b[!p",
        b"\x1b[2J",
        b"\x1b]0;a title\x07",
        b"\x1b]2;other\x1b\\",
    ),
]
NOISE = [
    b"text\r\n",
    b"\x1b[31m",
    b"\x1b",
    b"\x1b[",
    b"\x1b[?",
    b"\x1b[?20",
    b"\x1b]0;never ended",
    b"\xff\x00",
    b"c=>hl",
    b"\x1b\x1b",
]


def run(pieces: list[bytes]) -> Modes:
    modes, offset = Modes(), 0
    for piece in pieces:
        modes.feed(memoryview(piece), offset)
        offset += len(piece)
    return modes


def test_a_full_screen_program_comes_and_goes() -> None:
    start = b"$ vim\r\n\x1b[?1049h\x1b[?1h\x1b=\x1b[?2004h"
    start += b"\x1b[?1002;1006h\x1b[?25l\x1b[2J\x1b]0;vim\x07"
    modes = run([start])
    assert (
        modes.alternate
        and modes.cursor_keys
        and modes.keypad
        and modes.bracketed_paste
        and not modes.cursor_visible
    )
    assert (modes.mouse, modes.title) == ([1002, 1006], "vim")
    assert (modes.alternate_since, modes.cleared_at) == (
        start.index(b"\x1b[?1049h"),
        start.index(b"\x1b[2J"),
    )
    modes.feed(memoryview(b"\x1b[?1049l\x1b[?1002;1006l\x1b[?25h"), 1000)
    assert (
        not modes.alternate
        and not modes.mouse
        and modes.cursor_visible
        and modes.alternate_since is None
    )


def test_a_reset_resets_everything() -> None:
    modes = run([b"\x1b[?1049h\x1b[?2004h\x1b[?25l", b"\x1bc"])
    assert modes.to_dict() == Modes(cleared_at=len(b"\x1b[?1049h\x1b[?2004h\x1b[?25l")).to_dict()


@settings(max_examples=300, deadline=None)
@given(
    stream=st.lists(st.sampled_from(SEQUENCES + NOISE), max_size=25),
    cuts=st.lists(st.integers(0, 12000), max_size=12),
)
def test_cuts_make_no_difference(stream: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(stream)
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert run(pieces).to_dict() == run([whole]).to_dict()
    assert run([whole[i : i + 1] for i in range(len(whole))]).to_dict() == run([whole]).to_dict()


def test_it_goes_through_json() -> None:
    modes = run([b"\x1b[?1000h\x1b]0;t\x07"])
    assert Modes.from_dict(modes.to_dict() | {"unknown": 1}).to_dict() == modes.to_dict()
