"""Times, sizes and choices that make no sense are refused by the operation, whatever the door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.errors import UsageError
from criuctl.ops import commands, kill, new_session, output
from criuctl.ops.commands import Limits

CALLS: list[Callable[[Config], Any]] = [
    lambda c: Limits(timeout=-1),
    lambda c: Limits(silence=-0.1),
    lambda c: Limits(timeout=float("nan")),
    lambda c: Limits(action="Kill"),
    lambda c: commands.kill(c, "work", "c1", -1),
    lambda c: kill.kill(c, "work", -1),
    lambda c: output.wait_exit(c, "work", -1),
    lambda c: output.wait_idle(c, "work", -1, None),
    lambda c: output.wait_idle(c, "work", 1, float("inf")),
    lambda c: output.wait_match(c, "work", "x", None, -1),
    lambda c: output.wait_prompt(c, "work", None, -1),
    lambda c: output.wait_reading(c, "work", -1),
    lambda c: new_session.run(c, ["true"], size=(0, 0)),
    lambda c: new_session.run(c, ["true"], size=(24, -1)),
    lambda c: new_session.run(c, ["true"], size=(24, 70000)),
]


@pytest.mark.parametrize("call", CALLS)
def test_it_is_refused(call: Callable[[Config], Any], tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
    with pytest.raises(UsageError):
        call(config)
    assert not (tmp_path / "run").exists()  # the event log alone says that it was tried
