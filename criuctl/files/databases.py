"""Databases: files that belong together, so that putting back single ones would damage them.

A server keeps in memory what is in its files: the place in its log, pages, numbers of transactions.
When one of the files has changed at the restore, all must be as they were at the dump, also those
that the server had closed.  A database is recognised at the dump by what lies in its folder:

- PostgreSQL: ``PG_VERSION``, in the topmost such folder;
- MariaDB and MySQL: ``ibdata1``;
- Redis with an append-only file: ``appendonlydir``, or a file ``*.aof``;
- SQLite: a file that begins as each of its databases does, or a main file with its ``-wal``,
  ``-journal`` and ``-shm``.

All that the tree has open for writing below such a folder belongs to it.  How they are judged
together: `criuctl.files.database_sets`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable

from ..checkpoint.file_records import FileRecord
from ..quoting import quoted

_SQLITE = b"SQLite format 3\0"  # the beginning of each database
_NEIGHBOURS = ("-wal", "-journal", "-shm")  # of SQLite's main file
_MARKS = ("PG_VERSION", "ibdata1")
# written at every start, stop and checkpoint of the server, and then closed
_CONTROL = ("global/pg_control",)


def is_sqlite(fd: int) -> bool:
    """Return whether an open file is a database of SQLite."""
    return os.pread(fd, len(_SQLITE), 0) == _SQLITE


def named(root_pid: int, records: Iterable[FileRecord]) -> list[FileRecord]:
    """Return the records, with the database named in those that belong to one."""
    records = list(records)
    opened = [
        r
        for r in records
        if r.holders and r.kind in ("written", "carried") and stat.S_ISREG(r.mode)
    ]
    # except its output
    written = {
        r.path for r in opened if not (r.append and all(fd in (1, 2) for _pid, fd in r.holders))
    }
    found = databases(root_pid, written)
    folders = {database for database in found.values() if is_folder(database, found)}
    for record in records:  # a file that came along with a folder belongs to it, open or not
        if record.kind == "carried" and stat.S_ISREG(record.mode) and record.path not in found:
            if folder := next((f for f in folders if record.path.startswith(f"{f}/")), ""):
                found[record.path] = folder
    return [r.with_use(database=found[r.path]) if r.path in found else r for r in records]


def databases(root_pid: int, written: Iterable[str]) -> dict[str, str]:
    """Return path -> database, for those of these files that belong to one.

    `written`: files that are open for writing in the tree.
    """
    written = set(written)
    folders: dict[str, str] = {}
    found = {}
    for path in written:
        if database := _sqlite(path, written) or _folder_of(
            f"/proc/{root_pid}/root", os.path.dirname(path), folders
        ):
            found[path] = database
    logs = {
        os.path.dirname(path).removesuffix("/appendonlydir")
        for path in written
        if path.endswith(".aof")
    }
    for path in written - found.keys():
        if folder := next((f for f in logs if path.startswith(f"{f}/")), ""):
            found[path] = folder
    return found


def is_folder(database: str, paths: Container[str]) -> bool:
    """Return whether it is a server's data folder; `paths` are its files."""
    return database not in paths


def control_files(database: str) -> list[str]:
    """Return files of a database that show whether it was changed, though its server does not keep
    them open.
    """
    return [os.path.join(database, name) for name in _CONTROL]


def has_closed_files(root_pid: int, database: str) -> bool:
    """Return whether its server writes to files that it does not keep open, so that the folder must
    travel.
    """
    return any(os.path.lexists(f"/proc/{root_pid}/root{path}") for path in control_files(database))


def neighbours(database: str) -> list[str]:
    """Return the names of the files that SQLite keeps next to a database."""
    return [database + ending for ending in _NEIGHBOURS]


def is_marked(folder: str) -> bool:
    """Return whether a folder of this host is a server's data folder, independently of any
    checkpoint.
    """
    return any(os.path.lexists(os.path.join(folder, mark)) for mark in _MARKS)


def _sqlite(path: str, written: set[str]) -> str:
    for ending in _NEIGHBOURS:
        main = path.removesuffix(ending)
        if main != path and main in written:
            return main
    return path if any(path + ending in written for ending in _NEIGHBOURS) else ""


def _folder_of(root: str, folder: str, known: dict[str, str]) -> str:
    """Return the topmost folder on the way to this one that is a server's data folder; "" for
    none.
    """
    if folder not in known:
        above = os.path.dirname(folder)
        known[folder] = _folder_of(root, above, known) if above != folder else ""
        if not known[folder] and any(os.path.lexists(f"{root}{folder}/{mark}") for mark in _MARKS):
            known[folder] = folder
    return known[folder]


def option(database: str, paths: Iterable[str]) -> str:
    """Return the option of `dump` that takes all of it along."""
    paths = sorted(paths)
    wanted = [database] if is_folder(database, paths) else paths
    return " ".join(f"--with-files {quoted(path)}" for path in wanted)
