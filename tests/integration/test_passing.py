"""What CRIU refuses only for the moment: the dump waits until it has passed, and undoes each try of
which nothing came.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import oracle
from support.aftermath import Aftermath
from support.command import Criuctl
from support.hooking import HookFolder
from support.keeper import start_time, wait_until
from support.pauses import Paused, paused
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.dump.criu_failures import PAUSES
from criuctl.proc import netfilter

pytestmark = pytest.mark.integration


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def animal(zoo: Zoo, peer: socket.socket) -> Animal:
    animal = zoo.launch("corked.py", str(peer.getsockname()[1]))
    assert len(oracle.tree(animal.pid)) == 3
    animal.listing = {str(path.relative_to(animal.folder)) for path in animal.folder.rglob("*")}
    return animal


@pytest.fixture
def hooks(criuctl: Criuctl, animal: Animal) -> HookFolder:
    """It is corked after the look at it, before the freeze; each hook that runs is noted."""
    folder = HookFolder(criuctl.home.path / "hooks")
    corked = animal.folder / "corked"
    folder.noting(
        "pre-dump", more=f"kill -USR2 {child(animal)}; until [ -e {corked} ]; do sleep 0.01; done"
    )
    folder.noting(
        "frozen",
        more=f"times=$(wc -l < {folder.path}/requests-frozen-note); "
        'echo "{\\"data\\": {\\"times\\": $times}}"',
    )
    folder.noting("dump-failed")
    return folder


def child(animal: Animal) -> int:
    """The one that is corked."""
    return max(oracle.tree(animal.pid)[1:], key=lambda pid: (start_time(pid), pid))


def sockets(pid: int) -> set[str]:
    """Those that a process has open."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {link for link in links if link.startswith("socket:")}


def cork(animal: Animal) -> None:
    os.kill(child(animal), signal.SIGUSR2)
    wait_until((animal.folder / "corked").exists, 60, "it is corked")


def uncork(animal: Animal) -> None:
    """It can be dumped, and may be compared to what it is now."""
    os.kill(child(animal), signal.SIGUSR2)
    wait_until(lambda: not (animal.folder / "corked").exists(), 60, "nothing is corked")
    animal.remember()


@pytest.mark.parametrize("options", [(), ("--pre-copy",), ("--leave-running",)])
def test_a_dump_outwaits_it(
    options: tuple[str, ...], animal: Animal, hooks: HookFolder, trip: Trip, criuctl: Criuctl
) -> None:
    """What is restored is of the last try alone, and whole."""
    tables = set(netfilter.tables())
    with paused(criuctl, "thawed", "dump", animal.pid, *options) as held:
        assert not set(netfilter.tables()) - tables
        assert sockets(held.command.process.pid).isdisjoint(sockets(animal.pid))
        (gone,) = set(oracle.tree(animal.pid)) - {animal.pid, child(animal)}
        os.kill(gone, signal.SIGKILL)
        uncork(animal)
        animal.ask()  # it runs, and has its half line
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    report = held.command.json()
    assert [len(hooks.requests(p)) for p in ("pre-dump", "frozen", "dump-failed")] == [1, 2, 0]
    shown = criuctl("show", report["checkpoint"])
    assert [(hook["phase"], hook.get("data")) for hook in shown["hooks"]] == [
        ("pre-dump", None),
        ("frozen", {"times": 2}),
    ]
    assert len([image for image in shown["images"] if image["name"].startswith("core-")]) == 2
    wait_until(lambda: not set(netfilter.tables()) - tables, 60, "no lock is left")
    criuctl("verify", report["checkpoint"])
    if options == ("--leave-running",):
        animal.ask()
        animal.end()
    restored = trip.restore(report, animal, equal=False)
    restored.ask()
    restored.ask()


def test_the_look_at_the_tree_outwaits_it(animal: Animal, trip: Trip, criuctl: Criuctl) -> None:
    """Nothing has been touched by then."""
    cork(animal)
    with paused(criuctl, "not-now", "dump", animal.pid) as held:
        uncork(animal)
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    trip.restore(held.command.json(), animal, equal=False).ask()


def test_the_look_at_the_tree_does_not_wait_for_ever(
    animal: Animal, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    cork(animal)
    answer = criuctl("dump", animal.pid, "--name", animal.folder.name, check=False)
    assert answer["exit_code"] == 4, answer
    uncork(animal)
    assert aftermath.of_dump(animal, again=False) == "alive"


def test_an_obstacle_that_does_not_pass_is_reported_in_the_end(
    animal: Animal, hooks: HookFolder, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    answer = criuctl("dump", animal.pid, "--name", animal.folder.name, check=False)
    assert answer["exit_code"] == 5, answer
    assert (
        f"in {len(PAUSES) + 1} tries: a datagram is being put together"
        in answer["error"]["message"]
    )
    assert answer["error"]["message"].endswith("; the tree runs on")
    assert [len(hooks.requests(p)) for p in ("pre-dump", "frozen", "dump-failed")] == [
        1,
        len(PAUSES) + 1,
        1,
    ]
    uncork(animal)
    (hooks.path / "pre-dump" / "note").unlink()
    assert aftermath.of_dump(animal, again=False) == "alive"


def end(_held: Paused, animal: Animal) -> None:
    animal.end()


def interrupt(held: Paused, _animal: Animal) -> None:
    held.kill(signal.SIGTERM)


@pytest.mark.parametrize(("meanwhile", "code"), [(end, 3), (interrupt, 143)])
def test_between_two_tries(
    meanwhile: Callable[[Paused, Animal], None],
    code: int,
    animal: Animal,
    hooks: HookFolder,
    criuctl: Criuctl,
    aftermath: Aftermath,
) -> None:
    """A tree that has ended is not looked for again, and who stops criuctl is heard."""
    with paused(criuctl, "thawed", "dump", animal.pid, "--name", animal.folder.name) as held:
        meanwhile(held, animal)
        held.go_on()
        assert held.command.process.wait(120) == code, held.command.output()
    assert [len(hooks.requests(p)) for p in ("pre-dump", "frozen", "dump-failed")] == [1, 1, 1]
    if meanwhile is interrupt:
        uncork(animal)
        (hooks.path / "pre-dump" / "note").unlink()
        assert aftermath.of_dump(animal, again=False) == "alive"
