"""Clients of PostgreSQL that know nothing of checkpoints: ``postgres_client.py FOLDER WAY CONNINFO
[COUNT] [STATEMENT]``.

WAY is pool (COUNT psycopg connections here, on which STATEMENT is run first, and as many in a child
process), psql (the program, fed through pipes), migration (one statement after another, each when
asked), or load (COUNT processes write numbers without end and note each that was acknowledged; on
an error they connect again and look whether the last one got through, as a careful client does).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from animal import Check, path, serve

way, conninfo = sys.argv[2:4]
count = int(sys.argv[4]) if len(sys.argv) > 4 else 1
first = sys.argv[5] if len(sys.argv) > 5 else ""


def connect() -> Any:
    """As any program does it."""
    import psycopg

    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=1)


# -- pool -----------------------------------------------------------------------------------------


def use(connection: Any, number: int) -> list[Any]:
    """Two statements that are prepared after their first use, and settings."""
    import psycopg

    try:
        row = connection.execute(
            "INSERT INTO things VALUES (%s, %s) RETURNING number", (number, "x")
        ).fetchone()
        total = connection.execute("SELECT count(*) >= %s FROM things", (1,)).fetchone()
        path_set = connection.execute("SHOW search_path").fetchone()
        prepared = connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
        return [row[0], total[0], path_set[0], prepared[0]]
    except psycopg.Error as error:
        return [type(error).__name__, str(error)]


def pool() -> None:
    asked, asking = os.pipe()
    answered, answering = os.pipe()
    child = os.fork() == 0
    connections = [connect() for _ in range(count)]
    for number, connection in enumerate(connections):
        connection.execute("SET search_path = public, extra")
        for _ in range(3):
            use(connection, number)
        if first and not child:
            connection.execute(first)
    if child:
        os.write(answering, b".")
        while os.read(asked, 1):
            answers = [
                use(connection, 100 + number) for number, connection in enumerate(connections)
            ]
            os.write(answering, repr(answers).encode())
        os._exit(0)
    os.read(answered, 1)

    def check(found: Check) -> None:
        os.write(asking, b"?")
        theirs = os.read(answered, 65536).decode()
        found.facts |= {
            "mine": [use(connection, n) for n, connection in enumerate(connections)],
            "theirs": theirs,
        }

    serve(check)


# -- psql -----------------------------------------------------------------------------------------


def psql() -> None:
    program = subprocess.Popen(
        ["psql", "-X", "-q", "-A", "-t", conninfo],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    words, answers = program.stdin, program.stdout
    assert words is not None and answers is not None
    asked = 0

    def say(statement: str) -> str:
        words.write(statement.encode() + b"\n")
        words.flush()
        return answers.readline().decode().strip()

    say("SET DateStyle = 'German'; PREPARE twice (int) AS SELECT $1 * 2; SELECT 'begun';")

    def check(found: Check) -> None:
        nonlocal asked
        asked += 1
        found.facts |= {
            "twice": say(f"EXECUTE twice ({asked});"),
            "date": say("SELECT date '2026-02-01';"),
        }

    serve(check)


# -- migration ------------------------------------------------------------------------------------


def migration() -> None:
    connection = connect()
    steps = [
        "CREATE TABLE steps (n int)",
        *(f"INSERT INTO steps VALUES ({n})" for n in range(1, 9)),
        "ALTER TABLE steps ADD done bool",
    ]
    done = 0

    def check(found: Check) -> None:
        nonlocal done
        connection.execute(steps[done])
        done += 1
        found.facts |= {"done": done}

    serve(check)


# -- load -----------------------------------------------------------------------------------------


def write(worker: int, log: int) -> None:
    """Each number once; what the log holds was acknowledged."""
    import psycopg

    connection, number, unsure = connect(), 0, False
    while True:
        try:
            if connection is None:
                connection = connect()
            key = (worker, number)
            known = (
                unsure
                and connection.execute(
                    "SELECT 1 FROM written WHERE worker = %s AND number = %s", key
                ).fetchone()
            )
            if not known:
                unsure = True
                connection.execute("INSERT INTO written VALUES (%s, %s)", key)
            os.write(log, f"{worker} {number}\n".encode())
            number, unsure = number + 1, False
            time.sleep(0.005)
        except psycopg.OperationalError:
            os.write(log, b"broken\n")
            connection = None
            time.sleep(0.02)


def load() -> None:
    log = os.open(path("acknowledged"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for worker in range(count):
        if os.fork() == 0:
            write(worker, log)
    serve(lambda found: None)


{"pool": pool, "psql": psql, "migration": migration, "load": load}[way]()
