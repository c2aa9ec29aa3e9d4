"""Which events `criuctl events` prints: the last ones for people, all for scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from criuctl.host.journal.event_log import EventLog, as_text

Show = Callable[..., subprocess.CompletedProcess[str]]
COUNT = 70
AGE = timedelta(hours=3)  # of those before the last ten


@pytest.fixture
def show(criuctl: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """criuctl events with a log of 70 events, every second one of the session web."""
    log = EventLog(tmp_path)
    for count, age in ((COUNT - 10, AGE), (10, timedelta(0))):
        time = as_text(datetime.now(UTC) - age)
        monkeypatch.setattr("criuctl.host.journal.event_log.now", lambda time=time: time)
        log.append(
            [
                {"operation": "snapshot", "session": ("web", "db")[n % 2], "outcome": "done"}
                for n in range(count)
            ]
        )

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = criuctl("events", *words, env={"CRIUCTL_STATE_DIR": str(tmp_path)})
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def numbers(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Of the events in the table."""
    return [int(line.split()[0]) for line in done.stdout.splitlines()[1:]]


def test_the_last_are_shown_and_what_is_left_out_is_said(show: Show) -> None:
    done = show()
    assert numbers(done) == list(range(COUNT - 29, COUNT + 1))
    assert done.stderr == "The last 30 of 70 events; --all shows all of them.\n"
    of_web = show("--session", "web")
    assert numbers(of_web) == list(range(COUNT - 59, COUNT, 2)) and "30 of 35" in of_web.stderr


def test_scripts_get_all(show: Show) -> None:
    assert [event["seq"] for event in json.loads(show("--json").stdout)] == [*range(1, COUNT + 1)]
    assert len(show("-q").stdout.split()) == COUNT
    assert [e["seq"] for e in json.loads(show("--json", "-n", "2").stdout)] == [COUNT - 1, COUNT]


def test_as_many_as_are_asked_for(show: Show) -> None:
    for words, found in (
        (["--all"], range(1, COUNT + 1)),
        (["-n", "3"], range(COUNT - 2, COUNT + 1)),
        (["--lines", "500"], range(1, COUNT + 1)),
        (["-n", "0"], ()),
        (["--since", "7"], range(8, COUNT + 1)),
        (["--since", "7", "-n", "1"], [COUNT]),
        (["-S", "1h"], range(COUNT - 9, COUNT + 1)),
        (["-S", "1d"], range(1, COUNT + 1)),
        (["-S", (datetime.now(UTC) - AGE / 2).isoformat(" ")], range(COUNT - 9, COUNT + 1)),
        (["-S", "2100-01-01"], ()),
    ):
        done = show(*words)
        assert numbers(done) == [*found], words
        assert done.stderr == ("" if found else "no events\n")


@pytest.mark.parametrize("since", ["soon", "2026-13-01", "3x", "-1", ""])
def test_what_is_no_time_is_refused(show: Show, since: str) -> None:
    assert "yesterday" in show(f"--since={since}", code=2).stderr
    assert show("--since=today").returncode == show("--since=yesterday").returncode == 0


def test_all_is_all(show: Show) -> None:
    assert "excludes" in show("--all", "-n", "2", code=2).stderr
