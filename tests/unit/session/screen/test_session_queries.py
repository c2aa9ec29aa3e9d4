"""Queries of a program to its terminal: found however they are cut, taken out of old output, and
where the cursor was.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from criuctl.session.screen import emulate
from criuctl.session.screen.modes import Modes
from criuctl.session.screen.queries import OldOutput
from criuctl.session.screen.screen import Screen

QUERIES = ("6n", "?6n", "5n", "c", "0c", ">c", ">0c")


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.lists(st.sampled_from(["text", "\x1b[2J", "\x1b[1m", "\x1bc", *QUERIES])),
    st.lists(st.integers(0, 120)),
)
def test_queries_are_found_in_order_and_with_their_places(
    words: list[str], cuts: list[int]
) -> None:
    data, expected = b"", []
    for word in words:
        data += (f"\x1b[{word}" if word in QUERIES else word).encode()
        if word in QUERIES:
            expected.append((1000 + len(data), word))
    modes, offset = Modes(), 1000
    for piece in pieces(data, cuts):
        modes.feed(memoryview(piece), offset)
        offset += len(piece)
    assert modes.asked == expected
    assert [
        tuple(query) for query in Modes.from_dict(json.loads(json.dumps(modes.to_dict()))).asked
    ] == expected


def test_what_is_no_query() -> None:
    modes = Modes()
    modes.feed(memoryview(b"\x1b[6;1n\x1b[16n\x1b[?1;2c\x1b[0n\x1b[>0;0;0c\x1b[12;1R6n\x1b[ c"), 0)
    assert modes.asked == []


@given(st.integers(0, 40), st.lists(st.integers(0, 40)))
def test_old_queries_are_not_shown_and_new_ones_are(old: int, cuts: list[int]) -> None:
    """Old output ends where a client attached: a query that was not complete then is new."""
    data = b"ab\x1b[6ncd\x1b[1m\x1b[?6n\x1b[c\x1b[>cef\x1b[5n\x1b[31"
    ends = {
        data.index(query) + len(query): query
        for query in (b"\x1b[6n", b"\x1b[?6n", b"\x1b[c", b"\x1b[>c", b"\x1b[5n")
    }
    old_output, shown, offset = OldOutput(7000 + old), b"", 7000
    for piece in pieces(data, cuts):
        shown += old_output.feed(offset, piece)
        offset += len(piece)
    expected = data
    for end, query in ends.items():
        if end <= old:
            expected = expected.replace(query, b"", 1)
    # What looks like the beginning of a query may be held back while everything is old.
    assert expected.startswith(shown) and (len(data) > old or len(expected) - len(shown) < 6)
    assert len(data) < old or shown == expected


def test_where_the_cursor_is_as_a_terminal_tells_it() -> None:
    screen = Screen(10, 5)
    screen.feed(b"0123456789")
    assert screen.cursor_report() == (1, 10)  # a wrap is pending
    screen.feed(b"x")
    assert screen.cursor_report() == (2, 2)
    screen.feed(b"\x1b[2;4r\x1b[?6h\x1b[2;3H")
    assert screen.cursor_report() == (2, 3)


def test_where_the_cursor_was_at_each_query(tmp_path: Path) -> None:
    """By the program, as a holder starts it: output that begins in the middle counts from its first
    whole line on.
    """
    output = b"1mrest\r\nabc\x1b[6n\r\n\x1b[4;7H\x1b[6nlater"
    at = [500 + output.index(b"\r\n\x1b[4"), 500 + output.index(b"later")]
    task = {"rows": 24, "cols": 80, "start": 500, "at": at, "whole": False, "drawn": 0}
    file = tmp_path / "task"
    file.write_bytes(json.dumps(task).encode() + b"\n" + output)
    with open(file, "r+b") as stdin:
        subprocess.run(
            [sys.executable, "-I", emulate.__file__],
            stdin=stdin,
            check=True,
            timeout=60,
            env=dict(os.environ),
        )
    answer = json.loads(file.read_text())
    assert answer["cursors"] == {str(at[0]): [1, 4], str(at[1]): [4, 7]}
    drawn = Screen(80, 24)
    drawn.feed(answer["screen"].encode("latin-1"))
    assert [line for line in drawn.text() if line] == ["abc", "      later"]
