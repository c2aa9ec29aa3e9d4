"""criuctl is killed at every step of a dump and of a restore.

The steps are not listed here: each test first runs the whole command undisturbed, takes the steps
that it reported, and then kills one criuctl at each of them. One test goes through all steps of one
command, so a step that is added is tested as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import leaks, oracle
from support.aftermath import Aftermath, stopped
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused, steps_of
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = [pytest.mark.crash, pytest.mark.slow]

TURNS = [signal.SIGINT, signal.SIGTERM] * 50  # one handler has them both: each step gets one
# the steps after which another whole dump and restore is tried
AGAIN = ("preflight", "frozen", "commit", "cleanup")


@pytest.mark.parametrize("how", ["ends", "left running", "tracked", "tracked, ends"])
def test_kill_9_at_every_step_of_a_dump(
    how: str, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """The tree runs on, or a complete checkpoint exists, at each and every step."""
    options = [] if "ends" in how else ["--leave-running"]
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1" if "tracked" in how else "0"
    first = zoo.launch("counter.py", "1", name="first")
    steps = steps_of(criuctl, "dump", first.pid, *options)
    first.end()
    assert {"freeze", "commit"} <= set(steps)
    assert ("track" in steps) == ("tracked" in how)
    fates = {}
    for step in steps:
        animal = zoo.launch("counter.py", "1", name=f"dump-{step}".replace("#", "-"))
        animal.remember()
        with paused(
            criuctl, step, "dump", animal.pid, "--name", animal.folder.name, *options
        ) as held:
            held.kill()
        held.wait_settled(animal)
        untracked(animal)
        fates[step] = aftermath.of_dump(animal, again=step in AGAIN)
    # Before the commit no tree may be gone; and at some point of a dump that ends the tree it is.
    assert [fates[step] for step in steps[: steps.index("commit")]] == ["alive"] * steps.index(
        "commit"
    )
    assert ("dumped" in fates.values()) == ("ends" in how)


def untracked(animal: Animal) -> None:
    """Nothing of the tracking of writes is left in the tree, if it lives."""
    for pid in oracle.tree(animal.pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            assert " uw" not in oracle.read(f"/proc/{pid}/smaps")
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            assert "userfaultfd" not in "".join(links)


@pytest.mark.parametrize("pids", ["same", "private"])
def test_kill_9_at_every_step_of_a_restore(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """Nothing runs, or all of it does; the next attempt succeeds."""
    animal = zoo.launch("counter.py", "1")
    checkpoint = trip.dump(animal)["checkpoint"]
    steps = steps_of(criuctl, "restore", checkpoint, "--pids", pids)
    for running in zoo.find(animal):
        running.end()
    assert "restore" in steps
    fates = {}
    for step in steps:
        with paused(criuctl, step, "restore", checkpoint, "--pids", pids) as held:
            held.kill()
        held.wait_settled(restoring=animal)
        fates[step] = aftermath.of_restore(animal, checkpoint)
        for running in zoo.animals:
            running.end()
    assert fates[steps[0]] == "nothing"
    assert fates[steps[-1]] == "running"


def test_a_signal_at_every_step_of_a_dump(zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath) -> None:
    """^C and termination undo what was begun and end with 128 + N, or come too late and change
    nothing.
    """
    first = zoo.launch("counter.py", "1", name="first")
    steps = steps_of(criuctl, "dump", first.pid)
    for step, number in zip(steps, TURNS, strict=False):
        animal = zoo.launch("counter.py", "1", name=f"dump-{step}".replace("#", "-"))
        animal.remember()
        with paused(criuctl, step, "dump", animal.pid, "--name", animal.folder.name) as held:
            held.kill(number)
            if steps.index(step) > steps.index("commit"):
                held.go_on()  # the signal is ignored from the commit on
            held.wait_settled(animal)
        code = held.command.process.wait(0)
        fate = aftermath.of_dump(animal, again=step in AGAIN)
        assert (step, fate, code) in (
            (step, "alive", 128 + number),
            (step, "dumped", 0),
            (step, "dumped", 128 + number),
        )
        assert fate == "alive" or steps.index(step) >= steps.index("commit")


def test_a_signal_at_every_step_of_a_restore(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    animal = zoo.launch("counter.py", "1")
    checkpoint = trip.dump(animal)["checkpoint"]
    steps = steps_of(criuctl, "restore", checkpoint)
    for running in zoo.find(animal):
        running.end()
    for step, number in zip(steps, TURNS, strict=False):
        with paused(criuctl, step, "restore", checkpoint) as held:
            held.kill(number)
            held.wait_settled(restoring=animal)
        code = held.command.process.wait(0)
        fate = aftermath.of_restore(animal, checkpoint)
        assert (step, fate, code) in (
            (step, "nothing", 128 + number),
            (step, "running", 0),
            (step, "running", 128 + number),
        )
        for running in zoo.animals:
            running.end()


# Sends criuctl a signal when the restored tree runs, and what was made for the restore is being
# taken down.
TOO_LATE = """
import os, sys
from criuctl.cli.main import program
from criuctl.namespaces import restore_lock
number, remove = int(sys.argv[1]), restore_lock.ConnectionLock.remove

def interrupted(self, *, failed):
    if not failed:
        os.kill(os.getpid(), number)
    return remove(self, failed=failed)

restore_lock.ConnectionLock.remove = interrupted
sys.argv[1:] = sys.argv[5:]
program()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_when_a_restored_tree_runs(
    number: signal.Signals, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """It is too late to undo anything: the session is known here, and its lease is held, before
    criuctl ends.
    """
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal)
    criuctl.prefix = [sys.executable, "-c", TOO_LATE, str(int(number))]
    answer = criuctl("restore", report["checkpoint"], check=False)
    criuctl.prefix = []
    assert answer["exit_code"] == 128 + number
    (running,) = zoo.find(animal)
    running.ask()
    status = criuctl("status", report["session"])
    assert (status["state"], status["pid"]) == ("running", running.pid)
    another = {
        "CRIUCTL_HOST_ID": "another",
        "CRIUCTL_STATE_DIR": str(criuctl.home.path / "another"),
    }
    there = criuctl("restore", report["checkpoint"], env=another, check=False)
    assert there["exit_code"] == 9


# Is killed when it is written down that the tree is checkpointed, and CRIU does not know yet that
# it may end it.
DIES = """
import os, signal, sys
from criuctl.cli.main import program
from criuctl.terminals.dumped import DumpedTerminals
DumpedTerminals.drop = lambda self: os.kill(os.getpid(), signal.SIGKILL)
sys.argv[1:] = sys.argv[4:]
program()
"""


def test_kill_9_just_before_a_tree_is_ended(zoo: Zoo, criuctl: Criuctl) -> None:
    """It runs on, and criuctl knows it: a second copy is not restored next to it."""
    animal = zoo.launch("counter.py", "1")
    name = animal.folder.name
    criuctl.prefix = [sys.executable, "-c", DIES]
    assert criuctl("dump", animal.pid, "--name", name, check=False)["exit_code"] == -signal.SIGKILL
    criuctl.prefix = []
    wait_until(lambda: not stopped(animal), 60, f"{animal!r} runs on")
    animal.ask()
    status = criuctl("status", name)
    assert (status["state"], status["pid"]) == ("running", animal.pid)
    assert criuctl("restore", name, check=False)["exit_code"] == 9
    again = criuctl("dump", animal.pid)
    assert (again["session"], criuctl("status", name)["state"]) == (name, "checkpointed")


# What was made for a restore cannot be taken down, and the tree runs already.
STAYS_UP = """
import sys
from criuctl.cli.main import program
from criuctl.namespaces import restore_lock
remove = restore_lock.ConnectionLock.remove

def failing(self, *, failed):
    remove(self, failed=failed)
    if not failed:
        raise TimeoutError("the kernel does not answer")

restore_lock.ConnectionLock.remove = failing
sys.argv[1:] = sys.argv[4:]
program()
"""


def test_a_failure_when_a_restored_tree_runs(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """It is reported, and the tree is known."""
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal)
    criuctl.prefix = [sys.executable, "-c", STAYS_UP]
    answer = criuctl("restore", report["checkpoint"])
    criuctl.prefix = []
    assert "the kernel does not answer" in answer["warnings"][-1]
    (running,) = zoo.find(animal)
    running.ask()
    status = criuctl("status", report["session"])
    assert (status["state"], status["pid"]) == ("running", running.pid)
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"] == 9


# The firewall lock of a restore stays, and the kernel does not answer when it is to be taken down.
STAYS_LOCKED = """
import subprocess, sys
from criuctl.cli.main import program
from criuctl.proc import netfilter
kind = {"OSError": TimeoutError, "bug": ValueError}[sys.argv.pop(1)]

def failing(name, make_socket):
    subprocess.run(["nft", "add", "table", "inet", name], check=True)
    with open(made, "w") as file:
        file.write(name)
    raise kind("timed out")

netfilter.delete_table = failing
sys.argv[2:] = sys.argv[5:]
made = sys.argv.pop(1)
program()
"""


@pytest.mark.parametrize(
    ("what", "warning"),
    [
        ("OSError", "the lock on the connections could not be taken down: timed out"),
        ("bug", "not everything that was made for the restore could be taken down: timed out"),
    ],
)
def test_a_firewall_lock_that_stays_is_taken_down_by_the_next_command(
    what: str, warning: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, tmp_path: Path
) -> None:
    animal = zoo.launch("sockets.py")
    report = trip.dump(animal)
    criuctl.prefix = [sys.executable, "-c", STAYS_LOCKED, what, str(tmp_path / "made")]
    answer = criuctl("restore", report["checkpoint"])
    criuctl.prefix = []
    table = (tmp_path / "made").read_text()
    try:
        assert any(text.startswith(warning) for text in answer["warnings"])
        assert table in leaks.nft_tables()
        (running,) = zoo.find(animal)
        assert criuctl("dump", running.pid)["session"] == report["session"]
        assert table not in leaks.nft_tables()
    finally:  # after a failure it must not disturb the tests that follow
        subprocess.run(["nft", "delete", "table", "inet", table], capture_output=True, check=False)


def test_the_firewall_lock_goes_too(zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath) -> None:
    """A tree with TCP connections is behind CRIU's firewall lock while it is frozen; kill -9 must
    not leave it there.
    """
    for step in ("frozen", "commit"):
        animal = zoo.launch("sockets.py", name=f"sockets-{step}")
        animal.remember()
        with paused(criuctl, step, "dump", animal.pid, "--name", animal.folder.name) as held:
            held.kill()
        held.wait_settled(animal)
        assert animal.alive()
        assert animal.differences(animal) == []
        animal.ask()


@pytest.mark.parametrize("step", ["collect", "commit"])
def test_criuctl_and_criu_are_killed_together(
    step: str, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """As when their control group is killed: no process is left to unlock the tree's connections,
    so the next command does.
    """
    animal = zoo.launch("sockets.py")
    animal.remember()
    before = leaks.nft_tables()
    with paused(criuctl, step, "dump", animal.pid) as held:
        held.kill(signal.SIGSTOP)
        held.kill_criu()
        held.kill()
    held.wait_settled(animal)
    assert leaks.nft_tables() - before
    criuctl("snapshot", animal.pid)
    wait_until(lambda: leaks.nft_tables() <= before, 60, "the lock on its connections is gone")
    assert animal.differences(animal) == []
    animal.ask()
    trip.restore(trip.dump(animal), animal, equal=False).ask()


@pytest.mark.parametrize(("step", "number"), [("collect", 1), ("describe", 0), ("store", 0)])
def test_a_tree_that_goes_on_already_is_not_put_right(
    step: str, number: int, zoo: Zoo, criuctl: Criuctl
) -> None:
    """What the next command would do for a killed one ends with the freeze, not with the storing,
    which may take minutes.
    """
    animal = zoo.launch("sockets.py")
    with paused(criuctl, step, "snapshot", animal.pid) as held:
        assert len(os.listdir(criuctl.home.run / "shields")) == number
        if not number:
            animal.ask()  # it runs
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    animal.ask()
