"""What is unread in a named pipe comes once: from the checkpoint, or from the pipe if that has
lived on, never from both.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import Keeper, wait_until
from support.operating import Operators
from support.pauses import paused
from support.trip import Trip
from support.zoo import PROGRAMS, Animal, Zoo

pytestmark = pytest.mark.integration

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032


class Outside:
    """A named pipe, and the test's own ends of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends: list[int] = []
        os.mkfifo(path)

    def open(self, mode: int) -> int:
        self._ends.append(os.open(self.path, mode | os.O_NONBLOCK))
        return self._ends[-1]

    def write(self, text: str) -> None:
        """By one who has it open for no longer than that."""
        fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, text.encode())
        os.close(fd)

    def close(self) -> None:
        for fd in self._ends:
            os.close(fd)
        self._ends = []


@pytest.fixture
def pipe(zoo: Zoo) -> Iterator[Outside]:
    made = Outside(zoo.home / "pipe")
    yield made
    made.close()


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


def reader(zoo: Zoo, pipe: Outside, mode: str = "rw") -> Animal:
    return zoo.launch("fifo.py", str(pipe.path), mode)


def warned(animal: Animal, text: str) -> bool:
    return any(text in warning for warning in animal.answer["warnings"])


@pytest.mark.parametrize("outside", [os.O_WRONLY, os.O_RDWR], ids=["writer", "both-ways"])
@pytest.mark.parametrize("pids", ["same", "private"])
def test_another_process_keeps_it_open(
    outside: int, pids: str, zoo: Zoo, trip: Trip, pipe: Outside
) -> None:
    """The pipe has lived on with its bytes: the tree finds them, and what came behind them,
    once.
    """
    animal = reader(zoo, pipe, "r")
    end = pipe.open(outside)
    os.write(end, b"BBBB")
    report = trip.dump(animal)
    if outside == os.O_RDWR:
        os.write(end, b"CC")
    restored = trip.restore(report, animal, "--pids", pids)
    os.write(end, b"DD")
    assert restored.ask()["read"] == ("BBBBCCDD" if outside == os.O_RDWR else "BBBBDD")
    assert not warned(restored, "named pipe")
    assert restored.ask()["read"] == ""


def test_a_name_that_is_no_text(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """Alone, and next to its original, where it cannot have another name."""
    pipe.path = pipe.path.rename(os.fsdecode(os.fsencode(pipe.path) + b"\xfd"))
    animal = reader(zoo, pipe)
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    report = trip.snapshot(animal)
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    assert warned(copy, "and so will the copy; the 4 bytes")
    copy.end()
    restored = trip.restore(trip.dump(animal), animal)
    assert restored.ask()["read"] == "BBBB"


def test_it_was_read_from_meanwhile(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """Bytes that others have read are theirs, and that is reported."""
    animal = reader(zoo, pipe)
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    report = trip.dump(animal)
    assert os.read(end, 3) == b"BBB"
    restored = trip.restore(report, animal)
    assert warned(restored, "the tree finds the 1 byte that are in it now, not the 4 bytes")
    assert restored.ask()["read"] == "B"


def test_no_process_keeps_it_open(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """It was gone with the tree: all that was unread comes from the checkpoint, each time."""
    animal = reader(zoo, pipe)
    pipe.write("BBBB")
    report = trip.dump(animal)
    for _ in range(2):
        restored = trip.restore(report, animal, equal=False)
        assert restored.ask()["read"] == "BBBB"
        restored.end()


@pytest.mark.parametrize("there", [b"", b"B", b"BBBB"])
def test_another_process_has_opened_it_since(
    there: bytes, zoo: Zoo, trip: Trip, pipe: Outside
) -> None:
    """That is another pipe under the same name, whatever is in it: what the tree had not read is
    not lost.
    """
    animal = reader(zoo, pipe)
    pipe.write("BBBB")
    report = trip.dump(animal)
    end = pipe.open(os.O_RDWR)
    os.write(end, there)
    restored = trip.restore(report, animal)
    assert warned(restored, "come after") == bool(there)
    assert restored.ask()["read"] == there.decode() + "BBBB"


@pytest.mark.parametrize(("unread", "there"), [(4, 20), (4, 200_000), (60_000, 20_000)])
def test_the_one_that_was_opened_since_has_room_for_both(
    unread: int, there: int, zoo: Zoo, trip: Trip, pipe: Outside
) -> None:
    """And is not made smaller than its owner has made it."""
    animal = reader(zoo, pipe)
    pipe.write("B" * unread)
    report = trip.dump(animal)
    end = pipe.open(os.O_RDWR)
    if there != 20_000:
        fcntl.fcntl(end, F_SETPIPE_SZ, 1 << 20)
    room = fcntl.fcntl(end, F_GETPIPE_SZ)
    assert os.write(end, b"C" * there) == there
    restored = trip.restore(report, animal, equal=False)
    assert fcntl.fcntl(end, F_GETPIPE_SZ) >= room
    assert restored.ask()["read"] == "C" * there + "B" * unread


def test_another_process_opens_it_before_the_tree_has_ended(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, pipe: Outside
) -> None:
    """The pipe lives on with its bytes."""
    animal = reader(zoo, pipe)
    pipe.write("BBBB")
    with paused(criuctl, "store", "dump", animal.pid, "--name", "web") as held:
        pipe.open(os.O_RDWR)
        held.go_on()
        assert held.command.process.wait(120) == 0
    restored = trip.zoo.adopt(criuctl("restore", "web")["pid"], animal)
    assert restored.ask()["read"] == "BBBB"


@pytest.mark.parametrize("other", ["made", "renamed"])
def test_another_one_is_there(other: str, zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """The pipe that lived on is elsewhere, and another one, which a process has open, in its
    place.
    """
    animal = reader(zoo, pipe)
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    report = trip.dump(animal)
    pipe.path.rename(pipe.path.with_name("elsewhere"))
    os.mkfifo(pipe.path)
    if other == "made":
        pipe.open(os.O_RDWR)
    restored = trip.restore(report, animal)
    assert restored.ask()["read"] == "BBBB"
    assert os.read(end, 100) == b"BBBB"


def test_a_deleted_one_is_made_again(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """One without a name comes back as the tree's own, with what was unread, whichever process has
    the old one, or its name.
    """
    animal = reader(zoo, pipe)
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    pipe.path.unlink()
    report = trip.dump(animal)
    os.mkfifo(pipe.path)
    pipe.open(os.O_RDWR)
    restored = trip.restore(report, animal, equal=False)
    assert restored.ask()["read"] == "BBBB"
    assert os.read(end, 100) == b"BBBB"


def test_a_deleted_name_of_one_that_lives_on(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    animal = reader(zoo, pipe)
    os.link(pipe.path, pipe.path.with_name("other"))
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    pipe.path.unlink()
    report = trip.dump(animal)
    restored = trip.restore(report, animal)
    assert restored.ask()["read"] == "BBBB"
    assert restored.ask()["read"] == ""


def test_a_checkpoint_from_before_its_original_went_on(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """The original has read it all and has ended: back at the checkpoint, it is unread again."""
    animal = reader(zoo, pipe)
    pipe.write("BBBB")
    report = trip.snapshot(animal)
    assert animal.ask()["read"] == "BBBB"
    animal.end()
    restored = trip.restore(report, animal, equal=False)
    assert restored.ask()["read"] == "BBBB"


@pytest.mark.parametrize("outside", [False, True], ids=["its own", "written to from outside"])
def test_a_copy_next_to_its_original(
    outside: bool, zoo: Zoo, trip: Trip, criuctl: Criuctl, pipe: Outside
) -> None:
    """Each reads what was unread, once, and the original goes on to be the one who reads from the
    pipe.
    """
    animal = reader(zoo, pipe)
    if outside:
        pipe.open(os.O_WRONLY)
    pipe.write("AAAA")
    report = trip.snapshot(animal)
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    assert warned(copy, "the copy gets its own next to it")
    (file,) = copy.answer["files"]
    assert file["path"] == str(pipe.path) and Path(file["own_copy"]).is_fifo()
    assert copy.ask()["read"] == "AAAA"
    pipe.write("BB")
    assert copy.ask()["read"] == ""
    assert animal.ask()["read"] == "AAAABB"
    own = os.open(file["own_copy"], os.O_WRONLY | os.O_NONBLOCK)
    os.write(own, b"CC")
    os.close(own)
    assert (copy.ask()["read"], animal.ask()["read"]) == ("CC", "")
    again = criuctl("restore", report["checkpoint"], "--as", "third", "--dry-run")
    assert [(f["path"], f["verdict"]) for f in again["files"]] == [(str(pipe.path), "beside")]


def test_a_copy_that_cannot_have_its_own(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """One whose name is gone: the copy has the same pipe as the original, but nothing is written
    into it.
    """
    animal = reader(zoo, pipe)
    os.link(pipe.path, pipe.path.with_name("other"))
    pipe.write("AAAA")
    pipe.path.unlink()
    report = trip.snapshot(animal)
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    assert warned(
        copy,
        "and so will the copy; the 4 bytes that were unread at the dump are not written into it",
    )
    assert animal.ask()["read"] == "AAAA"
    assert copy.ask()["read"] == ""


def test_a_copy_whose_original_is_gone(zoo: Zoo, trip: Trip, pipe: Outside) -> None:
    """A process that writes to the pipe has kept it alive, and no other process reads from it: it
    is the copy's.
    """
    animal = reader(zoo, pipe, "r")
    end = pipe.open(os.O_WRONLY)
    os.write(end, b"AAAA")
    report = trip.dump(animal)
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    os.write(end, b"BB")
    assert copy.ask()["read"] == "AAAABB"


def test_a_session(operators: Operators, zoo: Zoo, pipe: Outside) -> None:
    """It has a mount namespace of its own, which ends with it; a copy of it, too."""
    program, folder = PROGRAMS / "fifo.py", zoo.home / "session"
    folder.mkdir()
    operators(
        "run", "-d", "--name", "s", "--", sys.executable, "-S", program, folder, pipe.path, "rw"
    )
    wait_until((folder / "ready").exists, 60, "it is ready")
    original = Animal(operators("status", "s")["pid"], folder)
    end = pipe.open(os.O_RDWR)
    os.write(end, b"BBBB")
    operators("dump", "s", "--leave-running")
    copy = zoo.adopt(operators("restore", "s", "--as", "copy")["pid"], original)
    assert copy.ask()["read"] == "BBBB"
    report = operators("dump", "s")
    answer = operators("restore", report["checkpoint"])
    assert not any("named pipe" in warning for warning in answer["warnings"])
    restored = zoo.adopt(answer["pid"], original)
    os.write(end, b"CC")
    assert restored.ask()["read"] == "BBBBCC"


def test_a_trial_next_to_the_living_one(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, pipe: Outside
) -> None:
    animal = reader(zoo, pipe)
    pipe.write("AAAA")
    trip.snapshot(animal, "--name", "web")
    assert criuctl("verify", "web", "--restore")["alive"]
    assert animal.ask()["read"] == "AAAA"


def test_a_trial_that_would_read_what_is_for_the_living_one(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """On a file system that no overlay can cover, as it is the third above another: the pipe in
    there is the one out here.
    """
    base = zoo.home / "base"
    base.mkdir()
    mounted = []

    def mount(kind: str, at: Path, options: str) -> None:
        subprocess.run(["mount", "-t", kind, "-o", options, zoo.token, str(at)], check=True)
        mounted.append(at)

    try:
        mount("tmpfs", base, "size=1m")
        for number in range(3):
            (base / f"{number}").mkdir()
        for number in (1, 2):
            parts = {"upperdir": base / f"upper{number}", "workdir": base / f"work{number}"}
            for part in parts.values():
                part.mkdir()
            options = {"lowerdir": base / f"{number - 1}", **parts}
            mount(
                "overlay",
                base / f"{number}",
                ",".join(f"{key}={value}" for key, value in options.items()),
            )
        pipe = Outside(base / "2" / "pipe")
        animal = reader(zoo, pipe)
        pipe.write("AAAA")
        trip.snapshot(animal, "--name", "web")
        tried = criuctl("verify", "web", "--restore", check=False)
        assert tried["exit_code"] != 0 and "a trial has no named pipe of its own" in str(tried)
        assert animal.ask()["read"] == "AAAA"
    finally:
        zoo.close()
        for at in reversed(mounted):
            subprocess.run(["umount", str(at)], check=True)


@pytest.mark.parametrize("since", [False, True], ids=["kept open", "opened since"])
def test_a_restore_that_fails_leaves_the_pipe_as_it_is(
    since: bool, zoo: Zoo, trip: Trip, criuctl: Criuctl, pipe: Outside
) -> None:
    """What CRIU has written into it by then is taken out again."""
    animal = reader(zoo, pipe)
    if not since:
        end = pipe.open(os.O_RDWR)
    pipe.write("BBBB")
    report = trip.dump(animal)
    if since:
        end = pipe.open(os.O_RDWR)
    os.write(end, b"CC")
    hook = HookFolder(criuctl.home.path / "hooks").sh(
        "post-restore", "guard", """echo '{"veto": "not now"}'"""
    )
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"] == 10
    hook.unlink()
    assert trip.restore(report, animal).ask()["read"] == ("CCBBBB" if since else "BBBBCC")


def test_two_that_criu_takes_for_one(zoo: Zoo, trip: Trip, criuctl: Criuctl, pipe: Outside) -> None:
    """It knows them by their inodes' numbers, which each file system gives by itself: what is in
    the second would be lost.
    """
    folders = [zoo.home / name for name in ("one", "two")]
    mounted = []
    try:
        for folder in folders:
            folder.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", zoo.token, str(folder)], check=True)
            mounted.append(folder)
            os.mkfifo(folder / "pipe")
        assert len({os.stat(folder / "pipe").st_ino for folder in folders}) == 1
        animal = zoo.launch(
            "fifo.py", str(pipe.path), "rw", *(str(folder / "pipe") for folder in folders)
        )
        animal = trip.restore(trip.dump(animal), animal)  # there is nothing to lose
        (folders[1] / "pipe").write_text("unread")
        refused = criuctl("dump", animal.pid, check=False)
        assert refused["exit_code"] == 4
        (finding,) = (f for f in refused["error"]["findings"] if f["code"] == "fifo-number")
        assert all(str(folder / "pipe") in finding["text"] for folder in folders)
        animal.end()
    finally:
        zoo.close()
        for folder in mounted:
            subprocess.run(["umount", str(folder)], check=True)
