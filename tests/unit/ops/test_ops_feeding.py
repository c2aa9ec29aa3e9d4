"""The process that brings a session's memory: whoever tells it what has come never waits for it."""

from __future__ import annotations

import signal
from pathlib import Path

from criuctl.config import Config
from criuctl.ops.feeding import Feeder


def test_a_feeder_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    feeder = Feeder(Config(store=str(tmp_path)), 0)
    try:
        feeder._child.signal(signal.SIGSTOP)
        for _ in range(20_000):  # far more than the socket takes
            feeder.arrived("packs/00/" + "0" * 32, 1 << 20)
        feeder.arrived("config", 10)
    finally:
        feeder._child.kill()
        feeder.close(failed=True)
