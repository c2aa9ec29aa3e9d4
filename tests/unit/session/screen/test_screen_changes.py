"""What an attached terminal is reset from when it detaches."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from criuctl.session.screen.changes import TerminalChanges

KEYBOARD = b"\x1b[<64u\x1b[=0u"


def undone(output: bytes, cuts: list[int]) -> bytes:
    changes = TerminalChanges()
    places = sorted({min(cut, len(output)) for cut in cuts} | {0, len(output)})
    for begin, end in itertools.pairwise(places):
        changes.watch(output[begin:end])
    return changes.undo()


@given(st.lists(st.integers(0, 60)))
def test_each_change_is_undone_however_the_output_is_cut(cuts: list[int]) -> None:
    for output, expected in (
        (b"text \x1b[1mbold\x1b[m \x1b]2;title\x07", b""),
        (b"a\x1b[?1049hb", b"\x1b[?1049l"),
        (b"a\x1b[?1;1049hb\x1b[?25;1049lc", b""),
        (b"a\x1b[?1049hb\x1bcc", b""),
        (b"a\x1b[>5ub", KEYBOARD),
        (b"a\x1b[?1049h\x1b[=1;2ub", KEYBOARD + b"\x1b[?1049l" + KEYBOARD),
        (b"\x1b]11;#000000\x07\x1b]4;1;red\x1b\\", b"\x1b]104\x1b\\\x1b]111\x1b\\"),
        (b"\x1b]8;;http://a/\x07 \x1b]52;c;YQ==\x07", b""),
    ):
        assert undone(output, cuts) == expected


def test_what_is_undone_is_not_undone_again() -> None:
    changes = TerminalChanges()
    changes.watch(b"\x1b[?1049h\x1b[>1u")
    assert changes.alternate and changes.undo()
    assert not changes.alternate and changes.undo() == b""
