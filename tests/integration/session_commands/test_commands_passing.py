"""A session that CRIU refuses for the moment: until the next try it is a session as any other."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support import oracle
from support.hooking import HookFolder
from support.keeper import start_time, wait_until
from support.operating import Operators
from support.pauses import paused
from support.zoo import PROGRAMS

pytestmark = pytest.mark.integration


def test_a_session_between_two_tries(operators: Operators) -> None:
    """Its holder has let go of it: it is paused, and goes on."""
    folder = operators.home.path / "corked"
    folder.mkdir()
    operators(
        "run", "-d", "--name", "work", "--", sys.executable, "-S", PROGRAMS / "corked.py", folder
    )
    wait_until((folder / "ready").exists, 60, "it is ready")
    root: int = operators("status", "work")["pid"]
    child = max(oracle.tree(root)[1:], key=lambda pid: (start_time(pid), pid))
    cork = f"kill -USR2 {child}; until [ -e {folder}/corked ]; do sleep 0.01; done"
    HookFolder(operators.home.path / "hooks").sh("pre-dump", "cork", cork)
    with paused(operators, "thawed", "dump", "work") as held:
        operators("pause", "work")
        operators("resume", "work")
        os.kill(child, signal.SIGUSR2)
        wait_until(lambda: not (folder / "corked").exists(), 60, "nothing is corked")
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    restored: int = operators("restore", "work")["pid"]
    os.kill(restored, signal.SIGUSR1)
    report = wait_until(lambda: oracle.read(str(folder / "report-1.json")), 60, "it answers")
    assert '"ok": true' in report
