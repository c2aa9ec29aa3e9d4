"""A restored tree is let go of at once: what one of it does to another, or to itself, in that
moment is its own affair.
"""

from __future__ import annotations

import signal
import sys

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

# Ends children of the restored tree's root when all stand before their first instruction: as a
# sibling does that runs already.
KILLS = """
import os, signal, sys
from criuctl.cli.main import program
from criuctl.restore.restoring import Restoring
from criuctl.proc.tree import ProcessIdentity, children
last, spared = Restoring._release, int(sys.argv[1])

def killing(self):
    tracer = last(self)
    for pid in children(self.placed.root.pid)[spared:]:
        os.kill(pid, signal.SIGKILL)
        while ProcessIdentity.of(pid).alive():
            pass
    return tracer

Restoring._release = killing
sys.argv[1:] = sys.argv[5:]
program()
"""


@pytest.mark.parametrize("pids", ["same", "private"])
@pytest.mark.parametrize("spared", [0, 3])
def test_some_are_killed_before_criu_has_let_go_of_them(
    spared: int, pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The others live, and the parent gets to know how those have ended."""
    animal = zoo.launch("siblings.py")
    report = trip.dump(animal)
    criuctl.prefix = [sys.executable, "-c", KILLS, str(spared)]
    answer = criuctl("restore", report["checkpoint"], "--pids", pids)
    criuctl.prefix = []
    restored = zoo.adopt(answer["pid"], animal)
    ended = animal.folder / "ended"
    killed = 5 - spared
    wait_until(
        lambda: ended.exists() and len(ended.read_text().splitlines()) == killed,
        60,
        "the parent has got its SIGCHLD",
    )
    assert {line.split()[1] for line in ended.read_text().splitlines()} == {
        str(int(signal.SIGKILL))
    }
    assert len(restored.identities()) == 1 + spared
    restored.ask()
    assert criuctl("status", report["session"])["state"] == "running"
