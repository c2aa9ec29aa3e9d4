"""criuctl is killed in the middle of a restore: of the control groups that were made for it, the
next command leaves none.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import groups
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused, steps_of
from support.trip import Trip
from support.zoo import Zoo

from criuctl.cgroups.membership import mount_points
from criuctl.config import Config
from criuctl.session.sessions import state_of

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@pytest.fixture
def group() -> Iterator[Path]:
    """A new group in a hierarchy of this host."""
    mounted = mount_points()
    hierarchy = next(
        h for h in sorted(mounted, key=lambda name: "pids" not in name) if "cpuset" not in h
    )
    folder = Path(mounted[hierarchy]) / f"made-by-a-test-{secrets.token_hex(4)}"
    folder.mkdir()
    yield folder
    if folder.exists():
        groups.remove(folder)


def test_groups_that_are_made_again(group: Path, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """And when the tree comes back, its groups have the settings that they had: CRIU gives them to
    those only that it makes.
    """
    setting = group / "pids.max"
    if setting.exists():
        setting.write_text("99")
    animal = zoo.launch("counter.py", "1")
    for pid, _started in animal.identities():
        (group / "cgroup.procs").write_text(str(pid))
    report = trip.dump(animal)
    groups.remove(group)
    steps = steps_of(criuctl, "restore", report["checkpoint"])
    made = []
    for running in zoo.find(animal):
        running.end()
    for step in steps:
        if group.exists():
            groups.remove(group)
        with paused(criuctl, step, "restore", report["checkpoint"]) as held:
            held.kill()
            held.wait_settled(restoring=animal)
        made.append(group.exists())
        criuctl("restore", "nobody", check=False)
        alive = zoo.find(animal)
        assert group.exists() == bool(alive), step
        for running in alive:
            running.end()
    assert made[steps.index("resume")]
    groups.remove(group)
    restored = trip.restore(report, animal)
    assert not setting.exists() or setting.read_text().strip() == "99"
    restored.ask()
    restored.end()


def test_the_group_of_a_session_that_has_not_come(criuctl: Criuctl) -> None:
    """It was made by a holder that was started for the restore, and that ends when no restore runs
    any more.
    """
    config = Config(run_dir=str(criuctl.home.run), state_dir=str(criuctl.home.path / "state"))

    def state() -> dict[str, Any]:
        found = state_of(config, "s")
        assert found is not None
        return found

    def end_holder() -> None:
        if state()["holder_alive"]:
            os.kill(state()["holder"]["pid"], signal.SIGKILL)
            wait_until(lambda: not state()["holder_alive"], 60, "the holder is gone")

    assert (
        criuctl.start(
            "run", "-d", "--name", "s", "--", "sleep", "1000", json_output=False
        ).process.wait(60)
        == 0
    )
    criuctl("dump", "s")
    end_holder()
    steps = steps_of(criuctl, "restore", "s")
    criuctl("dump", "s")
    for step in steps[steps.index("restore") : steps.index("resume")]:
        end_holder()
        with paused(criuctl, step, "restore", "s") as held:
            held.kill()
            held.command.process.wait(120)
        wait_until(lambda: not state()["holder_alive"], 60, "the new holder has ended")
        assert not os.path.exists(state()["cgroup"]), step
