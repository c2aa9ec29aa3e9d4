"""Output for a client that only watches: nothing of it reaches the clipboard."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.session.screen.clipboard import WithoutClipboard

CUTS = st.lists(st.integers(0, 400), max_size=12)


def shown(data: bytes, cuts: list[int] | None = None) -> bytes:
    """What is shown of `data`, which comes in pieces, and of a character behind it."""
    stream = WithoutClipboard()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts or ()), len(data)]
    out = b"".join(stream.feed(data[begin:end]) for begin, end in pairwise(edges))
    return out + stream.feed(b"!")


@given(CUTS)
@pytest.mark.parametrize(
    ("data", "left"),
    [
        (b"a\x1b]52;c;aGVsbG8=\x07b", b"ab!"),
        (b"a\x1b]52;c;aGVsbG8=\x1b\\b", b"ab!"),
        (b"a\x1b]52;;?\x07b", b"ab!"),
        (b"a\x1b]0052;c;eA==\x07b", b"ab!"),
        (b"a\x1b\x00]\x015\x7f2\n;c;eA==\x07b", b"ab!"),
        (b"a\xc2\x9d52;c;eA==\x07b", b"ab!"),
        (b"a\x1b]5522;type=write\x1b\\b", b"ab!"),
        (b"a\x1b]1337;Copy=:eA==\x07b\x1b]1337;CopyToClipboard=x\x07", b"ab!"),
        (b"a\x1bPtmux;\x1b\x1b]52;c;eA==\x07\x1b\\b", b"a\x1bPtmux;\x1b\x1b\\b!"),
        (b"a\x1bP\x1b]52;c;eA==\x07\x1b\\b", b"a\x1bP\x1b\\b!"),
        (b"a\x1b]0;t\x1b]52;c;eA==\x07b", b"a\x1b]0;tb!"),
        (b"a\x1b]52;c;eA==\x1b]52;c;eA==\x07b", b"ab!"),
        (b"a\x1b]52;c;eA==\x1b[1mb", b"a\x1b[1mb!"),
        (b"a\x1b]52;c;eA==\x18b", b"ab!"),
        (b"a\x1b]" + b"\x00" * 600 + b"52;c;eA==\x07b", b"ab!"),
    ],
)
def test_no_sequence_for_the_clipboard_is_shown(data: bytes, left: bytes, cuts: list[int]) -> None:
    assert shown(data, cuts) == left


@given(CUTS)
@pytest.mark.parametrize(
    "data",
    [
        b"\x1b]0;title 52;c;x\x07\x1b]8;;http://x/52;c\x1b\\link\x1b]8;;\x1b\\",
        b"\x1b]133;A;aid=52\x07\x1b]520;x\x07\x1b]1337;File=x\x07\x1b]5;2;red\x07",
        "caf\u00e9 \u00c2\u009e \u2764 \u015d52;c;".encode(),
        b"\x1b[52;1H\x1bPq52\x1b\\\x1b\x1b[A\r\n]52;c;",
    ],
)
def test_all_else_is_shown_as_it_is(data: bytes, cuts: list[int]) -> None:
    assert shown(data, cuts) == data + b"!"


@given(st.lists(st.sampled_from([b"\x1b", b"]", b"5", b"2", b";", b"\x07", b"\\", b"x", b"\0"])))
def test_what_is_shown_has_no_such_sequence(pieces: list[bytes]) -> None:
    """However it is put together: what is left is not one again."""
    out = shown(b"".join(pieces))
    assert shown(out[:-1]) == out
