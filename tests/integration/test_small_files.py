"""Files open for writing that are small travel with every checkpoint: programs remove or rewrite
such files themselves.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

TIDY = """
import os, signal, sys, time
def end(*_):
    os.unlink("pid")
    sys.exit()
signal.signal(signal.SIGTERM, end)
pid = open("pid", "w+")
pid.write(f"{os.getpid()}\\n")
pid.flush()
while True:
    pid.seek(0)
    print(pid.read().strip(), flush=True)
    time.sleep(0.02)
"""


def words(animal: Animal) -> int:
    return len(animal.output().split())


def goes_on(animal: Animal) -> None:
    before = words(animal)
    wait_until(lambda: words(animal) >= before + 5, 60, "five more words")


def gone(animal: Animal) -> None:
    wait_until(lambda: not animal.alive(), 60, "its end")
    animal.end()


@pytest.mark.parametrize("ending", ["by itself", "kill -9", "copy"])
def test_a_program_that_removes_its_own_file(
    ending: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """After its end, however it came, and next to itself, a snapshot comes back with no option at
    all.
    """
    animal = zoo.launch([sys.executable, "-c", TIDY], name="tidy", quiet=False)
    goes_on(animal)
    report = criuctl("dump", animal.pid, "--leave-running")
    if ending != "copy":
        os.kill(animal.pid, signal.SIGTERM if ending == "by itself" else signal.SIGKILL)
        gone(animal)
    assert (animal.folder / "pid").exists() == (ending != "by itself")
    restored = trip.restore(
        report, animal, *(["--as", "another"] if ending == "copy" else []), equal=False
    )
    goes_on(restored)
    assert set(animal.output().split()) == {str(animal.pid)}


WRITER = """
import os, sys
files = [open(f"file-{mib}", "w+b") for mib in map(int, sys.argv[1:])]
for file, mib in zip(files, map(int, sys.argv[1:])):
    file.truncate(mib << 20)
    file.write(b"begin")
    file.flush()
print("ready", flush=True)
sys.stdin = None
import signal
signal.pause()
"""


def test_the_smallest_come_first(zoo: Zoo, criuctl: Criuctl) -> None:
    """Up to the bound in all; of the others `check` says before the freeze what is missing, and
    what takes it along.
    """
    animal = zoo.launch([sys.executable, "-c", WRITER, "2", "9", "1", "6"], name="writer")
    wait_until(animal.output, 60, "ready")
    (finding,) = (
        f for f in criuctl("check", animal.pid)["findings"] if f["code"] == "contents-stay"
    )
    assert finding["level"] == "info" and finding["hint"].count("--with-files") == 1
    assert str(animal.folder / "file-9") in finding["text"] and "file-6" not in finding["text"]
    report = criuctl("dump", animal.pid, "--leave-running")
    files = criuctl("show", report["checkpoint"])["files"]
    carried = {Path(f["path"]).name for f in files if f.get("data") or f.get("carried")}
    assert carried >= {"file-1", "file-2", "file-6"} and "file-9" not in carried
    env = {"CRIUCTL_FILES_SMALL_MIB": "0"}
    (finding,) = (
        f for f in criuctl("check", animal.pid, env=env)["findings"] if f["code"] == "contents-stay"
    )
    assert "file-9" in finding["text"] and "file-6" in finding["text"]


COUNTER = """
public class Counter {
    public static void main(String[] a) throws Exception {
        for (long n = 1; ; n++) { System.out.println(n); Thread.sleep(20); }
    }
}
"""


@pytest.mark.parametrize("ending", ["kill", "kill -9", "copy"])
def test_a_jvm_as_it_comes(ending: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """It has /tmp/hsperfdata_USER/PID mapped, writes to it all the time, and removes it when it
    ends.
    """
    if shutil.which("java") is None:
        pytest.skip("no Java on this machine; the kind is tested with a program of our own, too")
    source = zoo.home / "Counter.java"
    source.write_text(COUNTER)
    animal = zoo.launch(["java", "-Xmx64m", str(source)], name="java", quiet=False)
    goes_on(animal)
    (tell,) = Path("/tmp").glob(f"hsperfdata_*/{animal.pid}")
    report = criuctl("dump", animal.pid, "--leave-running", timeout=300)
    if ending != "copy":
        os.kill(animal.pid, signal.SIGTERM if ending == "kill" else signal.SIGKILL)
        gone(animal)
        assert tell.exists() == (ending == "kill -9")
    restored = trip.restore(
        report, animal, *(["--as", "another"] if ending == "copy" else []), equal=False
    )
    try:
        goes_on(restored)
        restored.end()
        animal.end()
    finally:
        for path in tell.parent.glob(f"{tell.name}*"):
            path.unlink()


HOLDER = """
import os, sys, time
place = sys.argv[1]
os.makedirs(place, exist_ok=True)
pid = open(f"{place}/pid", "w+")
pid.write("held")
pid.flush()
while True:
    pid.seek(0)
    print(pid.read(), flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def disk(zoo: Zoo) -> Iterator[tuple[Path, list[str]]]:
    """A mount point, and the command that mounts a file system on a disk there; it is mounted."""
    point, behind = zoo.home / "disk", zoo.home / "behind"
    for folder in (point, behind):
        folder.mkdir()
    command = ["mount", "--bind", str(behind), str(point)]
    subprocess.run(command, check=True, timeout=60)
    try:
        yield point, command
    finally:
        subprocess.run(["umount", point], check=True, timeout=60)


@pytest.mark.parametrize("place", ["sub", "."])
def test_a_disk_that_is_not_mounted(
    place: str, disk: tuple[Path, list[str]], zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Nothing is put where the disk would hide it; mounted again, even empty, the file comes back
    on it.
    """
    point, command = disk
    animal = zoo.launch(
        [sys.executable, "-c", HOLDER, str(point / place)], name="holder", quiet=False
    )
    goes_on(animal)
    report = trip.dump(animal)
    subprocess.run(["umount", point], check=True, timeout=60)
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4
    (finding,) = [f for f in refused["error"]["findings"] if f["level"] == "error"]
    assert str(point) in finding["text"] and f"mount {point}" in finding["hint"]
    assert list(point.iterdir()) == []
    subprocess.run(command, check=True, timeout=60)
    (point / place / "pid").unlink()
    if place != ".":
        (point / place).rmdir()
    restored = trip.restore(report, animal, equal=False)
    goes_on(restored)
    restored.end()
    assert (zoo.home / "behind" / place / "pid").read_text() == "held"


def test_memory_that_a_reboot_has_emptied(zoo: Zoo, trip: Trip) -> None:
    """Folders in /run, /tmp and /dev/shm are gone then, and are made again."""
    place = zoo.home / "memory"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "memory", place], check=True, timeout=60)
    try:
        animal = zoo.launch(
            [sys.executable, "-c", HOLDER, str(place / "sub")], name="holder", quiet=False
        )
        goes_on(animal)
        report = trip.dump(animal)
        shutil.rmtree(place / "sub")
        restored = trip.restore(report, animal, equal=False)
        goes_on(restored)
        restored.end()
    finally:
        subprocess.run(["umount", place], check=True, timeout=60)
