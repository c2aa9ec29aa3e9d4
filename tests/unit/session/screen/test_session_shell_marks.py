"""Marks of a shell in a session's output."""

from __future__ import annotations

import pytest

from criuctl.session.screen.shell_marks import Mark, ShellMarks

A1 = b"\x1b]133;A;aid=ab;n=1;pid=7\x07"
C1 = b"\x1b]133;C;aid=ab;n=1\x07"
D1 = b"\x1b]133;D;3;aid=ab;n=1\x07"
A2 = b"\x1b]133;A;aid=ab;n=2;pid=7\x07"
MORE = b"\x1b]133;A;k=s;aid=ab\x07"
KEY = b"\x1b]7133;R;aid=ab;n=2\x07"


def marks() -> tuple[ShellMarks, list[Mark]]:
    made, found = ShellMarks(), list[Mark]()
    made.begin("bash", "ab")
    made.on_mark = found.append
    return made, found


def test_a_command_from_prompt_to_prompt() -> None:
    made, found = marks()
    output = A1 + b"$ ls\r\n" + C1 + b"one\r\n" + D1 + A2 + b"$ " + KEY
    made.feed(memoryview(output), 100)
    assert [(mark.kind, mark.status) for mark in found] == [
        ("prompt", 0), ("begin", 0), ("end", 3), ("prompt", 0), ("key", 0),
    ]  # fmt: skip
    assert output[found[1].end - 100 : found[2].start - 100] == b"one\r\n"
    assert (made.state, made.number, made.pid) == ("prompt", 2, 7)
    assert made.at == 100 + output.index(A2) + len(A2)


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_marks_that_reads_have_cut(size: int) -> None:
    made, found = marks()
    output = b"\x1b]0;title\x07" + A1 + b"\x1b[1m$\x1b[m " + C1 + D1 + b"\x1b]13" + A2 + b"x"
    for at in range(0, len(output), size):
        made.feed(memoryview(output[at : at + size]), at)
    assert [mark.kind for mark in found] == ["prompt", "begin", "end", "prompt"]
    assert output[found[1].start : found[1].end] == C1


def test_a_long_read_behind_the_beginning_of_a_mark() -> None:
    made, found = marks()
    made.feed(memoryview(A1[:9]), 0)
    assert made.waiting
    made.feed(memoryview(A1[9:] + b"x" * 9000 + C1), 9)
    assert [(mark.kind, mark.start) for mark in found] == [
        ("prompt", 0), ("begin", len(A1) + 9000),
    ]  # fmt: skip


def test_marks_of_others() -> None:
    """Without the nonce, with the number of an earlier prompt, or of a hostile program."""
    made, found = marks()
    made.feed(memoryview(A2 + b"\x1b]133;A;aid=xx;n=3;pid=7\x07" + A1 + C1 + D1), 0)
    assert [mark.kind for mark in found] == ["prompt"]
    made.feed(memoryview(b"\x1b]133;D;" + b"9" * 70 + b";aid=ab;n=2\x07"), 0)
    made.feed(memoryview(b"\x1b]133;D;\xff;aid=ab;n=" + b"9" * 40 + b"\x07"), 0)
    assert len(found) == 1
    made.verify = lambda pid: pid == 7
    made.feed(memoryview(A1), 0)
    assert (made.number, made.state) == (1, "prompt")
    silent = ShellMarks()
    silent.feed(memoryview(b"\x1b]133;A;aid=;n=1;pid=1\x07"), 0)
    assert silent.state == ""


def test_the_rest_of_a_command_is_asked_for() -> None:
    made, found = marks()
    made.feed(memoryview(A1 + b"$ for x in 1\r\n" + MORE), 0)
    assert made.state == "more" and [mark.kind for mark in found] == ["prompt", "more"]


def test_state_is_handed_over() -> None:
    made, _ = marks()
    made.feed(memoryview(A1 + C1[:5]), 0)
    other = ShellMarks()
    other.restore(made.to_dict())
    other.feed(memoryview(C1[5:]), len(A1) + 5)
    assert (other.shell, other.state, other.pid) == ("bash", "begin", 7)
