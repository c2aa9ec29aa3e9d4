"""What is reported about interrupted moves whose other host cannot be reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.cli.commands.migrate import _resolved
from criuctl.config import Config
from criuctl.host.moves import Moves, Outgoing, new_id
from criuctl.host.registry import boot_id, exclusive_session
from criuctl.ops import migrate_resolve
from criuctl.ops.migrate_resolve import resolve
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter


def test_one_that_another_criuctl_works_on_is_not_reported_as_ended(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    Moves(config, Outgoing).put(Outgoing(new_id(), "web", new_id(), to="ssh://gamma.example"))
    with exclusive_session(config, "web"):
        (answer,) = resolve(config, "web", reporter=Reporter())
    assert answer["outcome"] == "busy" and "in use" in answer["error"]
    assert "ended" not in _resolved(answer)


def test_a_tree_that_is_just_ending_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed, and freeing much memory takes time: the other host must not be asked to undo
    its restore.
    """
    me = ProcessIdentity.of(os.getpid())
    config = Config(state_dir=str(tmp_path))
    move = Outgoing(
        new_id(), "web", new_id(), to="ssh://gamma.example", state="handed-over", boot_id=boot_id()
    )
    Moves(config, Outgoing).put(replace(move, tree=((me.pid, me.start_time),)))
    monkeypatch.setattr(migrate_resolve, "SETTLE", 0.2)
    monkeypatch.setattr(ProcessIdentity, "doomed", lambda _identity: True)
    (answer,) = resolve(config, "web", reporter=Reporter())
    assert answer["outcome"] == "busy" and "was killed and does not end" in answer["error"]
