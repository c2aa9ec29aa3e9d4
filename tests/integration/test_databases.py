"""Databases whose files changed between dump and restore: all of them come back, or the restore is
refused, once.
"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from servers.postgresql import PostgresServer, postgresql, taking_root_for_its_user
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


def database_findings(plan: dict[str, Any]) -> list[dict[str, Any]]:
    found = plan["findings"] if "findings" in plan else plan["error"]["findings"]
    return [f for f in found if f["code"] == "database-changed"]


def write(database: Path) -> None:
    """What another program does to it, to the end: its log is gone then."""
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("INSERT INTO t VALUES (9)")


def test_sqlite_comes_back_as_a_whole(zoo: Zoo, trip: Trip) -> None:
    """Its files are small and travel; another program has written to them meanwhile."""
    animal = zoo.launch("database.py")
    report = trip.dump(animal)
    write(animal.folder / "WAL.db")
    restored = trip.restore(report, animal, equal=False)
    restored.ask()
    with closing(sqlite3.connect(animal.folder / "WAL.db")) as connection:
        assert (9,) not in connection.execute("SELECT n FROM t").fetchall()


def test_sqlite_is_refused_once(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    animal = zoo.launch("database.py")
    report = trip.dump(animal, env=RECORDED)
    database = animal.folder / "WAL.db"
    write(database)
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4
    (finding,) = database_findings(refused)
    assert str(database) in finding["text"] and f"--with-files {database}" in finding["hint"]
    assert [f for f in refused["error"]["findings"] if str(database) in f["text"]] == [finding]


@pytest.fixture
def postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    """A server that takes root for its own user."""
    library = taking_root_for_its_user(tmp_path)
    with postgresql() as server:
        server.stop()
        as_root = ["unshare", "--ipc", "env", f"LD_PRELOAD={library}", "setpriv"]
        monkeypatch.setattr(server, "_as_postgres", as_root)
        server.start("max_connections=10", "wal_buffers=64kB")
        server.execute("CREATE TABLE kept (n integer)")
        server.execute("INSERT INTO kept VALUES (1)")
        yield server


def dumped(server: PostgresServer, criuctl: Criuctl, *options: str | Path) -> dict[str, Any]:
    assert server._process is not None
    report: dict[str, Any] = criuctl("dump", server._process.pid, *options, timeout=300)
    server._process.wait(60)
    server._process = None
    return report


def written_to(server: PostgresServer) -> None:
    """Another server on the same folder, which ends as it should."""
    (server.data / "postmaster.pid").unlink()
    server.start()
    server.execute("INSERT INTO kept SELECT generate_series(2, 5000)")
    server.execute("VACUUM kept")  # makes a map of what all can see, which is not that of the dump
    server.stop()


def answering(server: PostgresServer) -> list[tuple[int]]:
    """What the table holds, when the server answers."""
    rows: list[tuple[int]] = wait_until(
        lambda: server.execute("SELECT count(*) FROM kept"), 60, "an answer"
    )
    return rows


def end(server: PostgresServer, pid: int, zoo: Zoo) -> None:
    Animal(pid, server.folder).end()


def test_postgresql_unchanged(postgres: PostgresServer, criuctl: Criuctl, zoo: Zoo) -> None:
    """What is as it was goes on, and `check` says what would be refused."""
    assert postgres._process is not None
    (finding,) = (
        f
        for f in criuctl("check", postgres._process.pid)["findings"]
        if f["code"] == "database-stays"
    )
    assert (
        str(postgres.data) in finding["text"] and f"--with-files {postgres.data}" in finding["hint"]
    )
    report = dumped(postgres, criuctl)
    answer = criuctl("restore", report["checkpoint"])
    try:
        assert answering(postgres) == [(1,)]
    finally:
        end(postgres, answer["pid"], zoo)


def test_postgresql_is_refused_once(postgres: PostgresServer, criuctl: Criuctl, zoo: Zoo) -> None:
    """Its log has changed: not the hint to keep it, which would hang, but what helps."""
    report = dumped(postgres, criuctl)
    written_to(postgres)
    for options in ((), ("--files", "keep"), ("--dry-run",)):
        refused = criuctl("restore", report["checkpoint"], *options, check=False)
        if "--dry-run" not in options:
            assert refused["exit_code"] == 4
        (finding,) = database_findings(refused)
        assert str(postgres.data) in finding["text"]
        assert f"--with-files {postgres.data}" in finding["hint"] and "--files" not in finding[
            "hint"
        ].replace("--with-files", "")


def test_postgresql_with_its_folder(postgres: PostgresServer, criuctl: Criuctl, zoo: Zoo) -> None:
    """It comes back with the state of the dump, takes writes, and survives a crash."""
    report = dumped(postgres, criuctl, "--with-files", postgres.data)
    written_to(postgres)
    answer = criuctl("restore", report["checkpoint"], timeout=300)
    try:
        assert answering(postgres) == [(1,)]
        postgres.execute("INSERT INTO kept VALUES (2)")
        assert list(postgres.data.glob("base/*/*_vm.newer-*"))
    finally:
        end(postgres, answer["pid"], zoo)
    (postgres.data / "postmaster.pid").unlink()
    postgres.start()
    assert answering(postgres) == [(2,)]
    postgres.stop(signal.SIGINT)
