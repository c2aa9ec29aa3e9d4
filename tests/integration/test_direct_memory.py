"""Memory that is put straight into restored processes, and the time that this takes, which their
timers do not see.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.command import Criuctl
from support.hooking import HookFolder
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("pids", ["same", "private"])
def test_there_and_back(pids: str, zoo: Zoo, trip: Trip) -> None:
    """Next to memory that goes another way: read-only, locked, shared with a child since a fork."""
    animal = zoo.launch("patches.py")
    for _ in range(3):
        animal = trip.restore(trip.dump(animal), animal, "--pids", pids)
        animal.ask()
        animal.ask()


@pytest.mark.parametrize("pids", ["same", "private"])
def test_what_forked_workers_share_stays_shared(pids: str, zoo: Zoo, trip: Trip) -> None:
    """And what is their own goes straight into them."""
    animal = zoo.launch("pool.py")
    for _ in range(3):
        report = trip.dump(animal)
        animal = trip.restore(report, animal, "--pids", pids)
        animal.ask()


def test_timers_stand_still_while_a_tree_is_put_together(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    HookFolder(criuctl.home.path / "hooks").sh("post-restore", "slow", "sleep 4")
    animal = zoo.launch("timers.py")
    before, asked = animal.ask(), time.monotonic()
    report = trip.dump(animal)
    ran = time.monotonic() - asked  # at most, before it was frozen
    animal = trip.restore(report, animal)
    resumed = time.monotonic()
    after = animal.ask()
    ran += time.monotonic() - resumed
    names = {"relative", "periodic", "absolute", "absolute, real time"}
    assert names <= set(before)
    for name in names:
        assert before[name] - ran - 1 < after[name] < before[name], (name, before, after, ran)


def test_a_process_that_ends_before_its_memory_is_there(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A clean failure, and the checkpoint can still be restored."""
    animal = zoo.launch("patches.py")
    report = trip.dump(animal)
    with paused(criuctl, "memory", "restore", report["checkpoint"], "--pids", "same") as held:
        os.kill(animal.pid, signal.SIGKILL)
        held.go_on()
        assert held.command.process.wait(60) == 6, held.command.output()
        held.wait_settled()
    wait_until(lambda: not os.path.exists(f"/proc/{animal.pid}"), 60, "nothing of it is left")
    trip.restore(report, animal, "--pids", "same").ask()
