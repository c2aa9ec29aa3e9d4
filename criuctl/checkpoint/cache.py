"""A small SQL database on this host that saves repeated requests to the store; it may vanish at any
time.

It holds the content of the store's index segments (`criuctl.checkpoint.index`), and the sealed
heads of manifests as the store has them (so nothing readable of an encrypted store is here).
Several processes use it at once; SQLite's own locks keep them apart.

A cache that is damaged, of another version or of another store is thrown away and made again; one
that cannot be kept on disk (no space, no permission) is kept in memory. So an error of the cache
never fails an operation.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import UntrustedPath
from ..proc.folders import make_private

T = TypeVar("T")

_VERSION = 4
_BUSY = 60.0  # seconds to wait for another process's transaction
_SCHEMA = """
CREATE TABLE meta (store TEXT NOT NULL);
CREATE TABLE segments (n INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE);
CREATE TABLE packs (n INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL UNIQUE,
                    size INTEGER NOT NULL);
CREATE TABLE distrusted (name BLOB PRIMARY KEY, damaged INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE told (pack INTEGER NOT NULL, segment INTEGER NOT NULL,
                   PRIMARY KEY (pack, segment)) WITHOUT ROWID;
CREATE TABLE chunks (id BLOB NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL,
                     stored INTEGER NOT NULL, plain INTEGER NOT NULL,
                     PRIMARY KEY (id, pack)) WITHOUT ROWID;
CREATE TABLE looked (at REAL NOT NULL, avoided BLOB NOT NULL);
CREATE TABLE heads (name TEXT PRIMARY KEY, size INTEGER NOT NULL, head BLOB NOT NULL) WITHOUT ROWID;
"""
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"


class Cache:
    """The database of one store at `path`, or in memory where `path` is None."""

    def __init__(self, path: Path | None, store: str) -> None:
        self.path = self._file = path
        self._store = store
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self.generation = 0  # counts how often it was made again

    def run(self, operation: Callable[[sqlite3.Connection], T], *, write: bool = False) -> T:
        """Return the result of `operation`, in a transaction; start again on an empty database if
        this one is damaged.
        """
        with self._lock:
            for attempt in range(3):
                try:
                    if self._db is None:
                        self._db = self._open()
                    return self._transaction(self._db, operation, write)
                except sqlite3.DatabaseError as error:
                    if attempt == 2:
                        raise
                    self._discard(keep_file=attempt > 0 or not _damage(error))
            raise AssertionError("unreachable")

    @staticmethod
    def _transaction(
        db: sqlite3.Connection, operation: Callable[[sqlite3.Connection], T], write: bool
    ) -> T:
        if not write:
            return operation(db)
        db.execute("BEGIN IMMEDIATE")
        try:
            result = operation(db)
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        return result

    def close(self) -> None:
        """Close the database; using it again opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def leave_disk(self) -> None:
        """Start again in memory, and free the space on the disk."""
        with self._lock:
            self._discard(keep_file=True)
            if self._file is not None:
                _remove(self._file)

    def _discard(self, *, keep_file: bool) -> None:
        """Start again: with a new file, or in memory when that has failed too."""
        self.generation += 1
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self.path is None:
            return
        if keep_file:
            self.path = None
            return
        _remove(self.path)

    def _open(self) -> sqlite3.Connection:
        place = ":memory:"
        if self.path is not None:
            if _prepare(self.path):
                place = str(self.path)
            else:
                self.path = self._file = None
        db = sqlite3.connect(place, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA cache_size=-16384")
            if not self._fits(db):
                db.execute("BEGIN IMMEDIATE")
                if not self._fits(db):  # no other process has made it in between
                    for (name,) in db.execute(_TABLES).fetchall():
                        db.execute(f'DROP TABLE "{name}"')
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute("INSERT INTO meta VALUES (?)", (self._store,))
                    db.execute(f"PRAGMA user_version={_VERSION}")
                db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _fits(self, db: sqlite3.Connection) -> bool:
        if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            return False
        row = db.execute("SELECT store FROM meta").fetchone()
        return row is not None and row[0] == self._store


def _remove(path: Path) -> None:
    # the database last: another process that starts again has files of those names
    for suffix in ("-shm", "-wal", ""):
        with suppress(OSError):
            os.unlink(f"{path}{suffix}")


def _damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file is at fault, rather than its disk, its permissions or another process
    that holds it.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_FORMAT,
    )


def _prepare(path: Path) -> bool:
    """Make the folder (0700) and the file (0600); return False where that is not possible or not
    safe.
    """
    try:
        make_private(path.parent)
        folder = os.lstat(path.parent)
        if (
            not stat.S_ISDIR(folder.st_mode)
            or folder.st_uid != os.geteuid()
            or folder.st_mode & 0o022
        ):
            return False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(fd)
            return (
                stat.S_ISREG(found.st_mode)
                and found.st_uid == os.geteuid()
                and not found.st_mode & 0o077
            )
        finally:
            os.close(fd)
    except (OSError, UntrustedPath):
        return False
