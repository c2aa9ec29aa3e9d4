"""Memory stored while the tree runs: the frozen pass finds it, and what comes back is of the moment
of the freeze.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support import oracle
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _by_itself(criuctl: Criuctl) -> None:
    """The rounds of pre-copy, without those of the tracking of writes."""
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "0"


def while_frozen(report: dict[str, Any]) -> int:
    """Bytes that were new to the store only when the tree was frozen."""
    return int(report["bytes"]["new"]) - sum(int(r["new"]) for r in report["precopy"])


def test_of_a_quiet_tree_nothing_is_left_to_store(zoo: Zoo, trip: Trip) -> None:
    """Heap, forked and shared memory, memfds, private file mappings, guards: cut just as CRIU sends
    them.
    """
    animal = zoo.launch("memory.py", "32")
    shared_before = oracle.read(f"/proc/{animal.pid}/smaps_rollup")
    report = trip.snapshot(animal, "--pre-copy")
    first, *others = report["precopy"]
    assert first["round"] == 1
    assert first["new"] > 32 * MIB
    # what the child shares with its parent is read once
    assert first["read"] < report["bytes"]["memory"] - 30 * MIB
    assert [r for r in others if r["new"] > MIB] == []
    assert while_frozen(report) < 2 * MIB  # CRIU's images, with a deleted file of one MiB
    assert report["bytes"]["unused"] < MIB
    # Forked memory is shared as before: reading it has copied nothing.
    assert (
        abs(shared(oracle.read(f"/proc/{animal.pid}/smaps_rollup")) - shared(shared_before))
        < 4 * MIB
    )
    # The same chunks as without pre-copy.
    plain = trip.snapshot(animal)
    assert "precopy" not in plain
    assert plain["bytes"]["new"] < MIB
    ended = trip.dump(animal, "--pre-copy")
    restored = trip.restore(ended, animal)
    restored.ask()


def shared(rollup: str) -> int:
    """Bytes of private memory that several processes share."""
    found = [
        int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Shared_Dirty:")
    ]
    return found[0] * 1024


def test_of_a_tree_that_writes_only_what_it_writes_is_stored_again(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("rewriter.py", quiet=False)
    report = trip.dump(animal, "--pre-copy")
    assert report["precopy"][0]["new"] > 30 * MIB
    assert while_frozen(report) < 8 * MIB
    restored = trip.restore(report, animal, equal=False)
    turns = restored.ask()["turns"]
    assert wait_until(lambda: restored.ask()["turns"] > turns, 60, "it writes on")


@pytest.mark.parametrize("way", [(), ("--lazy",)], ids=["at-once", "lazy"])
def test_of_a_tree_that_writes_single_pages_all_over_only_pages_are_stored_again(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, way: tuple[str, ...]
) -> None:
    animal = zoo.launch("rewriter.py", "31", quiet=False)  # two pages of each window
    report = trip.dump(animal, "--pre-copy")
    assert report["precopy"][0]["new"] > 30 * MIB
    # a MiB of pages, 8 MiB of windows that are stored whole first, CRIU's images
    assert while_frozen(report) < 12 * MIB
    assert criuctl("show", report["checkpoint"])["features"] == ["layers"]
    criuctl("verify", report["checkpoint"])
    restored = trip.restore(report, animal, *way, equal=False)
    turns = restored.ask()["turns"]
    assert wait_until(lambda: restored.ask()["turns"] > turns, 60, "it writes on")


def test_a_process_that_ends_between_rounds_is_not_missed(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal = zoo.launch("memory.py", "4")
    (child,) = oracle.tree(animal.pid)[1:]
    with paused(criuctl, "precopy", "dump", animal.pid, "--leave-running", "--pre-copy") as held:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: oracle.stat_of(child)[:1] in ([], ["Z"]), 60, "the child has ended")
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    report = held.command.json()
    assert animal.alive()
    assert report["bytes"]["unused"] > 0  # what the child alone had


def test_given_up_between_rounds_nothing_has_happened(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("memory.py", "4")
    with paused(criuctl, "precopy", "dump", animal.pid, "--pre-copy") as held:
        assert list((criuctl.store / "packs").rglob("*"))
        held.kill(signal.SIGINT)
        held.go_on()
        assert held.command.process.wait(120) == 130
    animal.ask()
    assert [path for path in (criuctl.store / "packs").rglob("*") if path.is_file()] == []
    assert criuctl("list") == []


def test_a_tree_that_ends_during_pre_copy_is_reported(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("memory.py", "4")
    with paused(criuctl, "precopy", "dump", animal.pid, "--leave-running", "--pre-copy") as held:
        animal.end()
        held.go_on()
        assert held.command.process.wait(120) != 0
    report = held.command.json()
    assert report["error"]["code"] in {"no-such-process", "dump-failed"}, report
    assert criuctl("list") == []
