"""The process that brings a session's memory: the process that reports arrived pages never waits
for it.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.restore import page_feeder
from criuctl.restore.page_feeder import Feeder


def test_a_feeder_that_hangs_blocks_no_caller(tmp_path: Path) -> None:
    feeder = Feeder(Config(store=str(tmp_path)), 0)
    try:
        feeder._child.signal(signal.SIGSTOP)
        for _ in range(20_000):  # far more than the socket takes
            feeder.arrived("packs/00/" + "0" * 32, 1 << 20)
        feeder.arrived("config", 10)
    finally:
        feeder._child.kill()
        feeder.close(failed=True)


def test_a_feeder_that_hangs_is_found_when_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is frozen at its home meanwhile."""
    monkeypatch.setattr(page_feeder, "_PATIENCE", 1.0)
    feeder = Feeder(Config(store=str(tmp_path)), 0)
    failed: list[Exception] = []

    def bring() -> None:
        manifest: Any = SimpleNamespace(id="c" * 32)
        feeder.load(manifest, folder)
        try:
            feeder.expect("listen", 1.0)
        except Exception as error:
            failed.append(error)

    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        feeder._child.signal(signal.SIGSTOP)
        for _ in range(20_000):
            feeder.arrived("packs/00/" + "0" * 32, 1 << 20)
        bringing = threading.Thread(target=bring, daemon=True)
        bringing.start()
        bringing.join(30)
        assert not bringing.is_alive()
        assert ["memory cannot follow" in str(error) for error in failed] == [True]
    finally:
        feeder._child.kill()
        feeder.close(failed=True)
        os.close(folder)
