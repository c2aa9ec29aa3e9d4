"""Files that changed between dump and restore: the most reported failure of CRIU."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from support.command import Criuctl
from support.pauses import paused
from support.trip import RECORDED, Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def _newer_copies(folder: Path, name: str) -> list[Path]:
    return [path for path in folder.glob(f"*{name}*") if path.name != name]


def test_a_log_that_grew(zoo: Zoo, trip: Trip) -> None:
    """Lines appended after the dump stay, the program goes on appending behind them."""
    animal = zoo.launch("counter.py")
    animal.ask()
    report = trip.dump(animal)
    log = animal.folder / "log"
    with log.open("a") as file:
        file.write("rotated by cron\n")
    restored = trip.restore(report, animal, equal=False)
    restored.ask()
    lines = log.read_text().splitlines()
    copies = _newer_copies(animal.folder, "log")
    assert lines in (["1", "rotated by cron", "2"], ["1", "2"])
    if lines == ["1", "2"]:  # put back as it was: then the newer copy is kept
        assert [copy.read_text() for copy in copies] == ["1\nrotated by cron\n"]


def test_who_has_a_file_open_that_is_set_aside_is_named(zoo: Zoo, trip: Trip) -> None:
    """He goes on in it under another name."""
    animal = zoo.launch("counter.py")
    log = animal.folder / "log"
    animal.ask()
    report = trip.dump(animal, "--with-files", log)
    with log.open("r+") as file:
        file.write("otherwise\n")
        file.flush()
        restored = trip.restore(report, animal, equal=False)
    (copy,) = _newer_copies(animal.folder, "log")
    assert copy.read_text() == "otherwise\n"
    assert [
        w
        for w in restored.answer["warnings"]
        if f"{log}: PID {os.getpid()} (" in w and "kept aside" in w
    ]


def test_a_file_that_is_read_grew(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("files.py")
    report = trip.dump(animal)
    with (animal.folder / "book").open("ab") as file:
        file.write(b"an appendix")
    trip.restore(report, animal, equal=False).ask()


@pytest.mark.parametrize("change", ["shrunk", "gone", "replaced", "same size"])
def test_carried_contents_are_put_back(change: str, zoo: Zoo, trip: Trip) -> None:
    """With ``--with-files`` the contents are in the checkpoint; a newer copy is kept aside, never
    overwritten.
    """
    animal = zoo.launch("counter.py")
    log = animal.folder / "log"
    for _ in range(3):
        animal.ask()
    report = trip.dump(animal, "--with-files", log)
    assert report["bytes"]["files"] >= 6
    if change == "gone":
        log.unlink()
    elif change == "replaced":
        log.unlink()
        log.write_text("somebody else's")
    else:
        log.write_text("1\n" if change == "shrunk" else "9\n8\n7\n")
    newer = log.read_text() if log.exists() else None
    restored = trip.restore(report, animal, equal=False)
    assert log.read_text() == "1\n2\n3\n"
    restored.ask()
    assert log.read_text() == "1\n2\n3\n4\n"
    assert [copy.read_text() for copy in _newer_copies(animal.folder, "log")] == (
        [newer] if newer is not None else []
    )


@pytest.mark.parametrize("change", ["shrunk", "gone"])
def test_without_contents_it_is_refused_precisely(
    change: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Nothing was carried and the file is not what it was: said before anything starts, with its
    path and what to do.
    """
    animal = zoo.launch("counter.py")
    for _ in range(3):
        animal.ask()
    report = trip.dump(animal, env=RECORDED)
    log = animal.folder / "log"
    log.unlink() if change == "gone" else log.write_text("1\n")
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4
    assert str(log) in refused["error"]["message"]
    assert refused["error"]["hint"]
    assert log.exists() == (change == "shrunk")
    log.write_text("1\n2\n3\n")
    trip.restore(report, animal, equal=False).ask()


def test_changed_modes_prevent_no_restore(zoo: Zoo, trip: Trip) -> None:
    """CRIU compares the modes of all that is open; a program that has it open never notices a
    chmod.
    """
    animal = zoo.launch("counter.py")
    animal.ask()
    report = trip.dump(animal)
    (animal.folder / "log").chmod(0o600)
    animal.folder.chmod(0o700)
    trip.restore(report, animal, equal=False).ask()
    assert (animal.folder / "log").stat().st_mode & 0o777 == 0o600


def test_a_missing_working_folder_is_reported_before(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal = zoo.launch("counter.py")
    report = trip.dump(animal, env=RECORDED)
    away = animal.folder.rename(animal.folder.with_name("away"))
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4
    assert "folder-missing" in [f["code"] for f in refused["error"]["findings"]]
    away.rename(animal.folder)
    trip.restore(report, animal).ask()


def test_a_missing_fifo_is_reported_before(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Also one that is an ordinary file by now; what was queued in it is in the checkpoint, and
    comes when it is there again.
    """
    animal = zoo.launch("queues.py")
    report = trip.dump(animal)
    fifo = animal.folder / "fifo"
    fifo.unlink()
    for there in (False, True):
        if there:
            fifo.touch()
        refused = criuctl("restore", report["checkpoint"], check=False)
        assert refused["exit_code"] == 4 and f"mkfifo {fifo}" in refused["error"]["hint"]
    fifo.unlink()
    os.mkfifo(fifo)
    trip.restore(report, animal, equal=False).ask()


def test_the_policy_refuse(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """An operator who wants no file touched is obeyed, though the contents are there."""
    animal = zoo.launch("counter.py")
    animal.ask()
    log = animal.folder / "log"
    report = trip.dump(animal, "--with-files", log)
    log.write_text("changed!\n")
    criuctl.extra["CRIUCTL_FILE_CONFLICTS"] = "refuse"
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4
    assert log.read_text() == "changed!\n"
    del criuctl.extra["CRIUCTL_FILE_CONFLICTS"]
    trip.restore(report, animal, equal=False).ask()


def test_the_policy_carry(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """The config can say that open writable files always travel along."""
    criuctl.extra["CRIUCTL_FILES"] = "carry"
    animal = zoo.launch("counter.py")
    animal.ask()
    report = trip.dump(animal)
    (animal.folder / "log").unlink()
    trip.restore(report, animal, equal=False).ask()
    assert (animal.folder / "log").read_text() == "1\n2\n"


def test_a_folder_travels(zoo: Zoo, trip: Trip) -> None:
    """``--with-files DIR``: everything below it, with modes, links and times."""
    animal = zoo.launch("counter.py")
    data = animal.folder / "data"
    (data / "deep" / "er").mkdir(parents=True)
    (data / "deep" / "er" / "file").write_bytes(bytes(range(256)) * 5000)
    (data / "deep" / "script").write_text("#!/bin/sh\n")
    (data / "deep" / "script").chmod(0o750)
    (data / "link").symlink_to("deep/script")
    (data / "empty").mkdir(mode=0o700)
    before = _describe(data)
    report = trip.dump(animal, "--with-files", data)
    (data / "deep" / "er" / "file").unlink()
    (data / "deep" / "script").write_text("changed\n")
    (data / "link").unlink()
    (data / "empty").rmdir()
    restored = trip.restore(report, animal, equal=False)
    after = _describe(data)
    assert {path: after.get(path) for path in before} == before
    restored.ask()


def test_what_is_named_twice_travels_once(zoo: Zoo, trip: Trip) -> None:
    """The same path again, another spelling of it, what lies below a folder that is named, too: as
    a script puts it together.
    """
    animal = zoo.launch("counter.py")
    data = animal.folder / "data"
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "file").write_text("contents\n")
    named = (
        data / "deep" / "file",
        data,
        data / "deep",
        f"{data}/deep/../deep/file",
        data / "deep" / "file",
        data,
    )
    report = trip.dump(animal, *(word for path in named for word in ("--with-files", path)))
    (data / "deep" / "file").unlink()
    trip.restore(report, animal, equal=False).ask()
    assert (data / "deep" / "file").read_text() == "contents\n"


def test_what_a_link_leads_to_travels(zoo: Zoo, trip: Trip) -> None:
    """A link that is named comes with that; a file that is named through one is the one that the
    tree has open.
    """
    animal = zoo.launch("counter.py")
    animal.ask()
    release, current, way = (animal.folder / name for name in ("release-7", "current", "way"))
    release.mkdir()
    (release / "settings").write_text("debug\n")
    current.symlink_to(release.name)
    way.symlink_to(animal.folder)
    report = trip.dump(animal, "--with-files", current, "--with-files", way / "log")
    (release / "settings").unlink()
    for path in (current, way, animal.folder / "log"):
        path.unlink()
    release.rmdir()
    trip.restore(report, animal, equal=False).ask()
    assert (current / "settings").read_text() == "debug\n"
    assert (animal.folder / "log").read_text() == "1\n2\n"


def test_an_empty_path_takes_nothing_along(zoo: Zoo, trip: Trip) -> None:
    """A variable that is not set: not the working folder."""
    animal = zoo.launch("counter.py")
    assert trip.criuctl("dump", animal.pid, "--with-files", "", check=False)["exit_code"] == 2


def test_what_cannot_be_taken_along_is_named(zoo: Zoo, trip: Trip) -> None:
    """A missing one is, before anything is touched, and what only the kernel has."""
    animal = zoo.launch("counter.py")
    for path in (str(animal.folder / "missing"), "/sys/bus/platform/drivers_probe", "/proc/1"):
        answer = trip.criuctl("dump", animal.pid, "--with-files", path, check=False)
        assert answer["exit_code"] == 4 and path in answer["error"]["message"]
    animal.ask()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_to_travel_is_gone_when_the_tree_is_frozen(
    kind: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """As with a file that its program renames at any time: the checkpoint is as the tree was at
    that moment, without it.
    """
    animal = zoo.launch("counter.py")
    named = animal.folder / kind
    named.write_text("x") if kind == "file" else named.mkdir()
    with paused(
        criuctl,
        "freeze",
        "dump",
        animal.pid,
        "--with-files",
        named,
        "--with-files",
        animal.folder / "log",
    ) as held:
        named.unlink() if kind == "file" else named.rmdir()
        held.go_on()
        assert held.command.process.wait(60) == 0, held.command.output()
    report = held.command.json()
    assert [text for text in report["warnings"] if str(named) in text]
    trip.restore(report, animal, equal=False).ask()
    animal.ask()


def _describe(folder: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content = str(path.readlink())
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = (oct(path.lstat().st_mode), content)
    return found


def test_a_database_with_its_files(zoo: Zoo, trip: Trip) -> None:
    """sqlite in a transaction, carried whole: its files are deleted and come back with locks and
    journal.
    """
    animal = zoo.launch("database.py")
    report = trip.dump(animal, "--with-files", animal.folder)
    for path in animal.folder.glob("*.db*"):
        path.unlink()
    trip.restore(report, animal, equal=False).ask()


def test_a_deleted_name_of_a_fifo(zoo: Zoo, trip: Trip) -> None:
    """One that has another name, and no writer: to open it would wait for ever, the tree frozen."""
    made = (
        "import os, sys; os.mkfifo('f'); os.link('f', 'g'); os.set_inheritable(os.open('f', "
        "os.O_RDONLY | os.O_NONBLOCK), True)"
    )
    animal = zoo.launch(
        "counter.py",
        prefix=["python3", "-c", f"{made}; os.unlink('f'); os.execvp(sys.argv[1], sys.argv[1:])"],
    )
    report = trip.dump(animal)
    (animal.folder / "g").unlink()
    restored = trip.restore(report, animal, equal=False)
    restored.ask()
    assert sorted(path.name for path in animal.folder.iterdir() if path.is_fifo()) == []
    trip.dump(restored)
