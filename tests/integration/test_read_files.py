"""Files that a tree only reads, and that are other ones at the restore: scripts being run, and
mapped data.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

PADDING = "# what a shell has not read yet when it waits\n" * 1000
SCRIPT = f"""echo begin
while [ ! -e go-1 ]; do sleep 0.02; done
{PADDING}echo second
while [ ! -e go-2 ]; do sleep 0.02; done
{PADDING}echo third
while [ ! -e go-3 ]; do sleep 0.02; done
"""
OTHER = SCRIPT.replace("second", "WRONG!").replace("third", "WRONG")
assert len(OTHER) == len(SCRIPT)

LINES = """
import os, sys, time
with open(sys.argv[1]) as lines:
    for number, line in enumerate(lines):
        print(line.split()[0], flush=True)
        while not os.path.exists(f"go-{number + 1}"):
            time.sleep(0.02)
"""
TEXT = "".join(f"{word} {'.' * 20_000}\n" for word in ("begin", "second", "third"))
OTHER_TEXT = TEXT.replace("second", "WRONG!").replace("third", "WRONG")


class Reader:
    """A program that reads a file bit by bit, and prints a word of each part."""

    def __init__(self, zoo: Zoo, interpreter: str) -> None:
        self.file = zoo.home / f"read-by-{interpreter}"
        self.old, self.other = (TEXT, OTHER_TEXT) if interpreter == "python" else (SCRIPT, OTHER)
        self.file.write_text(self.old)
        argv = [sys.executable, "-c", LINES] if interpreter == "python" else [interpreter]
        self.animal = zoo.launch([*argv, str(self.file)], name=interpreter, quiet=False)
        wait_until(lambda: self.animal.output() == "begin\n", 60, "its first word")

    def change(self, how: str) -> None:
        """Let time pass over the file."""
        if how == "renamed":
            new = self.file.with_name("new")
            new.write_text(f"# a line more\n{self.other}")
            new.rename(self.file)
        elif how == "rewritten":
            self.file.write_text(self.other)
        elif how == "deleted":
            self.file.unlink()
        else:
            os.utime(self.file, ns=(0, 0))

    def finishes(self, animal: Animal) -> None:
        """It goes on with what it has begun to read."""
        (animal.folder / "go-1").touch()
        wait_until(
            lambda: "second\n" in animal.output() or "WRONG" in animal.output(),
            60,
            "its second word",
        )
        (animal.folder / "go-2").touch()
        wait_until(lambda: animal.output().count("\n") >= 3, 60, "its third word")
        assert animal.output() == "begin\nsecond\nthird\n"


def dump(criuctl: Criuctl, animal: Animal, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Dump and end a tree whose processes come and go."""
    report: dict[str, Any] = criuctl("dump", animal.pid, env=env)
    wait_until(lambda: not animal.alive(), 60, "its end")
    animal.end()
    return report


def findings(
    criuctl: Criuctl, report: dict[str, Any], path: Path, *options: str
) -> list[tuple[str, str]]:
    """What ``--dry-run`` says of a file."""
    plan = criuctl("restore", report["checkpoint"], "--dry-run", *options, check=False)
    found = plan["findings"] if "findings" in plan else plan["error"]["findings"]
    return [(f["level"], f["code"]) for f in found if str(path) in f["text"]]


@pytest.mark.parametrize("interpreter", ["dash", "bash", "python"])
@pytest.mark.parametrize("change", ["renamed", "rewritten", "deleted", "touched"])
def test_a_script_goes_on_as_it_was(
    interpreter: str, change: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    reader = Reader(zoo, interpreter)
    report = dump(criuctl, reader.animal)
    reader.change(change)
    now = reader.file.read_text() if reader.file.exists() else None
    expected = [] if change == "touched" else [("warning", "file-deleted-copy")]
    assert findings(criuctl, report, reader.file) == expected
    restored = trip.restore(report, reader.animal, equal=False)
    warned = [w for w in restored.answer["warnings"] if str(reader.file) in w]
    assert len(warned) == len(expected)
    # Nothing of the user's was changed, and nothing was left.
    assert (reader.file.read_text() if reader.file.exists() else None) == now
    assert [
        path for path in zoo.home.iterdir() if path.name.startswith(f"{reader.file.name}.")
    ] == []
    again = trip.restore(dump(criuctl, restored), restored, equal=False)
    reader.finishes(again)


@pytest.mark.parametrize("interpreter", ["dash", "bash", "python"])
def test_a_copy_next_to_its_original(
    interpreter: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    reader = Reader(zoo, interpreter)
    report = criuctl("dump", reader.animal.pid, "--leave-running")
    reader.change("renamed")
    copy = trip.restore(report, reader.animal, "--as", "copy", equal=False)
    reader.animal.end()
    reader.finishes(copy)


def test_what_the_policy_says(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Another script is refused, or read on, where that is asked for, and refused where its
    contents stayed behind.
    """
    reader = Reader(zoo, "dash")
    report = dump(criuctl, reader.animal)
    reader.change("rewritten")
    assert findings(criuctl, report, reader.file, "--files", "refuse") == [("error", "file-refuse")]
    assert findings(criuctl, report, reader.file, "--files", "keep") == [
        ("warning", "file-moved-on")
    ]
    refused = criuctl("restore", report["checkpoint"], "--files", "refuse", check=False)
    assert refused["exit_code"] == 4 and str(reader.file) in refused["error"]["message"]
    restored = trip.restore(report, reader.animal, "--files", "keep", equal=False)
    (restored.folder / "go-1").touch()
    wait_until(lambda: "WRONG!" in restored.output(), 60, "the other script's word")
    report = dump(criuctl, restored, RECORDED)
    reader.file.write_text(f"{reader.old} # one more change")
    assert findings(criuctl, report, reader.file) == [("error", "file-refuse")]


MAPPER = """
import mmap, os, sys, time
with open(sys.argv[1], "rb") as file:
    table = mmap.mmap(file.fileno(), 0, flags=getattr(mmap, sys.argv[2]), prot=mmap.PROT_READ)
while True:
    print(table[:3].decode(), table[-3:].decode(), flush=True)
    time.sleep(0.02)
"""


def mapper(zoo: Zoo, mode: str, size: int) -> tuple[Animal, Path]:
    """A program that maps a file of so many bytes, and prints its ends."""
    table = zoo.home / "table"
    table.write_bytes(b"old".ljust(size - 3, b".") + b"old")
    animal = zoo.launch(
        [sys.executable, "-c", MAPPER, str(table), mode], name="mapper", quiet=False
    )
    wait_until(animal.output, 60, "its first word")
    return animal, table


def rewritten(table: Path) -> None:
    size = table.stat().st_size
    with table.open("r+b") as file:
        file.write(b"new")
        file.seek(size - 3)
        file.write(b"new")


def removed(table: Path) -> None:
    table.unlink()


def emptied_folder(table: Path) -> None:
    """As an upgrade of a package does: the file comes again, shorter."""
    table.unlink()
    table.write_bytes(b"new")


@pytest.mark.parametrize("change", [rewritten, removed, emptied_folder])
def test_mapped_data_is_as_it_was(
    change: Callable[[Path], None], zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal, table = mapper(zoo, "MAP_PRIVATE", 300_000)
    report = dump(criuctl, animal)
    change(table)
    now = table.read_bytes() if table.exists() else None
    assert findings(criuctl, report, table) == [("warning", "file-deleted-copy")]
    before = animal.output().count("\n")
    restored = trip.restore(report, animal, equal=False)
    wait_until(lambda: restored.output().count("\n") > before + 10, 60, "ten more lines")
    assert set(restored.output().split()) == {"old"}
    assert (table.read_bytes() if table.exists() else None) == now
    report = dump(criuctl, restored)
    before = animal.output().count("\n")
    restored = trip.restore(report, restored, equal=False)
    wait_until(lambda: restored.output().count("\n") > before + 10, 60, "ten more lines")
    assert set(restored.output().split()) == {"old"}


@pytest.mark.parametrize(("mode", "size"), [("MAP_SHARED", 300_000), ("MAP_PRIVATE", 2 << 20)])
def test_mapped_data_that_does_not_travel(
    mode: str, size: int, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """What is shared shows the program what others write, and what is large stays behind: a rewrite
    is reported.
    """
    animal, table = mapper(zoo, mode, size)
    report = dump(criuctl, animal)
    assert findings(criuctl, report, table) == []
    rewritten(table)
    assert findings(criuctl, report, table) == [("warning", "file-moved-on")]
    assert findings(criuctl, report, table, "--files", "refuse") == [("error", "file-refuse")]
    restored = trip.restore(report, animal, equal=False)
    wait_until(lambda: restored.output().endswith("new new\n"), 60, "what is there now")


def test_a_touched_table_is_not_reported(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    animal, table = mapper(zoo, "MAP_PRIVATE", 300_000)
    report = dump(criuctl, animal)
    other = table.with_name("same")
    shutil.copyfile(table, other)
    other.rename(table)
    assert findings(criuctl, report, table) == []
    assert [
        w for w in trip.restore(report, animal, equal=False).answer["warnings"] if str(table) in w
    ] == []


def test_a_missing_folder_on_the_way(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """The script was removed with its folder: that does not come back, nor is it needed."""
    folder = zoo.home / "release-7"
    folder.mkdir()
    script = folder / "job"
    script.write_text(SCRIPT)
    animal = zoo.launch(["bash", str(script)], name="job", quiet=False)
    wait_until(animal.output, 60, "its first word")
    report = dump(criuctl, animal)
    shutil.rmtree(folder)
    restored = trip.restore(report, animal, equal=False)
    assert not folder.exists()
    (animal.folder / "go-1").touch()
    wait_until(lambda: "second" in restored.output(), 60, "its second word")
