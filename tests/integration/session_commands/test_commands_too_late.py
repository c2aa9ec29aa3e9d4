"""Sessions that end by themselves just when they are dumped: nothing is lost, and no dump has
failed.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.pauses import paused

from criuctl.proc.tree import ProcessIdentity

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("step", ["preflight", "freeze"])
@pytest.mark.parametrize("where", [(), ("--host-pids",)], ids=["private", "host"])
def test_it_is_reported_as_ended(step: str, where: tuple[str, ...], operators: Operators) -> None:
    """It may take CRIU along, which is a guest in its PID namespace."""
    operators("run", "-d", "--name", "work", *where, "--", "sleep", "1000")
    root = ProcessIdentity.of(operators("status", "work")["pid"])
    with paused(operators, step, "dump", "work") as held:
        os.kill(root.pid, signal.SIGKILL)
        wait_until(lambda: not root.exists(), TIMEOUT, "it has ended")
        held.go_on()
        assert held.command.process.wait(TIMEOUT) == 3, held.command.output()
        assert f"PID {root.pid}" in held.command.output()
    assert operators("status", "work")["state"] == "exited"


@pytest.mark.parametrize("verb", ["snapshot", "dump"])
def test_a_session_cannot_be_dumped_by_one_of_its_own(verb: str, operators: Operators) -> None:
    """It would stand still, and no process could let it go on."""
    ask = f"{sys.executable} -m criuctl {verb} work; echo code=$?; exec sleep 1000"
    operators("run", "-d", "--name", "work", "--host-pids", "--", "sh", "-c", ask)
    operators("wait", "work", "--since", "0", "--match", "code=4", "--timeout", str(TIMEOUT))
    assert operators("status", "work")["state"] == "running"
