"""Copies of database servers: refused, or with a workspace of their own; the original's data stays
whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from servers.common import need
from servers.postgresql import binary, postgresql, taking_root_for_its_user
from support.asking import Asked
from support.keeper import wait_until

pytestmark = pytest.mark.integration


def redis_at(folder: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(folder / "redis.sock"), socket_timeout=30)


def numbers(folder: Path) -> list[int]:
    with redis_at(folder) as client:
        return [int(word) for word in client.lrange("numbers", 0, -1)]


def add(folder: Path, number: int) -> None:
    with redis_at(folder) as client:
        client.rpush("numbers", number)


def test_redis(asked: Asked) -> None:
    """Neither the append-only file nor the next one, which is made by its name, gets the copies'
    commands.
    """
    work = asked.home.path / "work"
    work.mkdir()
    words = f"--port 0 --unixsocket {work}/redis.sock --dir {work} --appendonly yes --save ''"
    server = need("redis-server", "redis-server")
    asked(
        "run",
        "-d",
        "--name",
        "work",
        "--workspace",
        work,
        "--",
        "sh",
        "-c",
        f"exec {server} {words}",
    )
    wait_until((work / "redis.sock").exists, 60, "redis is there")
    add(work, 1)
    for command in (["fork", "work"], ["fork", "work", "--share-files"]):
        refused = asked(*command, check=False)
        assert refused["exit_code"] == 4 and str(work) in refused["error"]["message"]
        assert "--fork-workspace" in str(refused["error"])
    copies = [
        Path(one["workspace"])
        for one in asked("fork", "work", "-n", 2, "--fork-workspace")["forks"]
    ]
    for number, folder in enumerate([*copies, work], 10):
        add(folder, number)
        with redis_at(folder) as client:
            client.bgrewriteaof()
            wait_until(
                lambda client=client: not client.info()["aof_rewrite_in_progress"], 60, "written"
            )
        add(folder, number + 10)
    expected = {copies[0]: [1, 10, 20], copies[1]: [1, 11, 21], work: [1, 12, 22]}
    assert {folder: numbers(folder) for folder in expected} == expected
    asked("kill", "--forks-of", "work")
    asked("kill", "work")
    for folder, found in expected.items():  # from the disk
        for log in (folder / "appendonlydir").glob("*.manifest"):
            subprocess.run(["redis-check-aof", log], check=True, timeout=60)
        argv = [server, "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--dir", f"{folder}"]
        with subprocess.Popen([*argv, "--appendonly", "yes", "--save", ""]) as again:
            wait_until(lambda folder=folder, found=found: _holds(folder, found), 60, "its rows")
            again.terminate()


def _holds(folder: Path, found: list[int]) -> bool:
    try:
        return numbers(folder) == found
    except redis.ConnectionError:
        return False


def query(folder: Path, text: str) -> list[tuple[Any, ...]]:
    with closing(
        psycopg.connect(
            host=str(folder), port=5432, user="trust", dbname="postgres", autocommit=True
        )
    ) as connection:
        found = connection.execute(text)
        return found.fetchall() if found.description else []


def _answers(folder: Path) -> bool:
    try:
        return bool(query(folder, "SELECT 1"))
    except psycopg.OperationalError:
        return False


def test_postgresql(asked: Asked, tmp_path: Path) -> None:
    """A copy of the session with its folder; the original, crashed and started again, has its own
    rows, and its indexes are sound.
    """
    work, library = asked.home.path / "work", taking_root_for_its_user(tmp_path)
    with postgresql() as server:
        server.stop()
        work.mkdir()
        subprocess.run(["cp", "-a", server.data, work / "data"], check=True, timeout=60)
    (work / "data" / "postmaster.pid").unlink(missing_ok=True)
    options = ["listen_addresses=", f"unix_socket_directories={work}", "fsync=off"]
    options += ["shared_buffers=16MB", "max_connections=10", "autovacuum=off"]
    flags = [word for option in options for word in ("-c", option)]
    argv = ["env", f"LD_PRELOAD={library}", binary("postgres"), "-D", str(work / "data"), *flags]
    asked("run", "-d", "--name", "work", "--workspace", work, "--", *argv)
    wait_until(lambda: _answers(work), 60, "postgres is there")
    query(work, "CREATE TABLE t (n integer PRIMARY KEY)")
    query(work, "INSERT INTO t VALUES (1)")
    refused = asked("fork", "work", check=False)
    assert refused["exit_code"] == 4 and str(work / "data") in refused["error"]["message"]
    pid = asked("status", "work")["pid"]
    taken = asked("dump", pid, "--leave-running", "--with-files", work / "data", timeout=300)
    query(work, "INSERT INTO t SELECT generate_series(100, 5000)")
    query(work, "CHECKPOINT")
    (one,) = asked("fork", taken["checkpoint"], "--fork-workspace", timeout=300)["forks"]
    copy = Path(one["workspace"])
    assert query(copy, "SELECT n FROM t") == [(1,)]
    query(copy, "INSERT INTO t SELECT generate_series(50, 60)")
    query(copy, "CHECKPOINT")
    asked("kill", "--forks-of", "work")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: asked("status", "work")["state"] != "running", 60, "it is gone")
    (work / "data" / "postmaster.pid").unlink()
    asked("run", "-d", "--name", "again", "--workspace", work, "--", *argv)
    wait_until(lambda: _answers(work), 60, "postgres is there")
    query(work, "CREATE EXTENSION amcheck")
    query(work, "SELECT bt_index_check('t_pkey', true)")
    assert query(work, "SELECT count(*), max(n) FROM t") == [(4902, 5000)]
