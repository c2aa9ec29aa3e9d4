"""Which text is searched when a client waits for one."""

from __future__ import annotations

import re

from criuctl.session.client.matching import ECHO, Search, compiled


def found(pattern: str, *pieces: bytes, echoes: tuple[tuple[int, int], ...] = ()) -> str | None:
    """What is found when the last piece has come."""
    search, at, match = Search(compiled(pattern).search), 0, None
    for piece in pieces:
        match = search.add(at, piece, echoes)
        at += len(piece)
    return match[0] if match is not None else None


def test_control_sequences_are_no_text() -> None:
    assert found("Build OK", b"Build \x1b[32mOK\x1b[m\r\n") == "Build OK"
    assert found("Build OK", b"Build \x1b[3", b"2mOK") == "Build OK"
    assert found("^100%$", b"10%\r50%\r100%\r\n") == "100%"
    assert found(r"\$ $", b"a\r\n\x1b[?2004h$ ") == "$ "


def test_an_echo_is_no_answer() -> None:
    output = b"$ echo DONE\r\nDONE\r\n"
    assert found("DONE", output[:11], echoes=((2, 11),)) is None
    assert found("^DONE$", output, echoes=((2, 11),)) == "DONE"
    assert found(r"\$ $", output, echoes=((2, 11),)) is None  # nor does a prompt end there
    assert found(r"\$ (.)$", output, echoes=((2, 11),)) == f"$ {ECHO}"


def test_what_looked_like_an_echo_may_turn_out_to_be_none() -> None:
    search = Search(compiled("echoes").search)
    assert search.add(0, b"echo", ((0, 4),)) is None
    assert search.add(4, b"es\r\n") is not None


def test_a_match_may_begin_in_earlier_output_and_a_gap_ends_it() -> None:
    lines = b"x" * 78 + b"\r\n"
    assert found("one.*two", b"one ", b"two") == "one two"
    assert found("(?s)one.*two", b"one\r\n", lines * 2000, b"two") is None  # too long ago
    search = Search(compiled("(?s)one.*two").search)
    assert search.add(0, b"one") is None and search.add(500, b"two") is None


def test_lines_have_ends_for_a_pattern_that_is_text() -> None:
    assert compiled("a").flags & re.MULTILINE
    assert not compiled(re.compile("a")).flags & re.MULTILINE
