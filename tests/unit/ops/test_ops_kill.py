"""Ending what is left of a session whose holder is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.config import Config
from criuctl.errors import Conflict, PlatformError, SessionGone
from criuctl.host.registry import Registry, SessionRecord, boot_id, exclusive_session
from criuctl.ops.forget import forget
from criuctl.ops.kill import kill
from criuctl.proc import netfilter
from criuctl.proc.tree import ProcessIdentity

KILL = """
import json, sys
from criuctl.config import Config
from criuctl.ops.kill import kill
print(json.dumps(kill(Config(run_dir=sys.argv[1], state_dir=sys.argv[2]), "web", 0)))
"""


def test_kill_releases_a_checkpointed_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forget` says that kill does it, also of a tree that never had a terminal; nothing stays
    locked for its sake.
    """
    gone: list[str] = []

    def delete(table: str) -> None:
        with pytest.raises(Conflict, match="in use"), exclusive_session(config, "web"):
            """It cannot be brought back while it is forgotten."""
        gone.append(table)
        # a criuctl that is killed here leaves a host that knows the session
        assert registry.get("web") is not None
        if len(gone) == 1:
            raise PlatformError("the firewall is in the way")

    monkeypatch.setattr(netfilter, "delete_table", delete)
    config = Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
    registry = Registry(config)
    lies = SessionRecord(
        "web",
        state="checkpointed",
        checkpoint="1",
        boot_id=boot_id(),
        lock_table="CRIU-web",
        lock_kept=True,
    )
    registry.put(lies)
    registry.put(replace(lies, name="moved", moved_to="ssh://there", home="there"))
    (kept,) = forget(config, ["web"])
    assert isinstance(kept.error, Conflict) and "criuctl kill web" in kept.error.hint
    # it is just being brought back
    with exclusive_session(config, "web"), pytest.raises(Conflict, match="in use"):
        kill(config, "web", 0)
    with pytest.raises(PlatformError):
        kill(config, "web", 0)
    assert kill(config, "web", 0) == {
        "session": "web",
        "state": "exited",
        "killed": 0,
        "leases_kept": [],
    }
    assert (registry.get("web"), gone) == (None, ["CRIU-web", "CRIU-web"])
    with pytest.raises(SessionGone, match="moved to there"):
        kill(config, "moved", 0)


def test_who_outlives_holder_and_root_is_ended(tmp_path: Path) -> None:
    """`forget` says that kill does it."""
    config = Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
    group, folder = tmp_path / "group", tmp_path / "run" / "holders" / "web"
    with subprocess.Popen(["sleep", "600"]) as stray:
        for path in (group, folder, tmp_path / "state"):
            path.mkdir(parents=True)
        (group / "cgroup.freeze").write_text("0")
        (group / "cgroup.procs").write_text(f"{stray.pid}\n")
        gone = {"pid": 1, "start_time": 0}  # no process: PID 1 has another start time
        body = {
            "session": "web",
            "id": "0" * 32,
            "state": "running",
            "incarnation": 1,
            "exit_code": None,
            "since": 1.0,
        }
        body |= {
            "command": [],
            "labels": {},
            "cgroup": str(group),
            "boot_id": boot_id(),
            "holder": gone,
            **gone,
        }
        (folder / "state.json").write_text(json.dumps(body))
        try:
            (kept,) = forget(config, ["web"])
            assert isinstance(kept.error, Conflict) and "criuctl kill web" in kept.error.hint
            words = [sys.executable, "-c", KILL, config.run_dir, config.state_dir]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["killed"] == 1
            assert not ProcessIdentity.of(stray.pid).alive()
        finally:
            stray.kill()
