"""A command's output without what the terminal and the shell's hooks have added."""

from __future__ import annotations

import pytest

from criuctl.session.client.commands import Cleaner

MARK = b"\x1b]133;C;aid=0123456789abcdef;n=12\x07"
FISH = b"\x1b[?2004l\x1b]0;echo on /tmp\x07\x1b[30m\x1b(B\x1b[m\r"
CASES = {
    "lines": ("bash", b"one\r\ntwo\r\n", b"one\ntwo\n"),
    "marks": ("bash", b"one\r\n" + MARK + b"two\r\n" + MARK, b"one\ntwo\n"),
    "carriage returns": ("bash", b"10%\r20%\r\n\r", b"10%\r20%\n\r"),
    "colours": ("zsh", b"\x1b[31mred\x1b[0m\r\n", b"\x1b[31mred\x1b[0m\n"),
    "titles": ("zsh", b"\x1b]0;title\x07x\x1b]133", b"\x1b]0;title\x07x\x1b]133"),
    "fish": ("fish", FISH + b"on\r\n", b"on\n"),
    "fish, nothing": ("fish", FISH, b""),
    "fish, no prologue": ("fish", b"plain\r\n", b"plain\n"),
    "an escape at the end": ("bash", b"x\x1b", b"x\x1b"),
    "bytes": ("bash", b"\xff\x00\r\n", b"\xff\x00\n"),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_output_in_pieces(case: str, size: int) -> None:
    shell, raw, wanted = CASES[case]
    cleaner, found = Cleaner(shell), b""
    for at in range(0, len(raw), size):
        found += cleaner.feed(raw[at : at + size])
    assert found + cleaner.feed(b"", last=True) == wanted


def test_plain_output() -> None:
    cleaner = Cleaner("bash", plain=True)
    found = cleaner.feed(b"\x1b[31mr\x1b[0") + cleaner.feed(b"med\x1b]0;t")
    found += cleaner.feed(b"itle\x07\r\nx") + cleaner.feed(b"", last=True)
    assert found == b"red\nx"
