"""What is told of a session's past does not depend on what clocks say."""

from __future__ import annotations

import json
from pathlib import Path

from criuctl.config import Config
from criuctl.ops.logs import audit
from criuctl.session.audit import AuditLog


def test_who_did_what_before_its_beginning_by_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """Or by that of the host that it has come to."""
    config = Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
    run, state = tmp_path / "run" / "holders" / "web", tmp_path / "state" / "holders" / "web"
    for folder in (run, state):
        folder.mkdir(parents=True)
    body = {"session": "web", "id": "ab" * 16, "state": "exited", "incarnation": 1, "exit_code": 0, "pid": 1, "start_time": 1}
    body |= {"created": 9e9, "since": 9e9, "command": [], "labels": {}, "holder": None}
    (run / "state.json").write_text(json.dumps(body))
    log = AuditLog.opened(state / "audit.jsonl", "ab" * 16, 1)
    log.write("kill", {"operator": "op-1"}, 1)
    log.close()
    assert [entry["what"] for entry in audit(config, "web")] == ["opened", "kill"]
    assert [entry["what"] for entry in audit(config, "web", since=1)] == ["kill"]
