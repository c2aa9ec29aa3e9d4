"""criuctl is killed while it restores a copy: no copy is called checkpointed that never ran."""

from __future__ import annotations

import pytest
from support.command import Criuctl
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
