"""`criuctl.inside.reseed`, `on_copy` and `generation`, in this process."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from criuctl import inside


def test_reseed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both global generators, the second one only if the program has loaded it."""
    state = random.getstate()
    try:
        random.seed(7)
        before = random.getstate()
        monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
        inside.reseed()
        assert random.getstate() != before
        seeds: list[tuple[object, ...]] = []
        numpy = ModuleType("numpy.random")
        numpy.seed = lambda *given: seeds.append(given)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "numpy.random", numpy)
        inside.reseed()
        assert seeds == [()]
    finally:
        random.setstate(state)


def test_on_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function once for each kind of restore, new seeds first."""
    monkeypatch.setattr(inside, "_functions", {})
    monkeypatch.delenv("CRIUCTL_SESSION_DIR", raising=False)
    inside.on_copy()
    calls: list[None] = []

    def function() -> None:
        calls.append(None)

    for _ in range(2):
        assert inside.on_copy(function) is function
    expected = [inside.reseed, function]
    assert inside._functions == {"after-restore": expected, "after-fork": expected}


def test_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRIUCTL_SESSION_DIR", str(tmp_path))
    assert inside.generation() == ""
    (tmp_path / "generation").write_text("0f 1\n")
    assert inside.generation() == "0f"
