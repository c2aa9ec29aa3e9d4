"""Files that a tree has mapped, shared and writable, and closed: they are memory of it, and nowhere
in CRIU's images.
"""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

SHM = Path("/dev/shm")


@pytest.fixture
def name(home: Home) -> Iterator[str]:
    """A name in /dev/shm that is this test's, with all that is derived from it; the leak guard
    (`home`) looks afterwards.
    """
    name = f"criuctl-test-{secrets.token_hex(6)}"
    yield name
    for path in SHM.glob(f"*{name}*"):
        path.unlink()


def counts(animal: Animal) -> list[int]:
    """What it has said so far; it never met a count that was not its own."""
    words = animal.output().split()
    assert [word for word in words if not word.isdecimal()] == []
    return [int(word) for word in words]


def written(animal: Animal) -> int:
    """How often this very process has written: its output is in one file with that of its
    copies.
    """
    lines = Path(f"/proc/{animal.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw:"))


def goes_on(animal: Animal) -> None:
    """It counts on, ten times at least, and neither it nor a copy meets a count of the other."""
    before = written(animal)
    wait_until(lambda: written(animal) >= before + 10, 60, "ten more counts")
    assert animal.alive()
    counts(animal)


def counting(zoo: Zoo, compiled: Path, path: Path, program: str = "sharedmap") -> Animal:
    animal = zoo.launch([str(compiled / program), str(path)], quiet=False)
    goes_on(animal)
    return animal


def in_a_row(animal: Animal) -> bool:
    found = counts(animal)
    return found == list(range(1, len(found) + 1))


@pytest.mark.parametrize("change", ["none", "gone", "other"])
def test_what_is_mapped_in_memory_comes_back(
    change: str, name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    """As it was at the freeze: after a kill, after a reboot that emptied /dev/shm, after another
    process wrote to it.
    """
    animal = counting(zoo, compiled, SHM / name)
    report = criuctl("dump", animal.pid)
    if change == "gone":
        (SHM / name).unlink()
    elif change == "other":
        (SHM / name).write_bytes(b"x" * 4096)
    plan = criuctl("restore", report["checkpoint"], "--dry-run")
    assert [f["code"] for f in plan["findings"] if str(SHM / name) in f["text"]] == [
        "file-put-back"
    ] * (change != "none")
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    assert in_a_row(restored)
    newer = [path for path in SHM.glob(f"{name}.newer-*") if path.read_bytes() == b"x" * 4096]
    assert len(newer) == (change == "other")


def test_a_snapshot_goes_back_in_time(
    name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    """The original went on writing after the freeze, and was killed."""
    animal = counting(zoo, compiled, SHM / name)
    report = criuctl("dump", animal.pid, "--leave-running")
    goes_on(animal)
    animal.end()
    output = animal.folder / "output"
    goes_on(trip.restore(report, animal, equal=False))
    assert "CORRUPT" not in output.read_text()


def test_a_copy_counts_in_a_file_of_its_own(
    name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    """Next to the living original, and next to one that is brought back later and finds its file as
    it was.
    """
    animal = counting(zoo, compiled, SHM / name)
    report = criuctl("dump", animal.pid, "--leave-running")
    copy = trip.restore(report, animal, "--as", "another", equal=False)
    assert [
        text for text in copy.answer["warnings"] if str(SHM / name) in text and "its own" in text
    ]
    for _ in range(3):
        goes_on(copy)
    assert animal.alive()
    maps = Path(f"/proc/{copy.pid}/maps").read_text()
    assert f"{SHM / name}.older-" in maps
    assert f"{SHM / name}.older-" not in Path(f"/proc/{animal.pid}/maps").read_text()
    again = trip.restore(criuctl("dump", copy.pid), copy, equal=False)
    goes_on(again)
    goes_on(animal)


def test_the_original_comes_after_its_copy(
    name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    animal = counting(zoo, compiled, SHM / name)
    report = criuctl("dump", animal.pid)
    copy = trip.restore(report, animal, "--as", "another", equal=False)
    goes_on(copy)
    original = trip.restore(report, animal, equal=False)
    goes_on(original)
    goes_on(copy)


@pytest.mark.parametrize("change", ["none", "gone"])
def test_named_semaphores_of_two_processes(
    change: str, name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    animal = zoo.launch([str(compiled / "semaphores"), f"/{name}"], quiet=False)
    goes_on(animal)
    assert len(list(SHM.glob(f"sem.{name}-*"))) == 2
    report = criuctl("dump", animal.pid)
    if change == "gone":
        for path in SHM.glob(f"sem.{name}-*"):
            path.unlink()
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    assert in_a_row(restored)


def test_a_copy_has_semaphores_of_its_own(
    name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    animal = zoo.launch([str(compiled / "semaphores"), f"/{name}"], quiet=False)
    goes_on(animal)
    report = criuctl("dump", animal.pid, "--leave-running")
    copy = trip.restore(report, animal, "--as", "another", equal=False)
    animal.end()
    goes_on(copy)


PYTHON = """
import multiprocessing, sys, time
context = multiprocessing.get_context("fork")
here, there = context.Semaphore(0), context.Semaphore(0)
count = context.Value("i", 0)
def other():
    while True:
        here.acquire()
        with count.get_lock():
            count.value += 1
        there.release()
context.Process(target=other, daemon=True).start()
while True:
    here.release()
    if not there.acquire(timeout=60):
        print("LOST", flush=True)
    print(count.value, flush=True)
    time.sleep(0.02)
"""


def test_multiprocessing_of_python(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Semaphores without a name, and memory shared by a fork: a copy next to the original, and the
    original again.
    """
    animal = zoo.launch([sys.executable, "-c", PYTHON], quiet=False)
    goes_on(animal)
    report = criuctl("dump", animal.pid, "--leave-running")
    copy = trip.restore(report, animal, "--as", "another", equal=False)
    goes_on(copy)
    goes_on(animal)
    animal.end()
    goes_on(copy)
    copy.end()
    goes_on(trip.restore(report, animal, equal=False))


def test_on_a_disk_it_is_judged(
    zoo: Zoo, trip: Trip, compiled: Path, tmp_path: Path, criuctl: Criuctl
) -> None:
    """Recorded, and refused when it has changed and its contents were not taken along, as those of
    small files are.
    """
    path = tmp_path / "mapped"
    animal = counting(zoo, compiled, path)
    report = criuctl("dump", animal.pid, env=RECORDED)
    was = path.read_bytes()
    path.write_bytes(b"x" * 4096)
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4 and str(path) in refused["error"]["message"]
    path.write_bytes(was)
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    assert in_a_row(restored)
    report = criuctl("dump", restored.pid)
    path.write_bytes(b"x" * 4096)
    restored = trip.restore(report, restored, equal=False)
    goes_on(restored)
    report = criuctl("dump", restored.pid, "--with-files", path, env=RECORDED)
    path.unlink()
    restored = trip.restore(report, restored, equal=False)
    goes_on(restored)
    assert in_a_row(restored)


def test_who_else_writes_to_it_is_named(
    name: str, zoo: Zoo, compiled: Path, criuctl: Criuctl
) -> None:
    """What a process outside the tree writes after the freeze is no part of any checkpoint."""
    animal = counting(zoo, compiled, SHM / name)
    assert "shared-outside" not in [
        f["code"] for f in criuctl("check", animal.pid, check=False)["findings"]
    ]
    with (SHM / name).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    answer = criuctl("check", animal.pid, check=False)
    shared.close()
    (finding,) = (f for f in answer["findings"] if f["code"] == "shared-outside")
    assert finding["level"] == "warning"
    assert str(SHM / name) in finding["text"] and f"{os.getpid()} (" in finding["text"]


@pytest.mark.parametrize("changed", [False, True])
def test_what_is_too_large_is_reported_before(
    changed: bool, name: str, zoo: Zoo, trip: Trip, compiled: Path, criuctl: Criuctl
) -> None:
    """Nothing of it is taken along then, but with --with-files."""
    animal = counting(zoo, compiled, SHM / name)
    small = {"CRIUCTL_SHARED_MEMORY_MAX_MIB": "0", **RECORDED}
    answer = criuctl("check", animal.pid, check=False, env=small)
    (finding,) = (f for f in answer["findings"] if f["code"] == "shared-memory-large")
    assert (
        finding["level"] == "warning"
        and "--with-files" in finding["hint"]
        and str(SHM / name) in finding["text"]
    )
    report = criuctl("dump", animal.pid, "--leave-running", env=small)
    assert [text for text in report["warnings"] if str(SHM / name) in text]
    if changed:
        goes_on(animal)
        animal.end()
        refused = criuctl("restore", report["checkpoint"], check=False)
        assert refused["exit_code"] == 4 and "--with-files" in refused["error"]["hint"]
        return
    report = criuctl("dump", animal.pid, "--with-files", SHM / name, env=small)
    assert [text for text in report["warnings"] if str(SHM / name) in text] == []
    (SHM / name).unlink()
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    assert in_a_row(restored)


PRIVATE = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
private = mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE)
file.close()
count = 0
while True:
    count += 1
    if count > 1 and int.from_bytes(private[:8], "little") != count - 1:
        print("CORRUPT", flush=True)
    private[:8] = count.to_bytes(8, "little")
    print(count, flush=True)
    time.sleep(0.02)
"""


def test_private_mappings_take_nothing_along(
    name: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """What they have changed is memory, which CRIU saves; a file that is gone is reported before
    anything is begun.
    """
    path = SHM / name
    path.write_bytes(bytes(4096))
    animal = zoo.launch([sys.executable, "-c", PRIVATE, str(path)], quiet=False)
    goes_on(animal)
    report = criuctl("dump", animal.pid, env=RECORDED)
    assert report["bytes"].get("files", 0) == 0
    path.unlink()
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4 and str(path) in refused["error"]["message"]
    path.write_bytes(bytes(4096))
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    assert in_a_row(restored)


def test_a_trial_leaves_it_alone(name: str, zoo: Zoo, compiled: Path, criuctl: Criuctl) -> None:
    animal = counting(zoo, compiled, SHM / name)
    report = criuctl("dump", animal.pid, "--leave-running")
    criuctl("verify", report["checkpoint"], "--restore")
    goes_on(animal)
    assert list(SHM.glob(f"{name}*")) == [SHM / name]


FORKED = """
import mmap, os, time
shared = mmap.mmap(-1, 4096)
child = os.fork()
if not child:
    os.setsid()
else:
    print(child, flush=True)
time.sleep(1000)
"""


def test_memory_without_a_name_shared_with_a_parent(zoo: Zoo, criuctl: Criuctl) -> None:
    """The parent is outside of the tree: what it writes after the freeze is no part of it."""
    parent = zoo.launch([sys.executable, "-c", FORKED], quiet=False)
    child = int(wait_until(lambda: parent.output().strip(), 60, "a child"))
    findings = criuctl("check", child, check=False)["findings"]
    (finding,) = (f for f in findings if f["code"] == "shared-outside")
    assert finding["level"] == "warning" and f"{parent.pid} (" in finding["text"]
    findings = criuctl("check", parent.pid, check=False)["findings"]
    assert [f for f in findings if f["code"] == "shared-outside"] == []


SYSTEM_V = """
import ctypes, struct, time
libc = ctypes.CDLL(None, use_errno=True)
if {what!r} == "queue":
    number = libc.msgget(0, 0o600)
    libc.msgsnd(number, struct.pack("q", 1) + b"message", 7, 0)
else:
    number = libc.semget(0, 3, 0o600)
    libc.semop(number, struct.pack("HhH", 2, 1, 0), 1)
print(number, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("what", ["queue", "semaphores"])
def test_system_v_objects_of_the_host_are_reported(what: str, zoo: Zoo, criuctl: Criuctl) -> None:
    """They are in no checkpoint; in a namespace of the tree's own they are."""
    code = SYSTEM_V.format(what=what)
    animal = zoo.launch([sys.executable, "-c", code], quiet=False)
    number = int(wait_until(lambda: animal.output().strip(), 60, "a number"))
    try:
        findings = criuctl("check", animal.pid, check=False)["findings"]
        (finding,) = (f for f in findings if f["code"] == "sysv-ipc")
        assert (
            finding["level"] == "warning"
            and f" {number} " in finding["text"]
            and "unshare --ipc" in finding["hint"]
        )
    finally:
        subprocess.run(
            ["ipcrm", "-q" if what == "queue" else "-s", str(number)], check=True, timeout=60
        )
    inside = zoo.launch(
        [sys.executable, "-c", code], name="inside", prefix=["unshare", "--ipc"], quiet=False
    )
    wait_until(lambda: inside.output().strip(), 60, "a number")
    assert [
        f for f in criuctl("check", inside.pid, check=False)["findings"] if f["code"] == "sysv-ipc"
    ] == []
