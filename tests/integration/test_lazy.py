"""A restore whose pages follow: the tree runs first, and in the end all of its memory is what it
was.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("pids", ["same", "private"])
def test_all_of_its_memory_arrives(pids: str, zoo: Zoo, trip: Trip) -> None:
    """Heap, shared memory, memfd and mapped files, in several processes."""
    animal = zoo.launch("memory.py", "48")
    restored = trip.restore(trip.dump(animal), animal, "--lazy", "--pids", pids)
    assert restored.answer["lazy"] is True
    restored.ask()
    trip.round(restored)  # and it can be dumped like any other


def test_its_terminals_are_its_own_while_pages_follow(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A master whose slaves it closes then sees that: criuctl, which has made them, has none
    left.
    """
    animal = zoo.launch("followed.py")
    report = trip.dump(animal)
    with paused(criuctl, "pages-follow", "restore", report["checkpoint"], "--lazy") as held:
        (restored,) = wait_until(lambda: zoo.find(animal), 60, "it runs")
        restored.ask()
        held.go_on()
        assert held.command.process.wait(60) == 0
    restored.ask()


@pytest.mark.parametrize("pids", ["same", "private"])
def test_a_program_that_changes_its_memory_meanwhile(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, compiled: Path
) -> None:
    """Every page is compared with what it has to be, also in children that it forks."""
    folder = zoo.home / "hostile"
    command = [str(compiled / "hostile"), str(folder), "5", "20000", "48"]
    animal = zoo.launch(command, quiet=False)
    wait_until((folder / "ready").exists, 60, "its memory is filled")
    report = trip.dump(animal)
    (folder / "go").touch()
    answer = criuctl("restore", report["checkpoint"], "--lazy", "--pids", pids)
    assert answer["lazy"] is True
    zoo.adopt(answer["pid"], animal).ask()


def test_killed_while_pages_follow(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Without criuctl the rest of the memory cannot come: the tree ends, the checkpoint is there as
    before.
    """
    animal = zoo.launch("memory.py", "64")
    report = trip.dump(animal)
    with paused(criuctl, "pages-follow", "restore", report["checkpoint"], "--lazy") as held:
        held.command.process.kill()
    found: list[Animal] = []

    def ended() -> bool:
        found.extend(zoo.find(animal))
        return not any(each.alive() for each in found)

    wait_until(ended, 60, "nothing of it runs")
    restored = trip.restore(report, animal)
    restored.ask()


def test_killed_while_a_program_needs_its_pages(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, compiled: Path
) -> None:
    """It ends before it reads zeros in the place of a page, and so do its children."""
    folder = zoo.home / "hostile"
    command = [str(compiled / "hostile"), str(folder), "6", "100000000", "96"]
    animal = zoo.launch(command, quiet=False)
    wait_until((folder / "ready").exists, 60, "its memory is filled")
    report = trip.dump(animal)
    (folder / "go").touch()
    with paused(criuctl, "pages-follow", "restore", report["checkpoint"], "--lazy") as held:
        held.command.process.kill()
        held.command.process.wait(60)

    def ended() -> bool:
        return not any(
            name.isdigit() and str(folder) in oracle.read(f"/proc/{name}/cmdline")
            for name in os.listdir("/proc")
        )

    wait_until(ended, 60, "nothing of it runs")
    assert animal.output() == ""
