"""What a dump makes ready before the tree stands still, and what it writes down at its end."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.criu import schema
from criuctl.ops import dump
from criuctl.ops.registry import Registry, SessionRecord
from criuctl.proc.tree import ProcessIdentity


def test_what_is_needed_in_frozen_time_is_loaded_before() -> None:
    schema._module.cache_clear()
    dump._load_libraries()  # nobody hears of what goes wrong there
    assert schema._module.cache_info().currsize


@pytest.mark.parametrize(("doomed", "state"), [(True, "checkpointed"), (False, "running")])
def test_a_tree_that_takes_its_time_to_end_is_checkpointed(
    doomed: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told as running it would be lost as soon as it is gone."""
    me = ProcessIdentity.of(os.getpid())
    registry = Registry(Config(state_dir=str(tmp_path)))
    work: Any = SimpleNamespace(session=SessionRecord("web"), where="/store", stays_locked=False, leave_running=False)
    work.tree = [SimpleNamespace(identity=me, pid=me.pid, start_time=me.start_time)]
    monkeypatch.setattr(ProcessIdentity, "doomed", lambda _identity: doomed)
    manifest: Any = SimpleNamespace(id="c" * 32)
    dump._remember(registry, work, manifest)
    assert [(record.state, record.checkpoint) for record in registry.all()] == [(state, "c" * 32)]
