"""What a holder left in the run folder is reported, whichever process wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.ops.forget import forget
from criuctl.ops.sessions import describe, sessions
from criuctl.session.sessions import leftovers, secluded, state_of

STATE: dict[str, Any] = {
    "session": "web", "id": "ab" * 16, "state": "exited", "incarnation": 1, "pid": None,
    "start_time": None, "exit_code": 3, "exit_signal": None, "since": 9e8, "created": 9e8,
    "reason": None, "command": ["true"], "labels": {}, "checkpoint": None, "moved_to": None,
    "home": "here", "rows": 24, "cols": 80, "pid_namespace": None, "socket": "", "cgroup": None,
    "holder": None, "boot_id": "", "log": "",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))


@pytest.mark.parametrize(
    "body", [{}, *({k: v for k, v in STATE.items() if k != key} for key in STATE)]
)
@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_an_incomplete_state_file_is_reported(
    config: Config, body: dict[str, Any], null: bool, recorded: bool
) -> None:
    """One such file, of another version or damaged, is no reason to tell of no session at all."""
    folder = Path(config.run_dir) / "holders" / "web"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(dict.fromkeys(STATE) | body if null else body))
    if recorded:
        Registry(config).put(
            SessionRecord("web", "ab" * 16, state="checkpointed", checkpoint="cd" * 16)
        )
    state = state_of(config, "web")
    assert state is not None and STATE.keys() <= state.keys() and not leftovers(state)
    (known,) = sessions(config)
    assert known == describe(config, "web") and known["session"] == "web"
    assert (
        known["state"] == "lost"
        if "state" not in body
        else known["state"] == ("checkpointed" if recorded else "exited")
    )
    assert [record.name for record in Registry(config).all()] == ["web"] * recorded
    (forgotten,) = forget(config, ["web"], dry_run=True)
    assert forgotten.session == "web"


def test_a_root_known_only_by_its_pid_is_no_process(config: Config) -> None:
    folder = Path(config.run_dir) / "holders" / "web"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(STATE | {"pid": 1}))
    state = state_of(config, "web")
    assert state is not None and not leftovers(state)


def test_who_runs_inside_of_a_session_does_so_since_this_boot(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives the numbers of namespaces again: what an earlier boot has left tells
    nothing.
    """
    folder = Path(config.run_dir) / "holders" / "web"
    folder.mkdir(parents=True)
    monkeypatch.setattr("criuctl.session.sessions._namespace", lambda: 4026532999)
    left = STATE | {"state": "running", "pid_namespace": 4026532999, "boot_id": "an earlier one"}
    (folder / "state.json").write_text(json.dumps(left))
    assert secluded(config) is None
    (folder / "state.json").write_text(json.dumps(left | {"boot_id": boot_id()}))
    assert secluded(config) == "web"
