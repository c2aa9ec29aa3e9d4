"""Starting a session, where the host is in a bad way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.host.registry import Registry, SessionRecord
from criuctl.ops import new_session
from criuctl.ops.new_session import run
from criuctl.session.launch.daemon import Started


def test_a_session_that_has_started_is_no_failure_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run on, and its name would not have been reported."""

    def full(_registry: Registry, _record: SessionRecord) -> SessionRecord:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        new_session,
        "start_holder",
        lambda _config, spec: Started(spec.name, "0" * 32, 1, "", os.getpid(), 1),
    )
    monkeypatch.setattr(Registry, "put", full)
    started = run(Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run")), ["sleep", "600"])
    assert (started.name, started.pid) == ("sleep", os.getpid())
