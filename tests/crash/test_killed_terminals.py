"""criuctl is killed while a restore makes terminals that were inside the tree, or gives them to the
leaders of sessions.
"""

from __future__ import annotations

import signal
import sys

import pytest
from support.aftermath import Aftermath
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused, steps_of
from support.trip import Trip
from support.zoo import Zoo

from criuctl.proc import locks
from criuctl.session import terminal

pytestmark = [pytest.mark.crash, pytest.mark.slow]

# Is killed before or after that method does its work for the second time: some are made then, and
# others not.
DIES = """
import os, signal, sys
from criuctl.cli.main import program
from criuctl.restore.early_tasks import EarlyTasks
from criuctl.terminals.restored import RestoredTerminals
from criuctl.proc import inject
from criuctl.session.terminal import Pty
when, name, times = sys.argv[1], sys.argv[2], []
owner = {
    "call": inject, "open_slave": Pty, "made": RestoredTerminals,
    "_act": EarlyTasks, "_let_all_go": EarlyTasks,
}[name]
method = getattr(owner, name)

def dying(*arguments):
    times.append(name)
    last = len(times) == (1 if name in ("made", "_let_all_go") else 2)
    if last and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = method(*arguments)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(owner, name, dying)
sys.argv[1:] = sys.argv[6:]
program()
"""


def _free() -> bool:
    """Whether the lock under which terminals are made is free."""
    try:
        with locks.held(terminal._MAKING):
            return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize("how", ["ends", "left running"])
def test_kill_9_of_a_dump_while_something_is_printed(
    how: str, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """Output that was not read is there again, and both ends block; CRIU itself restores that only
    when the dump succeeds.
    """
    options = ["--leave-running"] if how == "left running" else []
    first = zoo.launch("chatter.py", name="first")
    steps = steps_of(criuctl, "dump", first.pid, *options)
    first.end()
    for step in steps[steps.index("frozen") : steps.index("commit")]:
        animal = zoo.launch("chatter.py", name=f"dump-{step}".replace("#", "-"))
        with paused(
            criuctl, step, "dump", animal.pid, "--name", animal.folder.name, *options
        ) as held:
            held.kill()
        held.wait_settled(animal)
        animal.ask()
        animal.end()


@pytest.mark.parametrize("pids", ["same", "private"])
def test_kill_9_at_every_step_from_when_terminals_are_made(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    animal = zoo.launch("followed.py")
    checkpoint = trip.dump(animal)["checkpoint"]
    steps = steps_of(criuctl, "restore", checkpoint, "--pids", pids)
    for running in zoo.find(animal):
        running.end()
    for step in steps[steps.index("restore") :]:
        with paused(criuctl, step, "restore", checkpoint, "--pids", pids) as held:
            held.kill()
        held.wait_settled(restoring=animal)
        wait_until(_free, 30, f"the lock is free after {step}")
        aftermath.of_restore(animal, checkpoint)
        for running in zoo.animals:
            running.end()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["open_slave", "_act", "call", "_let_all_go", "made"])
def test_kill_9_between_steps(
    what: str, when: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """Who was traced, or ran a system call of criuctl's just then, goes with CRIU."""
    animal = zoo.launch("followed.py")
    checkpoint = trip.dump(animal)["checkpoint"]
    criuctl.prefix = [sys.executable, "-c", DIES, when, what]
    assert criuctl("restore", checkpoint, check=False)["exit_code"] == -signal.SIGKILL
    criuctl.prefix = []
    wait_until(_free, 30, "the lock is free")
    wait_until(lambda: not zoo.find(animal), 60, "nothing of it is left")
    assert aftermath.of_restore(animal, checkpoint) == "nothing"
