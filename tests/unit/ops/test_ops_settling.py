"""What is told of interrupted moves that nobody could look at."""

from __future__ import annotations

from pathlib import Path

from criuctl.cli.commands.migrate import _resolved
from criuctl.config import Config
from criuctl.ops.moves import Moves, Outgoing, new_id
from criuctl.ops.registry import exclusive_session
from criuctl.ops.settling import resolve
from criuctl.report import Reporter


def test_one_that_another_criuctl_works_on_is_not_told_as_ended(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    Moves(config, Outgoing).put(Outgoing(new_id(), "web", new_id(), to="ssh://gamma.example"))
    with exclusive_session(config, "web"):
        (answer,) = resolve(config, "web", reporter=Reporter())
    assert answer["outcome"] == "busy" and "in use" in answer["error"]
    assert "ended" not in _resolved(answer)
