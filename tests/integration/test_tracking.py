"""Short freezes: what is stored of a tree whose memory was read while it ran is its memory of the
moment of the freeze, byte by byte.

``CRIUCTL_TEST_HOSTILE=500:40`` tries forty other hostile programs from seed 500 on, with
``CRIUCTL_TEST_SNAPSHOTS`` of each.
"""

from __future__ import annotations

import os
import shlex
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import wait_until
from support.tracking import keepers, opened, registered
from support.trip import Trip
from support.zoo import Zoo

from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.criu import binary
from criuctl.criu.pages import PAGE, unpack_entries
from criuctl.proc import written_pages
from criuctl.report import Reporter
from criuctl.store import open_store

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not written_pages.supported(), reason="the kernel does not track writes"),
]
MIB = 1 << 20
FIRST, _, COUNT = os.environ.get("CRIUCTL_TEST_HOSTILE", "1:3").partition(":")
SNAPSHOTS = int(os.environ.get("CRIUCTL_TEST_SNAPSHOTS", "2"))
ON = {"CRIUCTL_TRACK_WRITES_MIB": "1"}

# Saves the private memory of a frozen tree: a header for each mapping, then its bytes. Of a mapping
# of a file only pages that were written to are stored.
SAVE = """
import json, os, re, struct, sys
for pid in json.load(sys.stdin)["processes"]:
    with open(f"/proc/{pid}/status") as file:
        inside = re.search(r"^NSpid:.*?(\\d+)$", file.read(), re.M)[1]
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except ProcessLookupError:
        continue  # a zombie
    with open(f"/proc/{pid}/maps") as maps, open(f"FOLDER/{inside}", "wb") as out:
        for line in maps:
            words = line.split()
            anonymous = words[4] == "0" and (
                len(words) == 5 or words[5] in ("[heap]", "[stack]") or words[5][:6] == "[anon:"
            )
            memfd = len(words) > 5 and words[5].startswith("/memfd:")
            if words[1][3] == "p" and (anonymous or memfd):
                start, end = (int(word, 16) for word in words[0].split("-"))
                out.write(struct.pack("=QQQ", start, end, anonymous))
                at = start
                while at < end:
                    piece = os.pread(memory, min(end - at, 1 << 20), at)
                    out.write(piece)
                    at += len(piece)
"""


@pytest.fixture
def saved(home: Home) -> Path:
    """The folder with the memory of the frozen tree, by PID."""
    folder = home.path / "saved"
    folder.mkdir()
    HookFolder(home.path / "hooks").python("frozen", "save", SAVE.replace("FOLDER", str(folder)))
    return folder


def differing(saved: Path, criuctl: Criuctl, checkpoint: str) -> list[str]:
    """The pages that the checkpoint does not have as they were."""
    config = Config(
        store=str(criuctl.store),
        key_dir=str(criuctl.home.path / "keys"),
        cache_dir=str(criuctl.home.path / "cache"),
    )
    found = []
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        reader = repository.reader(Reporter())
        (summary,) = (one for one in repository.list() if one.id == checkpoint)
        for image in repository.manifest(summary).memory:
            if image.kind != "task":
                continue
            pages, at = {}, 0
            data = memoryview(reader.read(image.data))
            for entry in unpack_entries(reader.read(image.entries)):
                for number in range(entry.pages):
                    pages[entry.vaddr + number * PAGE] = data[at : at + PAGE]
                    at += PAGE
            assert at == len(data)
            found += [f"{image.id}: {line}" for line in _compared(saved / str(image.id), pages)]
    return found


def _compared(path: Path, pages: dict[int, memoryview]) -> list[str]:
    found: list[str] = []
    nothing = bytes(PAGE)
    with path.open("rb") as file:
        while header := file.read(24):
            start, end, anonymous = struct.unpack("=QQQ", header)
            for at in range(start, end, PAGE):
                page = file.read(PAGE)
                if page != pages.get(at, nothing if anonymous else page):
                    found.append(f"{at:#x} in {start:#x}-{end:#x}, stored: {at in pages}")
    return found


def record(criuctl: Criuctl, report: dict[str, Any]) -> dict[str, Any]:
    """How the memory was read."""
    shown: dict[str, Any] = criuctl("show", report["checkpoint"])
    memory: dict[str, Any] = shown["criu"]["memory"]
    return memory


@pytest.mark.parametrize("seed", range(int(FIRST), int(FIRST) + int(COUNT or 1)))
def test_of_hostile_memory_each_byte_is_of_the_moment_of_the_freeze(
    zoo: Zoo, criuctl: Criuctl, saved: Path, seed: int
) -> None:
    animal = zoo.launch("hostile_memory.py", str(seed), "64", quiet=False)
    for _ in range(SNAPSHOTS):
        (report,) = criuctl("snapshot", animal.pid, env=ON | {"CRIUCTL_HOOK_TIMEOUT_FROZEN": "60"})
        assert animal.alive()
        turns = animal.ask()["turns"]
        wait_until(lambda turns=turns: animal.ask()["turns"] > turns, 60, "it runs on")
        how = record(criuctl, report)
        assert differing(saved, criuctl, report["checkpoint"]) == [], how
        if how["way"] == "frozen":  # it has written too much since: all was left to CRIU
            assert how["why"] and not keepers(criuctl.home)
            return
        for path in saved.iterdir():
            path.unlink()
    assert how["known"] > 8 * MIB, how
    assert "[userfaultfd]" not in opened(animal.pid)
    (keeper,) = keepers(criuctl.home)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not registered(animal.pid), 60, "nothing is left in the process")


def test_what_was_tracked_comes_back(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    criuctl.extra |= ON
    animal = zoo.launch("memory.py", "80")
    report = trip.snapshot(animal)
    how = record(criuctl, report)
    assert how["way"] == "tracked", how
    assert how["read_ahead"] > 80 * MIB
    assert how["read_frozen"] < 8 * MIB
    animal.end()
    restored = trip.restore(report, animal)
    restored.ask()


def test_without_changes_the_same_chunks_are_stored_as_otherwise(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal = zoo.launch("memory.py", "80")
    criuctl.extra |= {"CRIUCTL_TRACK_WRITES_MIB": "0"}
    plain = trip.snapshot(animal)
    assert record(criuctl, plain)["way"] == "frozen"
    criuctl.extra |= ON
    tracked = trip.snapshot(animal)
    assert record(criuctl, tracked)["way"] == "tracked"
    assert tracked["bytes"]["new"] < 8 * MIB
    assert tracked["bytes"]["memory"] == plain["bytes"]["memory"]


def test_of_a_session_in_namespaces_of_its_own_under_its_filter(criuctl: Criuctl) -> None:
    criuctl.extra |= ON
    program = "import time\nmade = bytearray(b'x' * (16 << 20))\nwhile True: time.sleep(0.05)"
    run = criuctl.start(
        *("run", "--name", "s", "--detach", "--", sys.executable, "-c", program), json_output=False
    )
    assert run.process.wait(120) == 0, run.output()
    (report,) = criuctl("snapshot", "s")
    how = record(criuctl, report)
    assert how["way"] == "tracked", how
    assert how["read_ahead"] > 16 * MIB
    criuctl("kill", "s")
    criuctl("restore", "s")
    assert criuctl("status", "s")["state"] == "running"
    criuctl("kill", "s")


def test_where_criu_cannot_be_hooked_the_tree_is_dumped_as_always(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A program that only starts CRIU has no ioctl() of CRIU's name."""
    animal = zoo.launch("memory.py", "4")
    starter = criuctl.home.path / "starter"
    argv = " ".join(shlex.quote(word) for word in binary.find(Config()).argv)
    starter.write_text(f'#!/bin/sh\nexec {argv} "$@"\n')
    starter.chmod(0o755)
    criuctl.extra |= {**ON, "CRIUCTL_CRIU": str(starter)}
    report = trip.snapshot(animal)
    how = record(criuctl, report)
    assert how["way"] == "frozen", how
    assert "CRIU cannot be hooked" in how["why"]
    animal.end()
    trip.restore(report, animal).ask()
