"""Which sessions a host may forget, without a holder or a store."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.errors import Conflict, InvalidName
from criuctl.host.holders import end_holder
from criuctl.host.registry import Registry, SessionRecord, boot_id, exclusive_session
from criuctl.ops.forget import forget
from criuctl.proc.tree import ProcessIdentity

ME = ProcessIdentity.of(os.getpid())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))


def test_what_can_come_back_goes_only_by_name(config: Config) -> None:
    registry = Registry(config)
    registry.put(SessionRecord("bare", boot_id="another", pid=7))
    # `criuctl recover` wants it
    registry.put(SessionRecord("rebooted", boot_id="another", pid=7, checkpoint="1", store="/s"))
    registry.put(
        SessionRecord(
            "moved", state="checkpointed", checkpoint="1", moved_to="ssh://there", home="there"
        )
    )
    registry.put(SessionRecord("stored", state="checkpointed", checkpoint="1"))
    registry.put(SessionRecord("here", boot_id=boot_id(), pid=ME.pid, start_time=ME.start_time))
    assert [one.session for one in forget(config, [], older=0, dry_run=True)] == ["bare"]
    assert [one.session for one in forget(config, [], older=0)] == ["bare"]
    done = {
        one.session: one.error
        for one in forget(config, ["rebooted", "moved", "stored", "here", "here"])
    }
    assert [name for name, error in done.items() if error is None] == ["rebooted", "moved"]
    assert isinstance(done["stored"], Conflict) and "criuctl restore stored" in str(
        done["stored"].hint
    )
    assert isinstance(done["here"], Conflict) and "criuctl kill here" in str(done["here"].hint)
    assert [record.name for record in registry.all()] == ["here", "stored"]
    with pytest.raises(InvalidName):
        forget(config, ["../here"])


def test_processes_without_their_holder_are_not_forgotten(config: Config) -> None:
    folder = Path(config.run_dir) / "holders" / "web"
    folder.mkdir(parents=True)
    state = {
        "session": "web",
        "id": "1",
        "state": "running",
        "incarnation": 1,
        "boot_id": boot_id(),
        "labels": {},
        "command": [],
    }
    state |= {
        "pid": ME.pid,
        "start_time": ME.start_time,
        "exit_code": None,
        "since": 1.0,
        "holder": {"pid": 1, "start_time": 1},
    }
    (folder / "state.json").write_text(json.dumps(state))
    (one,) = forget(config, ["web"])
    assert (
        one.state == "lost" and isinstance(one.error, Conflict) and str(ME.pid) in one.error.message
    )
    assert forget(config, [], older=0) == []
    (folder / "state.json").write_text(json.dumps(state | {"pid": None}))
    assert forget(config, ["web"], older=3600 * 24 * 365 * 200) == []  # not that long ago
    with exclusive_session(config, "web"):
        assert isinstance(forget(config, ["web"])[0].error, Conflict)
    assert forget(config, [], older=0)[0].session == "web" and not folder.exists()


def test_a_holder_that_just_ends_by_itself_does_not_prevent_forget(config: Config) -> None:
    """It keeps an exit status until that is collected, which may be now."""
    with subprocess.Popen(["sleep", "0.2"]) as ends:
        identity = ProcessIdentity.of(ends.pid)
        threading.Thread(target=ends.wait).start()
        end_holder(
            config, "web", {"holder": {"pid": identity.pid, "start_time": identity.start_time}}
        )
        assert not identity.alive()
