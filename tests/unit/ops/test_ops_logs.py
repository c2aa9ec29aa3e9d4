"""What the log says of a session's past does not depend on clocks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.ops.logs import audit, recording
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.timeline import MAX_SIZE, Timeline, owner


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a session's logs; it has ended, and was begun long after now."""
    run, state = tmp_path / "run" / "holders" / "web", tmp_path / "state" / "holders" / "web"
    for folder in (run, state):
        folder.mkdir(parents=True)
    body = {
        "session": "web",
        "id": "ab" * 16,
        "state": "exited",
        "incarnation": 1,
        "exit_code": 0,
        "pid": 1,
        "start_time": 1,
    }
    body |= {"created": 9e9, "since": 9e9, "command": [], "labels": {}, "holder": None}
    body |= {"rows": 24, "cols": 80, "log": str(state / "output")}
    (run / "state.json").write_text(json.dumps(body))
    return state


def test_who_did_what_before_its_beginning_by_a_clock_that_was_set_back(
    config: Config, state: Path
) -> None:
    """Or by that of the host that it has come to."""
    log = AuditLog.opened(state / "audit.jsonl", "ab" * 16, 1)
    log.write("kill", {"operator": "op-1"}, 1)
    log.close()
    assert [entry["what"] for entry in audit(config, "web")] == ["opened", "kill"]
    assert [entry["what"] for entry in audit(config, "web", since=1)] == ["kill"]


@contextmanager
def timeline_of(state: Path, position: int, session: str = "ab" * 16) -> Iterator[Timeline]:
    timeline = Timeline(state / "timeline", position, session)
    yield timeline
    os.close(timeline._fd)


def test_a_recording_has_the_times_of_its_own_session_alone(config: Config, state: Path) -> None:
    """Another one had the name on this host, before this one came to it from a host whose clock is
    ahead.
    """
    with timeline_of(state, 0, "cd" * 16) as other:
        other.event("resize", 0, {"rows": 5, "cols": 7})
        other.event("exit", 103, {"exit_code": 1})
    log = OutputLog(state / "output", base=100)
    log.append(b"before")
    with timeline_of(state, 106) as timeline:
        timeline.event("restored", 106, {"host": "a"})
        log.append(b"after")
        timeline.output(111)
    log.close()
    with timeline_of(state, 111) as timeline:  # its next holder goes on in it
        _, *events = (json.loads(line) for line in recording(config, "web"))
        assert [event[1:] for event in events] == [
            ["o", "before"],
            ["m", "restored, from a"],
            ["o", "after"],
            ["x", "0"],
        ]
        for _ in range(MAX_SIZE // 4000):
            timeline.event("resize", 111, {"rows": 5, "cols": 7, "more": "x" * 4000})
        assert 1 << 20 < timeline._size < 3 << 20 and owner(state / "timeline") == "ab" * 16
