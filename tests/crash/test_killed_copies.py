"""criuctl is killed while it restores a copy: no copy is called checkpointed that never ran."""

from __future__ import annotations

import pytest
from support.asking import Asked
from support.command import Criuctl
from support.keeper import wait_until
from support.operating import TIMEOUT
from support.pauses import paused, steps_of
from support.trip import Trip
from support.zoo import Zoo

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def test_a_killed_copy_is_not_called_checkpointed(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Its record is made before CRIU locks the connections; it has no checkpoint of its own.  It is
    lost if its processes were recorded already and have ended with CRIU.
    """
    animal = zoo.launch("sockets.py")
    checkpoint = trip.dump(animal)["checkpoint"]
    words = ("restore", checkpoint, "--as", "copy", "--pids", "private")
    steps = steps_of(criuctl, *words)
    criuctl("kill", "copy", "--timeout", 0)
    states = {}
    for step in steps[steps.index("claim") :]:
        with paused(criuctl, step, *words) as held:
            held.kill()
        held.wait_settled(restoring=animal)
        listed = {row["session"]: row["state"] for row in criuctl("ls")}
        states[step] = listed.get("copy", "gone")
        for running in zoo.find(animal):
            running.end()
        criuctl("ls")  # as any command does
    assert set(states.values()) <= {"gone", "lost", "running"}, states
    assert states["restore"] == "gone"
    assert states[steps[-1]] == "running"
    assert criuctl(*words)["session"] == "copy"
    criuctl("kill", "copy", "--timeout", 0)


def test_the_copy_of_a_session_with_a_terminal(asked: Asked) -> None:
    """Its holder has been started by then, and ends: the copy is lost, not checkpointed."""
    asked.begin("work")
    asked("dump", "work")
    words = ("restore", "work", "--as", "copy")
    steps = steps_of(asked, *words)
    asked("kill", "copy", "--timeout", 0)
    asked("forget", "copy")
    states = {}
    for step in steps[steps.index("claim") :]:
        with paused(asked, step, *words) as held:
            held.kill()
            held.command.process.wait(TIMEOUT)

        def state() -> str:
            states_now = {row["session"]: str(row["state"]) for row in asked("ls")}
            return states_now.get("copy", "gone")

        wait_until(lambda state=state: state() != "checkpointed", TIMEOUT, f"settled after {step}")
        states[step] = state()
        asked("kill", "copy", "--timeout", 0, check=False)
        asked("forget", "copy", check=False)
    assert states["restore"] == "lost", states
    assert states[steps[-1]] == "running", states
