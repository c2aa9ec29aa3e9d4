"""Folders that were deleted while they are open, and what is in them: CRIU's order of making and
removing them does not work.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

WAYS = [
    *(
        "first",
        "last",
        "several",
        "nested",
        "inward",
        "gap",
        "cwd",
        "fifo",
        "socket",
        "again",
        "again-full",
        "twice",
    ),
    *("mapped", "linked", "child"),
]


@pytest.mark.parametrize("which", WAYS)
def test_there_and_back(which: str, zoo: Zoo, trip: Trip) -> None:
    """Restored twice from one checkpoint; the folder's listing is as before."""
    animal = zoo.launch("deleted_folders.py", which)
    report = trip.dump(animal)
    once = trip.restore(report, animal)
    once.ask()
    once.end()
    trip.restore(report, animal).ask()


@pytest.mark.parametrize("which", ["nested", "gap", "again"])
def test_copies_next_to_the_original(which: str, zoo: Zoo, trip: Trip) -> None:
    original = zoo.launch("deleted_folders.py", which)
    report = trip.snapshot(original, "--name", "first")
    for name in ("second", "third"):
        trip.restore(report, original, "--as", name).ask()
    original.ask()


@pytest.mark.parametrize("which", ["nested", "several", "cwd", "again-full"])
def test_in_namespaces_of_its_own(which: str, zoo: Zoo, trip: Trip) -> None:
    """CRIU makes the mounts as well."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "setsid"]
    animal = zoo.launch("deleted_folders.py", which, prefix=prefix)
    report = trip.dump(animal)
    # The command that made the namespaces complains at its end.
    ignore = (*oracle.NEW_NAMESPACE, "*/descriptors/[12]/size", "*/descriptors/[12]/offset")
    restored = trip.restore(report, animal, ignore=ignore)
    restored.ask()
    trip.round(restored, ignore=ignore).ask()


@pytest.mark.parametrize("what", ["folder", "full folder", "file", "link"])
@pytest.mark.parametrize("which", ["first", "nested", "gap"])
def test_something_has_the_name_since(which: str, what: str, zoo: Zoo, trip: Trip) -> None:
    """It is not touched, however empty it is."""
    animal = zoo.launch("deleted_folders.py", which)
    report = trip.dump(animal)
    other = animal.folder / "q"
    match what:
        case "folder" | "full folder":
            other.mkdir(0o751)
            if what == "full folder":
                (other / "x").write_text("another one")
        case "file":
            other.write_text("another one")
        case "link":
            other.symlink_to("nowhere")
    before = other.lstat()
    # Of a file, the name that was the folder's is shown with CRIU's suffix.
    ignore = ("*/target",) if what in ("file", "link") else ()
    animal.listing |= {"q", "q/x"} if what == "full folder" else {"q"}
    trip.restore(report, animal, ignore=ignore).ask()
    now = other.lstat()
    assert (now.st_ino, now.st_mode, now.st_uid) == (before.st_ino, before.st_mode, before.st_uid)


def test_the_folder_above_is_gone_too(zoo: Zoo, trip: Trip) -> None:
    """Whether a restore is the first or the second: nothing of it is made for good."""
    place = zoo.home / "place"
    place.mkdir()
    animal = zoo.launch("deleted_folders.py", "outside", str(place / "q"))
    report = trip.dump(animal)
    place.rmdir()
    trip.restore(report, animal).ask()
    assert not place.exists()


def test_nothing_is_left_of_a_restore_that_failed(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    hooks = zoo.home / "hooks" / "post-restore"
    hooks.mkdir(parents=True)
    hook = hooks / "no"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    animal = zoo.launch("deleted_folders.py", "gap")
    report = trip.dump(animal)
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"]
    assert {
        str(path.relative_to(animal.folder)) for path in animal.folder.rglob("*")
    } == animal.listing
    hook.unlink()
    trip.restore(report, animal).ask()


@pytest.mark.parametrize("which", ["first", "nested", "gap", "again"])
def test_where_anybody_may_write(which: str, zoo: Zoo, trip: Trip) -> None:
    """There criuctl makes them itself; of a file's name the deleted folders may be missing."""
    animal = zoo.launch("deleted_folders.py", which)
    report = trip.dump(animal)
    animal.folder.chmod(0o1777)
    for _ in range(2):
        restored = trip.restore(report, animal, ignore=("*/target",))
        restored.ask()
        restored.end()


_DELETED = """import ctypes, os, sys
what, mode = sys.argv[1:3]
os.chmod(".", int(mode, 8))
if what == "device":
    os.mknod("f", 0o20600, os.makedev(1, 3))
os.dup2(os.open("f", os.O_RDWR | os.O_CREAT), 9)
if what == "watch":
    watch = ctypes.CDLL(None).inotify_init()
    assert ctypes.CDLL(None).inotify_add_watch(watch, b"f", 2) > 0
    os.dup2(9, 10)
    os.dup2(watch, 9)
    os.close(watch)
os.unlink("f")
os.execvp(sys.argv[3], sys.argv[3:])
"""


def _comes_back(what: str, pid: int) -> None:
    """Descriptor 9 is /dev/null by another name, or watches what descriptor 10 is."""
    if what == "device":
        assert os.stat(f"/proc/{pid}/fd/9").st_rdev == os.makedev(1, 3)
    else:
        inode = os.stat(f"/proc/{pid}/fd/10").st_ino
        assert f"inotify wd:1 ino:{inode:x} " in Path(f"/proc/{pid}/fdinfo/9").read_text()


@pytest.mark.parametrize("mode", ["755", "777"])
@pytest.mark.parametrize("what", ["device", "watch"])
def test_deleted_devices_and_watches(what: str, mode: str, zoo: Zoo, trip: Trip) -> None:
    """CRIU makes them again, or criuctl where others could lead CRIU elsewhere."""
    animal = zoo.launch("counter.py", prefix=[sys.executable, "-c", _DELETED, what, mode])
    report = trip.dump(animal)
    for _ in range(2):
        restored = trip.restore(report, animal, equal=False)
        restored.ask()
        _comes_back(what, restored.pid)
        assert not (animal.folder / "f").exists()
        restored.end()


def test_no_deleted_device_for_a_process_that_may_make_none(zoo: Zoo, criuctl: Criuctl) -> None:
    less = ["setpriv", "--bounding-set=-mknod", "--inh-caps=-mknod"]
    animal = zoo.launch(
        "counter.py", prefix=[sys.executable, "-c", _DELETED, "device", "777", *less]
    )
    answer = criuctl("dump", animal.pid, check=False)
    assert {(f["code"], f["fd"]) for f in answer["error"]["findings"]} == {("deleted-device", 9)}
    animal.ask()


def test_no_watch_of_a_deleted_file_in_a_copy(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Where others control the folder: CRIU cannot see criuctl from the copy's own mounts."""
    animal = zoo.launch("counter.py", prefix=[sys.executable, "-c", _DELETED, "watch", "777"])
    report = trip.snapshot(animal)
    answer = criuctl("restore", report["checkpoint"], "--as", "copy", check=False)
    assert "inotify watches a deleted file" in answer["error"]["message"]
    assert not (animal.folder / "f").exists()
    animal.ask()
