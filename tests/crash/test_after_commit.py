"""What fails when the checkpoint is there is no failed dump: exit 11, all of it in `warnings`, and
the checkpoint comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = [pytest.mark.crash]


@pytest.fixture
def places(
    home: Home, criuctl: Criuctl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """criuctl's run folder and state folder, each a file system of its own.

    The folders outlive the test: trees of other tests may have copies of the mounts.
    """
    found = {name: tmp_path_factory.mktemp(name) for name in ("run", "state")}
    for place in found.values():
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", home.token, place], check=True
        )
    criuctl.extra |= {
        "CRIUCTL_RUN_DIR": str(found["run"]),
        "CRIUCTL_STATE_DIR": str(found["state"]),
    }
    yield found
    for place in found.values():
        subprocess.run(["umount", place], check=True)


@contextmanager
def _read_only(place: Path) -> Iterator[None]:
    """Not even root writes into it, though files there are open for writing."""
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@contextmanager
def _full(place: Path) -> Iterator[None]:
    """There is no room for another byte."""
    fill = place / "fill"
    subprocess.run(["dd", "if=/dev/zero", f"of={fill}", "bs=4k"], check=False, capture_output=True)
    try:
        yield
    finally:
        fill.unlink()


HARMS = {"read-only": _read_only, "full": _full}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("which", ["run", "state"])
@pytest.mark.parametrize(
    ("step", "options"),
    [("cleanup", ()), ("manifest", ("--leave-running",))],
    ids=["ends", "left running"],
)
def test_a_folder_of_criuctls_own_fails(
    step: str,
    options: tuple[str, ...],
    which: str,
    harm: str,
    places: dict[str, Path],
    zoo: Zoo,
    trip: Trip,
    criuctl: Criuctl,
) -> None:
    """The report of a tree that is gone is to be removed, and where the session is now to be
    written down.
    """
    animal = zoo.launch("counter.py", "2")
    first = trip.dump(animal)
    animal = trip.restore(first, animal)  # leaves a report for the tree itself in the run folder
    with (
        paused(criuctl, step, "dump", animal.pid, "--name", "again", *options) as held,
        HARMS[harm](places[which]),
    ):
        held.go_on()
        code = held.command.process.wait(120)
    assert code in (0, 11), held.command.output()
    report = held.command.json()
    assert (code == 11) == any(
        word in str(report["warnings"]) for word in ("Read-only", "No space")
    ), held.command.output()
    if which == ("run" if step == "cleanup" else "state") and harm == "read-only":
        assert code == 11, held.command.output()
    criuctl("verify", report["checkpoint"])
    if options:
        animal.ask()
        animal.end()
    assert not animal.alive()
    copy = zoo.adopt(criuctl("restore", report["checkpoint"])["pid"], animal)
    copy.ask()


@pytest.mark.parametrize("where", ["/dev/full", "a pipe that nobody reads"])
def test_the_answer_cannot_be_printed(where: str, zoo: Zoo, criuctl: Criuctl) -> None:
    """The tree has ended and its checkpoint is there: exit 11, and not that of a bug or of a reader
    that has gone.
    """
    animal = zoo.launch("counter.py", "2")
    argv = [sys.executable, "-m", "criuctl", "dump", str(animal.pid), "--name", "unheard", "--json"]
    if where == "/dev/full":
        out = os.open(where, os.O_WRONLY | os.O_CLOEXEC)
    else:
        reading, out = os.pipe()
        os.close(reading)
    try:
        done = subprocess.run(
            argv,
            env=criuctl.environment(),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(out)
    assert done.returncode == 11, done.stderr
    assert "done, but" in done.stderr
    wait_until(lambda: not animal.alive(), 60, "the tree has ended")
    zoo.adopt(criuctl("restore", "unheard")["pid"], animal).ask()


@pytest.mark.parametrize("which", ["run", "state"])
def test_a_folder_of_criuctls_own_that_cannot_be_written_is_found_before(
    which: str, places: dict[str, Path], zoo: Zoo, criuctl: Criuctl
) -> None:
    """Exit 13, and nothing was touched."""
    animal = zoo.launch("counter.py", "2")
    animal.remember()
    criuctl("dump", animal.pid, "--leave-running", "--name", "before")
    with _read_only(places[which]):
        answer = criuctl("dump", animal.pid, "--name", "again", check=False)
    assert answer["exit_code"] == 13, answer
    assert "Read-only" in answer["error"]["message"]
    assert [row["session"] for row in criuctl("list")] == ["before"]
    animal.ask()
