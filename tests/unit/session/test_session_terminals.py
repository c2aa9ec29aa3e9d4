"""Terminals are made by one criuctl of a host at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from criuctl.proc import locks
from criuctl.session import terminal


def test_one_at_a_time_with_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "terminals"
    monkeypatch.setattr(terminal, "_MAKING", path)
    monkeypatch.setattr(terminal, "_PATIENCE", 0.1)
    with terminal.making():
        with pytest.raises(BlockingIOError), locks.held(path):
            pass
        with terminal.making():
            assert path.exists()
        assert path.exists()
    assert not path.exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr(terminal, "_MAKING", tmp_path / "file" / "terminals")
    monkeypatch.setattr(terminal, "_PATIENCE", 600.0)
    with terminal.making():  # as a plain user, who may have no such lock
        pass
