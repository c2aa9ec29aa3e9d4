"""Tracking that stays from one snapshot to the next: it reads only what was written to since, and
nothing is left when its keeper, the snapshot or the tree ends.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused
from support.tracking import keepers, registered
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.proc import written_pages

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (written_pages.supported() and written_pages.forgets_moved()),
        reason="the kernel does not track writes, or leaves protection to moved memory",
    ),
]
MIB = 1 << 20
ALL = 80 * 256  # pages that a first snapshot reads


@pytest.fixture
def animal(zoo: Zoo, criuctl: Criuctl) -> Animal:
    """A tree of 80 MiB that is tracked."""
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1"
    return zoo.launch("memory.py", "80")


def snapshot(criuctl: Criuctl, animal: Animal, *options: str) -> dict[str, Any]:
    (report,) = criuctl("snapshot", animal.pid, *options)
    assert report["tracking"] == "write-protect"
    return dict(report)


def read(report: dict[str, Any]) -> int:
    """Pages that a snapshot has read, of all kinds."""
    return int(report["pages"]["read_running"]) + int(report["pages"]["read_frozen"])


def test_the_second_snapshot_reads_only_what_was_written_to(
    criuctl: Criuctl, animal: Animal, trip: Trip
) -> None:
    first = snapshot(criuctl, animal)
    assert first["pages"]["read_running"] > ALL
    assert criuctl("status", first["session"])["tracking"] == "write-protect"
    animal.remember()
    for _ in range(3):  # what is taken over can be taken over again
        last = snapshot(criuctl, animal)
        assert last["pages"]["read_running"] < ALL / 10
        assert last["bytes"]["memory"] >= first["bytes"]["memory"] - MIB
    assert registered(animal.pid)
    criuctl("verify", last["checkpoint"])
    animal.listing = {path.name for path in animal.folder.iterdir()}
    animal.end()
    wait_until(lambda: not keepers(criuctl.home), 60, "its keeper ends with it")
    assert list((criuctl.home.run / "tracking").iterdir()) == []
    trip.restore(last, animal).ask()


@pytest.mark.parametrize("how", ["the keeper is killed", "another store", "its checkpoint is gone"])
def test_what_cannot_be_taken_over_is_read(how: str, criuctl: Criuctl, animal: Animal) -> None:
    first = snapshot(criuctl, animal)
    if how == "the keeper is killed":
        (keeper,) = keepers(criuctl.home)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not registered(animal.pid), 60, "nothing is left in the process")
        assert criuctl("status", first["session"])["tracking"] == "none"
    elif how == "another store":
        criuctl.extra["CRIUCTL_STORE"] = str(criuctl.home.path / "other")
    else:
        criuctl("rm", first["checkpoint"])
        criuctl("gc", env={"CRIUCTL_GC_GRACE": "0s"})
        criuctl("gc", env={"CRIUCTL_GC_GRACE": "0s"})
    second = snapshot(criuctl, animal)
    assert read(second) > ALL
    criuctl("verify", second["checkpoint"])
    assert read(snapshot(criuctl, animal)) < read(second) / 2


def test_a_dump_that_ends_the_tree_takes_the_tracking_over(
    criuctl: Criuctl, animal: Animal, trip: Trip
) -> None:
    snapshot(criuctl, animal)
    report = trip.dump(animal)
    assert report["tracking"] == "write-protect"
    assert report["pages"]["read_running"] < ALL / 10
    wait_until(lambda: not keepers(criuctl.home), 60, "there is nothing to keep")
    trip.restore(report, animal).ask()


@pytest.mark.parametrize("step", ["track", "frozen", "commit"])
def test_after_kill_9_of_a_snapshot_nothing_is_left(
    step: str, criuctl: Criuctl, animal: Animal
) -> None:
    snapshot(criuctl, animal)
    with paused(criuctl, step, "snapshot", animal.pid, "--jobs", "1") as held:
        held.kill()
    held.wait_settled(animal)
    wait_until(lambda: not keepers(criuctl.home), 60, "no keeper has the tracking")
    wait_until(lambda: not registered(animal.pid), 60, "nothing is left in the process")
    assert read(snapshot(criuctl, animal)) > ALL
    animal.ask()


def test_of_a_dump_that_is_not_repeated_nothing_is_kept(criuctl: Criuctl, animal: Animal) -> None:
    criuctl("dump", animal.pid, "--leave-running")
    assert keepers(criuctl.home) == []
    assert registered(animal.pid) == []


def test_of_a_session_that_runs_another_program_all_is_read(criuctl: Criuctl) -> None:
    """exec: the userfaultfd is of the memory that is gone."""
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1"
    made = "made = bytearray(range(256)) * (32 << 12)"
    second = f"import os, sys, time; {made}; os.mkdir(sys.argv[1])\\nwhile True: time.sleep(0.05)"
    again, runs = criuctl.home.path / "again", criuctl.home.path / "runs"
    first = (
        f"import os, sys, time\n{made}\n"
        f"while not os.path.exists({str(again)!r}): time.sleep(0.05)\n"
        f"os.execv(sys.executable, [sys.executable, '-c', '{second}', {str(runs)!r}])"
    )
    run = criuctl.start(
        *("run", "--name", "s", "--detach", "--", sys.executable, "-c", first), json_output=False
    )
    assert run.process.wait(120) == 0, run.output()
    (before,) = criuctl("snapshot", "s")
    assert criuctl("status", "s")["tracking"] == "write-protect"
    again.touch()
    wait_until(runs.exists, 60, "it runs the other program, which has its memory")
    (after,) = criuctl("snapshot", "s")
    assert min(read(before), read(after)) > 32 * 256
    criuctl("verify", after["checkpoint"])
    criuctl("kill", "s")
