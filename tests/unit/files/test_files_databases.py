"""Files of one database are judged together; nothing is put back below a mount point of a disk that
is away.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.file_records import FileRecord
from criuctl.files import contents, databases, mount_points
from criuctl.files.judgement import Judgement, Policy, judge_all

OLD = b"a page of a table\n" * 100
STREAM = StreamRef(len(OLD))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something like the data folder of PostgreSQL."""
    for name in (
        "PG_VERSION",
        "base/5/PG_VERSION",
        "base/5/1259",
        "pg_wal/0001",
        "global/pg_control",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(OLD)
    return tmp_path / "data"


def record(
    path: Path, *, carried: bool = False, append: bool = False, kind: str = "written"
) -> FileRecord:
    fd = os.open(path, os.O_RDONLY)
    try:
        digest = contents.digest(fd, len(OLD))
    finally:
        os.close(fd)
    found = contents.base_record(str(path), kind, path.lstat())
    return found.with_use(
        digest=digest, data=STREAM if carried else None, append=append, holders=((7, 3),)
    )


def server(folder: Path, *, carried: bool = False, wal: bool = False) -> list[FileRecord]:
    """The records of a server: its table, its log, and a file that it has closed."""
    records = [
        record(folder / "base/5/1259", carried=True),
        record(folder / "pg_wal/0001", carried=carried or wal),
    ]
    named = databases.named(os.getpid(), records)
    control = record(
        folder / "global/pg_control", kind="carried" if carried else "read", carried=carried
    )
    return [*named, control.with_use(database=str(folder), holders=())]


def levels(records: list[FileRecord], policy: Policy = "restore") -> list[tuple[str, str]]:
    found = [j.finding() for j in judge_all(records, policy)]
    return [(f.level, f.code) for f in found if f is not None]


def test_the_topmost_folder_is_the_database(folder: Path) -> None:
    assert {r.database for r in server(folder)} == {str(folder)}


def test_what_belongs_to_no_database(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(OLD)
    assert [r.database for r in databases.named(os.getpid(), [record(log)])] == [""]


def test_sqlite_and_redis() -> None:
    here = os.getpid()
    wal = databases.databases(
        here, ["/nowhere/a.db", "/nowhere/a.db-wal", "/nowhere/a.db-shm", "/nowhere/b.db"]
    )
    assert wal == dict.fromkeys(
        ["/nowhere/a.db", "/nowhere/a.db-wal", "/nowhere/a.db-shm"], "/nowhere/a.db"
    )
    aof = databases.databases(
        here, ["/nowhere/appendonlydir/a.1.incr.aof", "/nowhere/dump.rdb", "/elsewhere/log"]
    )
    assert aof == dict.fromkeys(
        ["/nowhere/appendonlydir/a.1.incr.aof", "/nowhere/dump.rdb"], "/nowhere"
    )


@pytest.mark.parametrize("name", ["base/5/1259", "pg_wal/0001", "global/pg_control"])
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(OLD.upper())])
def test_one_changed_file_refuses_all(
    folder: Path, name: str, change: Callable[[Path], object]
) -> None:
    records = server(folder)
    assert levels(records) == []
    change(folder / name)
    if name == "base/5/1259":  # alone it can be put back, and nothing else has changed
        assert levels(records) == [("warning", "file-put-back")]
        return
    (finding,) = [f for j in judge_all(records, "restore") if (f := j.finding()) is not None]
    assert (finding.level, finding.code, finding.pid) == (
        "error",
        "database-changed",
        7 if "pg_wal" in name else None,
    )
    assert str(folder) in finding.text and Path(name).name in finding.text
    assert f"--with-files {folder}" in finding.hint and "keep" not in finding.hint
    assert levels(records, "keep") == [("error", "database-changed")]
    assert levels(records, "refuse") == [("error", "database-changed")]


def test_all_changed_and_some_carried(folder: Path) -> None:
    records = server(folder, wal=True)
    for name in ("base/5/1259", "pg_wal/0001", "global/pg_control"):
        (folder / name).write_bytes(OLD.upper())
    assert levels(records) == [("error", "database-changed")]
    (folder / "global/pg_control").write_bytes(OLD)
    assert levels(records) == [("warning", "file-put-back")] * 2


def test_a_folder_that_was_taken_along_comes_back(folder: Path) -> None:
    records = server(folder, carried=True)
    for name in ("base/5/1259", "pg_wal/0001", "global/pg_control"):
        (folder / name).write_bytes(OLD.upper())
    assert levels(records) == [("warning", "file-put-back")] * 3
    assert levels(records, "refuse") == levels(records, "keep") == [("error", "database-changed")]


def test_a_log_that_grew_is_not_in_memory(tmp_path: Path) -> None:
    """An append-only file is put back from its own beginning, or from the checkpoint."""
    for name, carried in (("a.aof", False), ("b.aof", True)):
        (tmp_path / name).write_bytes(OLD)
        records = databases.named(
            os.getpid(), [record(tmp_path / name, append=True, carried=carried)]
        )
        with (tmp_path / name).open("ab") as out:
            out.write(b"SET a 1")
        (judged,) = judge_all(records, "restore")
        assert (judged.verdict, judged.from_prefix) == ("put-back", not carried)


def test_sqlite_may_be_kept(tmp_path: Path) -> None:
    """It looks again before each transaction; single files of it are not put back."""
    records = []
    for ending in ("", "-wal"):
        (tmp_path / f"a.db{ending}").write_bytes(OLD)
        records.append(record(tmp_path / f"a.db{ending}", carried=not ending))
    records = databases.named(os.getpid(), records)
    for each in records:
        Path(each.path).write_bytes(OLD.upper())
    assert levels(records) == [("error", "database-changed")]
    assert [j.verdict for j in judge_all(records, "keep")] == ["moved-on"] * 2


def put_back(path: Path, mount: Path | str) -> Judgement:
    return Judgement(
        FileRecord(str(path), "written", mode=stat.S_IFREG, mount=str(mount)),
        "put-back",
        "is missing",
    )


def test_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    """Its folder is missing, or its mount point is empty; one finding for all its files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = [put_back(disk / "a" / name, disk) for name in ("one", "two")]
    (refused, quiet) = mount_points.judged(inside)
    finding = refused.finding()
    assert finding is not None and finding.level == "error"
    assert (
        str(disk) in finding.text and f"mount {disk}" in finding.hint and "1 more" in finding.text
    )
    assert quiet.finding() is None and quiet.verdict != "put-back"
    (refused,) = mount_points.judged([put_back(disk / "pid", disk)])
    assert refused.verdict == "refuse"


def test_what_took_the_place_of_a_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "a").mkdir(parents=True)
    for mount, path in (
        (disk, disk / "a" / "pid"),
        ("", disk / "b" / "pid"),
        (Path("/proc"), disk / "c" / "pid"),
    ):
        assert [j.verdict for j in mount_points.judged([put_back(path, mount)])] == ["put-back"]


def test_what_was_made_in_a_folder_that_came_along(folder: Path) -> None:
    """A newer file next to older ones would be taken for one of them; files that were there are not
    touched.
    """
    whole = FileRecord(str(folder), "carried", mode=folder.stat().st_mode)
    inner = [
        FileRecord(str(path), "carried", mode=path.stat().st_mode)
        for path in folder.rglob("*")
        if path.is_dir()
    ]
    version = [record(path, kind="carried", carried=True) for path in folder.rglob("PG_VERSION")]
    records = [whole, *inner, *version, *server(folder, carried=True)]
    (folder / "base/5/1259_vm").write_bytes(OLD)
    (folder / "base/6/deeper").mkdir(parents=True)
    assert [j.verdict for j in judge_all(records, "restore")] == ["same"] * len(records)
    (folder / "pg_wal/0001").write_bytes(OLD.upper())
    found = {j.record.path: j.verdict for j in judge_all(records, "restore") if j.verdict != "same"}
    assert found == {
        f"{folder}/base/5/1259_vm": "set-aside",
        f"{folder}/base/6": "set-aside",
        f"{folder}/pg_wal/0001": "put-back",
    }
    (folder / "PG_VERSION").unlink()  # any other folder that a manifest calls a database
    assert "set-aside" not in {j.verdict for j in judge_all(records, "restore")}


def test_the_output_of_a_server_is_no_part_of_it(folder: Path) -> None:
    """A log that was rotated blocks no restore."""
    log = folder / "logfile"
    log.write_bytes(OLD)
    output = record(log, append=True).with_use(holders=((7, 1), (8, 2)))
    assert [r.database for r in databases.named(os.getpid(), [output])] == [""]
    assert databases.has_closed_files(os.getpid(), str(folder))
    assert not databases.has_closed_files(os.getpid(), str(folder / "base"))
