"""The screen that a holder keeps: what it asks of a child, and what it does when that fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.session.holder.kept_screen import KeptScreen
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.screen.modes import Modes

MIB = 1 << 20
ENTER = b"main\r\n\x1b[?1049h"


class Child:
    """What a holder starts, without a process: its task, and how it ends."""

    def __init__(self) -> None:
        self.task: dict[str, Any] = {}
        self.output = b""
        self.started = 0
        self._memory = -1
        self._ended: Callable[[int], None] = print

    def start(self, argv: list[str], fds: dict[int, int], ended: Callable[[int], None]) -> int:
        self._memory, self._ended = fds[0], ended
        with open(self._memory, "rb", closefd=False) as file:
            file.seek(0)
            self.task, self.output = json.loads(file.readline()), file.read()
        self.started += 1
        return 1

    def answer(self, drawn: str) -> None:
        with open(self._memory, "r+b", closefd=False) as file:
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"cursors": {}, "screen": drawn}).encode())
        self._ended(0)

    def fail(self) -> None:
        self._ended(256)


class Screens:
    """A kept screen, its log and its child."""

    def __init__(self, path: Path) -> None:
        self.log, self.modes, self.child = OutputLog(path, 16 * MIB), Modes(), Child()
        size = type("Size", (), {"rows": 24, "cols": 80})
        self.kept = KeptScreen(self.log, self.modes, size, self.child)  # type: ignore[arg-type]

    def prints(self, data: bytes) -> None:
        for at in range(0, len(data), MIB // 4):
            piece = data[at : at + MIB // 4]
            self.modes.feed(memoryview(piece), self.log.end)
            self.log.append(piece)
            self.log.flush()
            self.kept.came()


@pytest.fixture
def screens(tmp_path: Path) -> Iterator[Screens]:
    made = Screens(tmp_path / "log")
    yield made
    made.log.close()


def test_each_mebibyte_is_added_to_the_screen_before(screens: Screens) -> None:
    screens.prints(b"x" * 2 * MIB)
    assert screens.child.started == 0  # no full-screen program
    screens.prints(ENTER + b"a" * MIB)
    began = 2 * MIB + len(b"main\r\n")
    start = began - (64 << 10)
    task = screens.child.task
    assert (task["start"], task["drawn"], task["whole"]) == (start, 0, False)
    assert len(screens.child.output) == MIB and screens.kept.current() is None
    screens.prints(b"b" * MIB)
    assert screens.child.started == 1  # one at a time
    screens.child.answer("first")
    kept = screens.kept.current()
    assert kept is not None and (kept.offset, kept.drawn) == (start + MIB, b"first")
    assert screens.child.started == 2 and screens.child.output.startswith(b"first" + b"a")
    assert screens.child.task["whole"] and screens.child.task["drawn"] == 5
    screens.child.answer("second")
    assert screens.child.started == 2  # less than one is left
    screens.prints(b"\x1b[?1049l")
    assert screens.kept.current() is None and screens.kept.to_dict() is None


def test_a_child_that_fails_is_not_started_again_at_once(screens: Screens) -> None:
    screens.prints(ENTER + b"a" * MIB)
    screens.child.fail()
    screens.prints(b"a" * (MIB // 2))
    assert screens.child.started == 1
    screens.prints(b"a" * MIB)
    assert screens.child.started == 2
    screens.child.answer("x" * (1 << 19))  # too much to keep
    assert screens.kept.current() is None and screens.child.started == 2


def test_output_that_is_too_far_behind_is_left_out(screens: Screens) -> None:
    screens.prints(ENTER + b"a" * MIB)
    screens.prints(b"b" * 20 * MIB)
    screens.child.answer("first")
    end = screens.log.end
    task = screens.child.task
    assert (screens.child.started, task["start"], task["whole"]) == (2, end - MIB, False)
    assert screens.child.output == b"first" + b"b" * MIB
    screens.child.answer("second")
    kept = screens.kept.current()
    assert kept is not None and kept.offset == end


def test_what_another_holder_has_kept_goes_on(screens: Screens, tmp_path: Path) -> None:
    screens.prints(ENTER + b"a" * MIB)
    screens.child.answer("drawn")
    other = Screens(tmp_path / "other")
    try:
        other.prints(ENTER + b"a" * (MIB - len(ENTER)))
        for damaged in (None, 7, {}, {"offset": "x"}, {"offset": 1, "since": 6, "base64": "?"}):
            other.kept.restore(damaged)
            assert other.kept.current() is None
        other.kept.restore(json.loads(json.dumps(screens.kept.to_dict())))
        assert other.kept.current() == screens.kept.current()
    finally:
        other.log.close()


def test_no_descriptor_is_left(screens: Screens) -> None:
    before = len(os.listdir("/proc/self/fd"))
    screens.prints(ENTER + b"a" * MIB)
    screens.child.answer("drawn")
    assert len(os.listdir("/proc/self/fd")) == before
