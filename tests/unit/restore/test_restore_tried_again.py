"""A restore whose numbers are taken at the last moment is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from criuctl.errors import NumberTaken, PidTaken, TerminalTaken
from criuctl.report import Reporter
from criuctl.restore.request import RestoreRequest
from criuctl.restore.story import _tried_again


def tried(kind: type[NumberTaken], request: RestoreRequest) -> list[tuple[str, int]]:
    """What each attempt was asked for: PIDs, and how many more may follow; all of them fail."""
    asked: list[tuple[str, int]] = []

    def operation(*, request: RestoreRequest, reporter: Reporter) -> None:
        asked.append((request.pids, request.more_tries))
        reporter.warning("seen")
        error = kind("it is taken")
        error.again = request.more_tries > 0
        raise error

    reporter: Any = Reporter()
    with pytest.raises(kind):
        _tried_again(operation)(request=request, reporter=reporter)
    assert len(reporter.warnings) == 1
    return asked


def test_the_last_time_no_other_process_can_take_its_pids() -> None:
    expected = [("auto", 2), ("auto", 1), ("private", 0)]
    assert tried(PidTaken, RestoreRequest()) == expected


def test_a_terminal_is_no_reason_for_pids_of_its_own() -> None:
    assert tried(TerminalTaken, RestoreRequest()) == [("auto", 2), ("auto", 1), ("auto", 0)]
