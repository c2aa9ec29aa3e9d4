"""The report that a restored tree finds of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from criuctl import inside
from criuctl.config import Config
from criuctl.host import inside_report
from criuctl.report import Reporter


def test_two_restores_make_the_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has not seen the folder yet, and comes too late to make it, goes on."""
    monkeypatch.setattr(Path, "exists", lambda _path, **_options: False)
    reporter = Reporter()
    config = Config().with_options(run_dir=str(tmp_path / "run"))
    for name in ("one", "other"):
        inside_report.publish(config, os.getpid(), {"session": name}, [], reporter)
    assert reporter.warnings == []
    (file,) = (path for path in (tmp_path / "run").rglob("*.json"))
    assert json.loads(file.read_text())["session"] == "other"
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_nothing_is_believed_that_anybody_could_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.delenv("CRIUCTL_RUN_DIR", raising=False)
    monkeypatch.setattr(inside, "_read", lambda path: asked.append(Path(path)))
    assert inside.report() is None
    assert {path.parents[1] for path in asked} == {Path("/run/criuctl")}
