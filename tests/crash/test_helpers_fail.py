"""A helper program of criuctl's fails or is killed: the operation has failed, and that is no
bug.
"""

from __future__ import annotations

import signal
import sys

import pytest
from support import leaks
from support.aftermath import Aftermath
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.crash

# The guard of the terminals is killed when it is asked for the n-th time.
GUARDLESS = """
import os, signal, sys
from criuctl.cli.main import program
from criuctl.session.terminal import Guard
ask, left = Guard._ask, int(sys.argv[1])

def killing(self, word):
    global left
    left -= 1
    if not left:
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.wait()
    return ask(self, word)

Guard._ask = killing
sys.argv[1:] = sys.argv[5:]
program()
"""


@pytest.mark.parametrize("nth", ["1", "2"], ids=["before the freeze", "frozen"])
def test_the_guard_of_the_terminals_is_killed(
    nth: str, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    animal = zoo.launch("masters.py")
    animal.remember()
    criuctl.prefix = [sys.executable, "-c", GUARDLESS, nth]
    answer = criuctl("dump", animal.pid, "--name", animal.folder.name, check=False)
    criuctl.prefix = []
    assert answer["exit_code"] == 5, answer
    assert "the tree runs on" in answer["error"]["message"]
    assert aftermath.of_dump(animal) == "alive"


def test_the_program_that_locks_connections_is_killed(
    zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    animal = zoo.launch("sockets.py")
    report = trip.dump(animal)
    before = leaks.nft_tables()
    folder = zoo.home / "programs"
    folder.mkdir()
    (folder / "nft").write_text("#!/bin/sh\nkill -9 $$\n")
    (folder / "nft").chmod(0o700)
    path = {"PATH": f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    answer = criuctl("restore", report["checkpoint"], check=False, env=path)
    assert answer["exit_code"] == 6, answer
    assert (
        f"ended by signal {int(signal.SIGKILL)}; nothing is left of it"
        in answer["error"]["message"]
    )
    assert zoo.find(animal) == []
    wait_until(lambda: leaks.nft_tables() <= before, 60, "no lock on connections stays")
    trip.restore(report, animal, equal=False).ask()
