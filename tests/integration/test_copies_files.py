"""Copies leave the files of their originals alone: each kind of state that both could write to."""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.asking import Asked
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

APPENDING = """
import sys, time
ledger = open(sys.argv[1], "a", buffering=1)
number = 0
while True:
    number += 1
    ledger.write("%d\\n" % number)
    time.sleep(0.01)
"""


def launch(zoo: Zoo, script: str, *words: object, name: str = "program") -> Animal:
    argv = [sys.executable, "-S", "-c", script, *map(str, words)]
    return zoo.launch(argv, name=name, quiet=False)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def own(body: dict[str, Any], path: Path) -> Path:
    (copy,) = [f["own_copy"] for f in body["files"] if f["path"] == str(path)]
    return Path(copy)


@pytest.mark.parametrize("how", ["live", "stored", "as"])
def test_what_is_appended_to_is_the_copys_own(
    how: str, zoo: Zoo, criuctl: Criuctl, tmp_path: Path
) -> None:
    """No line of the copy is in the original's ledger, and the copy's has those before it."""
    ledger = tmp_path / "ledger"
    original = launch(zoo, APPENDING, ledger)
    wait_until(lambda: len(lines(ledger)) > 5, 60, "it writes")
    criuctl("dump", original.pid, "--name", "work", *["--leave-running"][how == "live" :])
    if how == "live":
        zoo.adopt(criuctl("restore", "work")["pid"], original)
    if how == "as":
        pids = [criuctl("restore", "work", "--as", "copy")["pid"]]
    else:
        ref = "work" if how == "live" else "work@1"
        pids = [one["pid"] for one in criuctl("fork", ref, "-n", 3)["forks"]]
    for pid in pids:
        zoo.adopt(pid, original)
    copies = [Path(os.readlink(f"/proc/{pid}/fd/3")) for pid in pids]
    assert len(set(copies)) == len(pids) and ledger not in copies
    before = [len(lines(path)) for path in copies]
    wait_until(
        lambda: all(len(lines(p)) > n + 5 for p, n in zip(copies, before, strict=True)), 60, "on"
    )
    for path in (ledger, *copies):
        found = [int(line) for line in lines(path)[:-1]]
        assert found == list(range(1, len(found) + 1)), path


def test_shared_on_request(zoo: Zoo, criuctl: Criuctl, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    original = launch(zoo, APPENDING, ledger)
    criuctl("dump", original.pid, "--name", "work")
    copy = criuctl("restore", "work", "--as", "copy", "--share-files")
    zoo.adopt(copy["pid"], original)
    assert os.readlink(f"/proc/{copy['pid']}/fd/3") == str(ledger) and copy["files"] == []
    other = criuctl("restore", "work", "--as", "other", "--share-files")
    zoo.adopt(other["pid"], original)
    assert [w for w in other["warnings"] if str(ledger) in w and "writes to it as well" in w]
    assert criuctl("restore", "work", "--share-files", check=False)["exit_code"] == 2


RENAMING = """
import os, sys, time
os.chdir(sys.argv[1])
number = 0
while True:
    number += 1
    with open("state.tmp", "w") as file:
        file.write("%d\\n" % number)
        file.flush()
        time.sleep(0.003)
    os.replace("state.tmp", "state")
    time.sleep(0.001)
"""


def test_a_program_that_saves_by_renaming(zoo: Zoo, criuctl: Criuctl, tmp_path: Path) -> None:
    """The temporary file has been renamed, or is another one, when the copies are restored."""
    original = launch(zoo, RENAMING, tmp_path)
    criuctl("dump", original.pid, "--name", "work")
    zoo.adopt(criuctl("restore", "work")["pid"], original)
    for prefix in "abc":
        forks = criuctl("fork", "work", "-n", 5, "--prefix", prefix)["forks"]
        assert [one["error"] for one in forks] == [None] * 5
    criuctl("kill", "--forks-of", "work")


KEPT_OPEN = """
import sqlite3, sys, time
base = sqlite3.connect(sys.argv[1], isolation_level=None)
base.execute("PRAGMA journal_mode=" + sys.argv[2])
base.execute("CREATE TABLE t (n INTEGER)")
while True:
    base.execute("INSERT INTO t VALUES (1)")
    time.sleep(0.01)
"""


def checked(database: Path) -> int:
    with closing(sqlite3.connect(database, timeout=60)) as base:
        assert base.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        count: int = base.execute("SELECT count(*) FROM t").fetchone()[0]
        return count


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_copy_of_sqlite_is_refused(mode: str, zoo: Zoo, criuctl: Criuctl, tmp_path: Path) -> None:
    """Once for the whole set, with the remedy; the database stays whole."""
    database = tmp_path / "t.db"
    original = launch(zoo, KEPT_OPEN, database, mode)
    wait_until(lambda: database.exists() and database.stat().st_size, 60, "it writes")
    time.sleep(0.3)
    criuctl("dump", original.pid, "--name", "work", "--leave-running")
    for options in ([], ["--share-files"]):
        refused = criuctl("restore", "work", "--as", "copy", *options, check=False)
        assert refused["exit_code"] == 4
        found = [f for f in refused["error"]["findings"] if str(database) in f["text"]]
        assert [f["code"] for f in found] == ["database-changed"]
        assert "--fork-workspace" in found[0]["hint"]
    assert not list(tmp_path.glob("*.older-*"))
    before = checked(database)
    wait_until(lambda: checked(database) > before, 60, "the original goes on")


SHM = Path("/dev/shm")
MEMORY = """
from multiprocessing import resource_tracker, shared_memory
import sys, time
resource_tracker.register = lambda *a: None
memory = shared_memory.SharedMemory(sys.argv[1], create=True, size=1 << 20)
number = 0
while True:
    number += 1
    memory.buf[0] = number % 250
    time.sleep(0.01)
"""


@pytest.fixture
def name(home: Home) -> Iterator[str]:
    name = f"criuctl-test-{secrets.token_hex(6)}"
    yield name
    for path in SHM.glob(f"*{name}*"):
        path.unlink()


@pytest.mark.parametrize("end", ["kill", "by itself"])
def test_memory_of_copies_goes_with_them(
    end: str, name: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    original = launch(zoo, MEMORY, name)
    wait_until((SHM / name).exists, 60, "it has memory")
    report = criuctl("dump", original.pid, "--name", "work", "--leave-running")
    copy = trip.restore(report, original, "--as", "copy", equal=False)
    (other,) = SHM.glob(f"{name}.older-*")
    copy = trip.restore(criuctl("dump", copy.pid), copy, equal=False)
    assert list(SHM.glob(f"{name}.older-*")) == [other]
    if end == "kill":
        criuctl("kill", "copy")
    else:
        copy.end()
        criuctl("gc")
    assert list(SHM.glob(f"{name}*")) == [SHM / name]
    assert original.alive()


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
@pytest.mark.parametrize("life", ["live", "stored"])
def test_sqlite_in_a_workspace_of_its_own(life: str, mode: str, asked: Asked) -> None:
    """Original and copies write, close and open it again by its absolute name: each has its own
    rows, in the next life too, and each database is whole.
    """
    work = asked.home.path / "work"
    work.mkdir()
    base = work / "t.db"
    asked.begin("work", "--workspace", str(work))
    asked.ask("work", "kept.append(__import__('sqlite3'))")
    opened = f"kept.append(kept[0].connect('{base}', isolation_level=None))"
    write = "kept[-1].execute('INSERT INTO t VALUES ({})') and None"
    asked.ask("work", opened)
    asked.ask("work", f"kept[-1].execute('PRAGMA journal_mode={mode}').fetchall()")
    asked.ask("work", "kept[-1].execute('CREATE TABLE t (n INTEGER)') and None")
    asked.ask("work", write.format(1))
    if life == "stored":
        asked("snapshot", "work")
        asked.ask("work", write.format(2))
    body = asked("fork", "work@1" if life == "stored" else "work", "-n", 2, "--fork-workspace")
    names = [one["session"] for one in body["forks"]]
    for one in body["forks"]:  # SQLite knows the database by its inode
        assert any("DBMOVED" in text for text in one["warnings"]) == (mode == "DELETE")
    for number, name in enumerate(["work", *names], 10):
        if name != "work" and mode == "DELETE":
            asked.ask(name, opened)
        asked.ask(name, write.format(number))
        asked.ask(name, "kept.pop().close()")
        asked.ask(name, opened)
        asked.ask(name, write.format(number + 10))
    asked("dump", names[0])
    asked("restore", names[0])
    if mode == "DELETE":
        asked.ask(names[0], opened)
    asked.ask(names[0], write.format(31))
    asked.ask(names[0], "kept.pop().close()")
    asked.ask(names[0], opened)
    asked.ask(names[0], write.format(41))
    first = [1, 2] if life == "stored" else [1]
    assert rows(base) == [*first, 10, 20]
    assert rows(Path(f"{work}.{names[0]}/t.db")) == [1, 11, 21, 31, 41]
    assert rows(Path(f"{work}.{names[1]}/t.db")) == [1, 12, 22]
    refused = asked("fork", "work", check=False)
    assert refused["exit_code"] == 4 and "--fork-workspace" in str(refused["error"])


def rows(database: Path) -> list[int]:
    checked(database)
    with closing(sqlite3.connect(database)) as base:
        return [row[0] for row in base.execute("SELECT n FROM t ORDER BY n")]
