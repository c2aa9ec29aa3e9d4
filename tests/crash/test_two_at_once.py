"""Two criuctl at once: one does it, the other gets an error that names the first."""

from __future__ import annotations

import pytest
from support.command import Criuctl
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("step", ["preflight", "frozen", "commit"])
def test_two_dumps_of_one_tree(step: str, zoo: Zoo, criuctl: Criuctl, trip: Trip) -> None:
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    with paused(criuctl, step, "dump", animal.pid, "--name", "one") as held:
        second = criuctl("dump", animal.pid, "--name", "two", check=False, timeout=120)
        assert second["exit_code"] == 9
        assert str(animal.pid) in second["error"]["message"]
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    assert [row["session"] for row in criuctl("list")] == ["one"]
    trip.restore(held.command.json(), animal, equal=False).ask()


def test_two_restores_of_one_session(zoo: Zoo, criuctl: Criuctl, trip: Trip) -> None:
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal)
    with paused(criuctl, "post-restore", "restore", report["checkpoint"]) as held:
        assert criuctl("restore", report["checkpoint"], check=False, timeout=120)["exit_code"] == 9
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"] == 9
    restored = zoo.adopt(held.command.json()["pid"], animal)
    assert animal.differences(restored) == []
    restored.ask()


def test_many_different_trees_at_once(zoo: Zoo, criuctl: Criuctl, trip: Trip) -> None:
    """Dumps of different trees do not wait for each other, nor mix."""
    animals = [zoo.launch("counter.py", "1", name=f"tree{n}") for n in range(4)]
    for animal in animals:
        animal.remember()
    commands = [
        criuctl.start("dump", animal.pid, "--name", animal.folder.name) for animal in animals
    ]
    for command in commands:
        assert command.process.wait(120) == 0, command.output()
    commands = [criuctl.start("restore", animal.folder.name) for animal in animals]
    for command, animal in zip(commands, animals, strict=True):
        assert command.process.wait(120) == 0, command.output()
        restored = zoo.adopt(command.json()["pid"], animal)
        assert animal.differences(restored) == []
        restored.ask()
