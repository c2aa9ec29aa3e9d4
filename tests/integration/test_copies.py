"""Where a checkpoint comes back to: its old PIDs, a namespace of its own, next to its living
original, and again and again.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl
from support.keeper import Keeper, start_time, wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

IN_THE_FOLDER = "works in the folder of its original"  # what is said of each copy

pytestmark = pytest.mark.integration

CYCLES = 20


@pytest.mark.parametrize("pids", ["same", "private"])
def test_twenty_times(pids: str, zoo: Zoo, trip: Trip) -> None:
    """Dump and restore twenty times: memory, descriptors and files are equal each time, and nothing
    adds up.
    """
    animal = zoo.launch("counter.py", "1")
    (animal.folder / "book").write_bytes(os.urandom(10_000))
    digests = set()
    for cycle in range(1, CYCLES + 1):
        report = trip.dump(animal)
        animal = trip.restore(report, animal, "--pids", pids)
        answer = animal.ask()
        assert answer["counter"] == cycle
        digests.add(
            (answer["heap"], hashlib.sha256((animal.folder / "book").read_bytes()).hexdigest())
        )
        assert animal.answer["incarnation"] == report["incarnation"] + 1
    assert len(digests) == 1
    assert (animal.folder / "log").read_text().split() == [str(n) for n in range(1, CYCLES + 1)]


def test_no_incarnation_comes_twice(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Though a kill has this host forget the session: the store knows."""
    animal = zoo.launch("counter.py")
    report = trip.dump(animal, "--name", "web")
    assert report["incarnation"] == 1
    for incarnation in (2, 3, 4):
        animal = trip.restore(report, animal, equal=False)
        assert animal.answer["incarnation"] == incarnation
        criuctl("kill", "web")
        wait_until(lambda animal=animal: not zoo.find(animal), 20, "it is gone")
    assert trip.restore(report, animal, "--as", "copy", equal=False).answer["incarnation"] == 1


def test_an_orphan_holds_its_numbers(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """One of the tree's session that is not below its root stays, and as long as it does, no
    session can get that number.
    """
    animal = zoo.launch("counter.py", prefix=["sh", "-c", '(sleep 1000 &); exec "$@"', "sh"])
    found = {finding["code"]: finding for finding in criuctl("check", animal.pid)["findings"]}
    orphan = found["left-behind"]["pid"]
    try:
        report = trip.dump(animal)
        refused = criuctl("restore", report["checkpoint"], "--pids", "same", check=False)
        assert refused["exit_code"] == 4 and str(animal.pid) in refused["error"]["message"]
        animal = trip.restore(report, animal)
        animal.ask()
    finally:
        os.kill(orphan, signal.SIGKILL)
    animal = trip.restore(trip.dump(animal), animal)
    animal.ask()


def test_its_pids_are_taken(zoo: Zoo, trip: Trip, keeper: Keeper) -> None:
    """Another process has the root's PID by now: auto takes a private namespace, same refuses and
    says who.
    """
    animal = zoo.launch("counter.py")
    report = trip.dump(animal)
    squatter = _occupy(keeper, zoo, animal.pid)
    refused = trip.criuctl("restore", report["checkpoint"], "--pids", "same", check=False)
    assert refused["exit_code"] == 4
    assert str(animal.pid) in refused["error"]["message"]
    restored = trip.restore(report, animal, "--pids", "auto")
    assert restored.answer["inner_pid"] == animal.pid
    restored.ask()
    os.kill(squatter, 9)


def _occupy(keeper: Keeper, zoo: Zoo, pid: int) -> int:
    """A sleeping process with exactly this PID (the last PID of the namespace is set just before it
    is forked).
    """
    for _ in range(50):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        got = keeper.spawn(["sleep", "600"], env=zoo.environment(), cwd=zoo.home)
        if got.pid == pid:
            zoo.adopt(pid, zoo.animals[0])
            return pid
        got.kill()
    raise AssertionError(f"could not get a process of PID {pid}")


@pytest.mark.parametrize("pids", ["auto", "same"])
def test_a_pid_of_the_tree_is_taken_at_the_last_moment(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, keeper: Keeper
) -> None:
    """Without --pids same it is tried again, in a PID namespace; with it, the restore fails and
    says so.
    """
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal)
    with paused(criuctl, "files", "restore", report["checkpoint"], "--pids", pids) as held:
        squatter = _occupy(keeper, zoo, animal.pid)
        held.go_on()
        code = held.command.process.wait(120)
    answer = held.command.json()
    ends = [e["exit_code"] for e in criuctl("events") if e["operation"] == "restore"]
    if pids == "same":
        assert (
            code == 6 and "a PID of the tree is taken" in answer["error"]["message"] and ends == [6]
        )
    else:
        assert (code, answer["pids"], ends) == (0, "private", [0]), held.command.output()
        zoo.adopt(answer["pid"], animal).ask()
    os.kill(squatter, 9)


def test_a_zombie_of_its_own_is_waited_for(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """A parent that does not reap at once: the restore waits for the zombie rather than giving up
    the PIDs.
    """
    folder = zoo.home / "counter"
    folder.mkdir()
    program = Path(__file__).parent / "programs" / "counter.py"
    # The parent reaps its child only when a file appears.
    script = "import os,sys,time\npid = os.spawnvp(os.P_NOWAIT, sys.argv[2], sys.argv[2:])\n"
    script += "while not os.path.exists(sys.argv[1]): time.sleep(.01)\nos.wait()"
    import sys

    reap = zoo.home / "reap-now"
    lazy = zoo.launch(
        [
            sys.executable,
            "-S",
            "-c",
            script,
            str(reap),
            sys.executable,
            "-S",
            str(program),
            str(folder),
        ],
        name="counter",
    )
    pid = int(
        wait_until(
            lambda: (folder / "ready").exists() and (folder / "ready").read_text(), 60, "ready"
        )
    )
    animal = zoo.adopt(pid, lazy)
    animal.remember()
    dump = criuctl.start("dump", pid)
    wait_until(lambda: oracle.stat_of(pid)[:1] == ["Z"], 60, "the dumped root is a zombie")
    reap.touch()
    assert dump.process.wait(120) == 0, dump.output()
    restored = trip.restore(dump.json(), animal, equal=False)
    assert restored.pid == pid
    restored.ask()


def test_a_copy_next_to_the_original(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """``--as`` restores a copy under a new name while the original lives: two counters that go
    their own ways.
    """
    original = zoo.launch("counter.py")
    report = trip.snapshot(original, "--name", "first")
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"] == 9
    copy = trip.restore(report, original, "--as", "second", "--share-files")
    assert copy.answer["session"] == "second"
    assert [original.ask()["counter"], original.ask()["counter"], copy.ask()["counter"]] == [
        1,
        2,
        1,
    ]
    third = trip.restore(report, original, "--as", "third", equal=False)
    assert third.ask()["counter"] == 1
    assert criuctl("restore", report["checkpoint"], "--as", "second", check=False)["exit_code"] == 9
    assert copy.ask()["counter"] == 2


def test_a_copy_from_a_store_that_takes_no_writes(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, tmp_path: Path
) -> None:
    """A backup that is mounted read-only gives no lease: a copy comes without one, and says so; the
    session itself stays away.
    """
    original = zoo.launch("counter.py")
    store = tmp_path / "backup"
    criuctl("store", "init", "--store", store)
    report = trip.dump(original, "--name", "first", "--store", store)
    subprocess.run(["mount", "--bind", str(store), str(store)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(store)], check=True)
        refused = criuctl("restore", "first", "--store", store, check=False)
        assert (refused["exit_code"], refused["error"]["code"]) == (7, "store-denied")
        copy = trip.restore(
            report, original, "--as", "second", "--share-files", "--store", str(store)
        )
        (warning,) = (text for text in copy.answer["warnings"] if "takes no lease" in text)
        assert "is mounted read-only" in warning
        assert copy.ask()["counter"] == 1
    finally:
        subprocess.run(["umount", str(store)], check=True)


def lockers(path: Path) -> set[int]:
    """The processes that have a descriptor which shows a lock on this file."""
    status = path.stat()
    key = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    found = set()
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with suppress(OSError):
            if any(
                line.startswith("lock:") and key in line for line in info.read_text().splitlines()
            ):
                found.add(int(info.parts[2]))
    return found


def test_a_copy_locks_files_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """A lock has one holder: the copy has its own next to the original's files, which stay locked
    by the original alone.
    """
    original = zoo.launch("locks.py")
    names = ("exclusive", "shared", "ranges", "description", "childs")
    before = {name: lockers(original.folder / name) for name in names}
    assert all(before.values())
    report = trip.snapshot(original, "--name", "first")
    copy = trip.restore(report, original, "--as", "second", equal=False)
    own = {Path(f["path"]).name: Path(f["own_copy"]) for f in copy.answer["files"]}
    assert own.keys() == set(names)
    mine, theirs = set(oracle.tree(copy.pid)), set(oracle.tree(original.pid))
    for name in names:
        assert own[name].read_text() == "x" * 1000
        assert lockers(own[name]) and lockers(own[name]) <= mine, name
        assert lockers(original.folder / name) == before[name] and before[name] <= theirs, name
    text = next(
        text for text in copy.answer["warnings"] if str(original.folder / "exclusive") in text
    )
    assert "has locked it; the copy gets its own next to it" in text and "by its path" in text
    original.ask()
    copy.end()
    original.ask()
    original.end()
    trip.restore(report, original, "--as", "third", "--share-files", equal=False).ask()


LOCKER = """
import fcntl, os, sys, time
for path in sys.argv[1:-1]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
log = open(sys.argv[-1], "w")
while True:
    print("one more", file=log, flush=True)
    time.sleep(0.05)
"""


def test_a_copy_gets_all_that_it_writes_to_for_its_own_or_no_lock(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A lock on a folder, or on a file whose contents were not taken along: refused at once, naming
    it and its holder.

    An empty lock file, as those of flock(1) are, can be had; the log, which it stands for, is not
    shared then.
    """
    home = zoo.home / "places"
    home.mkdir()
    for name, size in (("empty", 0), ("data", 2 << 20)):  # the contents of a smaller one travel
        (home / name).write_bytes(os.urandom(size))
    for locked in ([home], [home / "empty", home / "data"]):
        log = home / f"log-{len(locked)}"
        original = zoo.launch(
            [sys.executable, "-S", "-c", LOCKER, *map(str, locked), str(log)],
            name=log.name,
            quiet=False,
        )
        wait_until(log.exists, 60, "it writes")
        criuctl("dump", original.pid, "--leave-running", "--name", log.name)
        refused = criuctl("restore", log.name, "--as", "second", check=False)
        assert refused["exit_code"] == 4
        found = {
            f["text"].partition(" is locked by ")[0]: f
            for f in refused["error"]["findings"]
            if f["code"] == "file-locked"
        }
        assert set(found) == {str(path) for path in locked}
        assert all(
            f"process {original.pid} (" in f["text"] and "--with-files" in f["hint"]
            for f in found.values()
        )
        assert not list(home.glob("*.older-*"))
        original.end()
    log = home / "log"
    original = zoo.launch(
        [sys.executable, "-S", "-c", LOCKER, str(home / "empty"), str(log)], name="log", quiet=False
    )
    wait_until(log.exists, 60, "it writes")
    report = criuctl("dump", original.pid, "--leave-running", "--name", "log")
    copy = criuctl("restore", report["checkpoint"], "--as", "second")
    zoo.adopt(copy["pid"], original)
    own = {Path(f["path"]).name: Path(f["own_copy"]) for f in copy["files"]}
    assert own.keys() == {"empty", "log"}
    assert (lockers(home / "empty"), lockers(own["empty"])) == ({original.pid}, {copy["pid"]})
    sizes = own["log"].stat().st_size, log.stat().st_size
    wait_until(
        lambda: own["log"].stat().st_size > sizes[0] and log.stat().st_size > sizes[1],
        60,
        "each writes to its own",
    )


def test_a_copy_leaves_the_files_that_the_original_writes_to(zoo: Zoo, trip: Trip) -> None:
    """They have grown since; the copy gets its own next to them, as they were, and each goes on in
    its own.
    """
    original = zoo.launch("ledger.py")
    ledger, mapped = original.folder / "ledger", original.folder / "mapped"
    original.ask()
    report = trip.snapshot(original, "--name", "first", "--with-files", mapped)
    sharing = trip.restore(report, original, "--as", "sharing", "--share-files", equal=False)
    (warning,) = (text for text in sharing.answer["warnings"] if f"{ledger}:" in text)
    assert f"{ledger}: PID {original.pid} (" in warning and "writes to it as well" in warning
    sharing.end()
    inodes = {path: path.stat().st_ino for path in (ledger, mapped)}
    assert original.ask()["inode"] == inodes[ledger]
    copy = trip.restore(report, original, "--as", "second", equal=False)
    own = {Path(f["path"]): Path(f["own_copy"]) for f in copy.answer["files"]}
    assert own.keys() == inodes.keys()
    assert all(
        path.stat().st_ino == inodes[path] and other.name.startswith(f"{path.name}.older-")
        for path, other in own.items()
    )
    assert any(str(ledger) in text for text in copy.answer["warnings"])
    assert own[ledger].read_text() == "line 1\n"
    answer = copy.ask()
    assert (answer["inode"], answer["count"]) == (own[ledger].stat().st_ino, 2)
    assert (original.ask()["count"], copy.ask()["count"]) == (3, 3)
    assert ledger.read_text() == own[ledger].read_text() == "line 1\nline 2\nline 3\n"
    assert (ledger.stat().st_mode, ledger.stat().st_size) == (
        own[ledger].stat().st_mode,
        own[ledger].stat().st_size,
    )
    again = trip.restore(trip.dump(copy, "--name", "second"), copy, equal=False)
    assert (again.ask()["inode"], again.answer["files"]) == (answer["inode"], [])


def test_a_copy_is_refused_files_that_another_writes_to_and_it_has_not_open(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """It would open them by their paths, some day, and take them for its own."""
    original = zoo.launch("counter.py")
    carried = original.folder / "carried"
    carried.mkdir()
    shared = carried / "shared"
    shared.write_text("as it was")
    report = trip.snapshot(original, "--name", "first", "--with-files", carried)
    with shared.open("w") as file:
        file.write("newer, and longer")
        file.flush()
        refused = criuctl("restore", "first", "--as", "second", check=False)
        assert refused["exit_code"] == 4
        (found,) = (f for f in refused["error"]["findings"] if f["level"] == "error")
        assert (
            f"{shared}: " in found["text"]
            and f"PID {os.getpid()} (" in found["text"]
            and "--files keep" in found["hint"]
        )
        assert [path.name for path in carried.iterdir()] == ["shared"]
        trip.restore(report, original, "--as", "second", "--files", "keep", equal=False).ask()
    # it is not written to any more
    copy = trip.restore(report, original, "--as", "third", equal=False)
    assert shared.read_text() == "newer, and longer"
    (warning,) = (text for text in copy.answer["warnings"] if str(shared) in text)
    assert warning.startswith(
        f"{shared}: is another one than at the freeze, and stays so for the original"
    )


def test_an_older_checkpoint_and_names(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """NAME is the newest, NAME@N the N-th, NAME@-2 the one before; each holds its own moment."""
    animal = zoo.launch("counter.py")
    ids = []
    for _ in range(3):
        animal.ask()
        ids.append(trip.snapshot(animal, "--name", "saved", "--label", "kind=test")["checkpoint"])
    listed = criuctl("list", "saved")
    assert [row["id"] for row in listed] == ids
    assert [row["labels"] for row in listed] == [{"kind": "test"}] * 3
    numbers = [row["number"] for row in listed]
    animal.end()
    for ref, counter in (
        ("saved", 3),
        (f"saved@{numbers[0]}", 1),
        ("saved@-2", 2),
        (ids[1][:12], 2),
    ):
        answer = criuctl("restore", ref)
        restored = zoo.adopt(answer["pid"], animal)
        assert restored.ask()["counter"] == counter + 1
        restored.end()


def test_a_dry_run_changes_nothing(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """The plan is printed; no process, no file, no new incarnation."""
    animal = zoo.launch("counter.py")
    report = trip.dump(animal, "--name", "dry")
    before = _times(animal.folder, criuctl.store)
    plan = criuctl("restore", "dry", "--dry-run")
    assert plan
    assert _times(animal.folder, criuctl.store) == before
    assert start_time(animal.pid) is None
    restored = trip.restore(report, animal)
    assert restored.answer["incarnation"] == report["incarnation"] + 1


def _times(*folders: Path) -> dict[Path, int]:
    """When each file was changed last; a store's own cache of its contents does not matter."""
    return {
        path: path.stat().st_mtime_ns
        for f in folders
        for path in f.rglob("*")
        if ".cache" not in path.parts and path != f
    }


def test_several_at_once(zoo: Zoo, criuctl: Criuctl) -> None:
    """``snapshot`` of several trees: each has its checkpoint, each runs on."""
    animals = [zoo.launch("counter.py", "1", name=f"counter{n}") for n in range(3)]
    for animal in animals:
        animal.remember()
    outcomes = criuctl("snapshot", *(animal.pid for animal in animals))
    assert len(outcomes) == 3
    assert len(criuctl("list")) == 3
    for animal in animals:
        assert animal.differences(animal) == []
        animal.ask()


@pytest.mark.parametrize("pids", ["auto", "private"])
def test_what_a_script_started_becomes_a_session_of_its_own(
    pids: str, zoo: Zoo, trip: Trip
) -> None:
    """Its session's leader lives on outside: no number of it is needed, and wherever it comes back
    it can be dumped again.
    """
    animal = zoo.launch("counter.py", "1", new_session=False)
    assert os.getsid(animal.pid) != animal.pid
    for _ in range(3):
        animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
        assert animal.answer["pids"] == pids.replace("auto", "same")
        assert os.getsid(animal.pid) == os.getpgid(animal.pid) == animal.pid
        animal.ask()
