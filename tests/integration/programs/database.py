"""sqlite in the middle of a transaction, its locks held, in rollback-journal and in WAL mode."""

from __future__ import annotations

import sqlite3

from animal import Check, path, serve


def begun(mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path(f"{mode}.db"), isolation_level=None, timeout=0)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE t (n INTEGER)")
    connection.execute("INSERT INTO t VALUES (1)")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO t VALUES (2)")
    return connection


connections = {mode: begun(mode) for mode in ("DELETE", "WAL")}
left = True


def check(found: Check) -> None:
    global left
    for mode, connection in connections.items():
        if left:
            found.equal(
                f"{mode}: rows inside the transaction",
                connection.execute("SELECT n FROM t").fetchall(),
                [(1,), (2,)],
            )
            connection.execute("INSERT INTO t VALUES (3)")
            connection.execute("COMMIT")
        other = sqlite3.connect(path(f"{mode}.db"), timeout=0)
        found.equal(
            f"{mode}: rows for everybody",
            other.execute("SELECT n FROM t").fetchall(),
            [(1,), (2,), (3,)],
        )
        found.equal(
            f"{mode}: integrity", other.execute("PRAGMA integrity_check").fetchall(), [("ok",)]
        )
        other.close()
    left = False


serve(check)
