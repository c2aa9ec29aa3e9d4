"""CRIU's firewall table: there while TCP connections are saved, and never for a tree that has
none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.command import Criuctl
from support.hooking import HookFolder
from support.keeper import wait_until
from support.pauses import Paused, paused, steps_of
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.criu.options import LOG_NAME
from criuctl.proc import netfilter

pytestmark = pytest.mark.integration


def made_while_dumped(
    criuctl: Criuctl, animal: Animal, *options: str
) -> tuple[set[str], dict[str, object]]:
    """The tables of this dump that are there when all is saved, and its report."""
    with paused(criuctl, "collect", "dump", animal.pid, *options) as held:
        runs = [netfilter.criu_table(run) for run in runs_of(held)]
        assert runs
        new = set(netfilter.tables()) & set(runs)
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    wait_until(lambda: not new & set(netfilter.tables()), 60, f"{new} are gone")
    return new, held.command.json()


def runs_of(held: Paused) -> list[str]:
    """The ids that its CRIU has given itself, from the log in the folder of images."""
    folders = Path(f"/proc/{held.command.process.pid}/fd").iterdir()
    (images,) = [path for path in folders if os.readlink(path) == "/images"]
    return re.findall(r"CRIU run id = ([0-9a-f-]{36})", (images / LOG_NAME).read_text())


@pytest.mark.parametrize("program", ["counter.py", "over.py", "sockets.py"])
def test_only_connections_are_locked(program: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    animal = zoo.launch(program)
    animal.remember()
    new, report = made_while_dumped(criuctl, animal)
    assert len(new) == (program != "counter.py")
    animal.listing = {str(path.relative_to(animal.folder)) for path in animal.folder.rglob("*")}
    trip.restore(report, animal).ask()


def test_a_connection_is_made_after_the_first_look(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """CRIU was asked for no lock; the freeze shows a connection, so the tree runs on and is frozen
    once more, with one.
    """
    animal = zoo.launch("latecomer.py")
    connects(criuctl, animal)
    new, report = made_while_dumped(criuctl, animal)
    assert len(new) == 1
    restored = trip.restore(report, animal, equal=False)
    assert [restored.ask()["words"], restored.ask()["words"]] == [2, 3]
    again = criuctl("dump", restored.pid, "--leave-running")  # now it is known from the start
    assert again["frozen_ms"] > 0
    assert restored.ask()["words"] == 4


def test_it_is_frozen_once_more_for_that(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("latecomer.py")
    connects(criuctl, animal)
    steps = steps_of(criuctl, "dump", animal.pid, "--leave-running")
    assert [step for step in steps if step.startswith(("freeze", "thawed"))] == [
        "freeze",
        "thawed",
        "freeze#2",
    ]
    assert animal.ask()["words"] == 2


def connects(criuctl: Criuctl, animal: Animal) -> None:
    """A hook that has the program connect between criuctl's look at it and the freeze, of the first
    dump.
    """
    report, done = animal.folder / "report-1.json", criuctl.home.path / "connected"
    connect = f"kill -USR1 {animal.pid}; until [ -e {report} ]; do sleep 0.01; done; touch {done}"
    HookFolder(criuctl.home.path / "hooks").sh(
        "pre-dump", "connects", f"[ -e {done} ] || {{ {connect}; }}"
    )
