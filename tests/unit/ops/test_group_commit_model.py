"""The design of group checkpoints across hosts, as a model: a thousand courses of events."""

from __future__ import annotations

import os
from collections import Counter

from support.group_commit import faults, run

SEEDS = int(os.environ.get("CRIUCTL_GROUP_SEEDS") or 1000)


def test_no_course_of_events_leaves_half_a_group() -> None:
    """Whatever is lost, late, cut off or dead: all that live decide alike, and none waits."""
    ends: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = run(seed)
        assert not faults(world), (seed, faults(world))
        alive = world.coordinator
        ends[f"{world.store.decision or 'none'}, coordinator {'lives' if alive else 'died'}"] += 1
    # each of these has been seen, or the model would show nothing
    assert all(ends[f"{word}, coordinator died"] for word in ("commit", "abort"))
    assert ends["commit, coordinator lives"]


def test_without_harm_it_is_committed() -> None:
    done = [run(seed, harmless=True).store.decision for seed in range(200)]
    assert done.count("commit") > 100


def test_the_model_finds_the_fault_of_a_plain_time_out() -> None:
    """A member that gives up by itself, though it has voted, contradicts the others."""
    found = {fault for seed in range(300) for fault in faults(run(seed, naive=True))}
    assert "one member was ended with the group and another one runs on" in found
