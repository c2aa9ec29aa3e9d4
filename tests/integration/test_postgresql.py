"""Unmodified PostgreSQL clients go on after a restore, with a server that was restarted
meanwhile.
"""

from __future__ import annotations

import ast
import json
import signal
import socket
import sysconfig
from collections import Counter

import pytest
from servers.postgresql import PostgresServer
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

CYCLES = 20
pytestmark = pytest.mark.integration


@pytest.fixture
def server(postgres_server: PostgresServer) -> PostgresServer:
    postgres_server.execute(
        "DROP TABLE IF EXISTS things, written, steps; CREATE TABLE things (number int, name text);"
        "CREATE TABLE written (worker int, number int); CREATE SCHEMA IF NOT EXISTS extra"
    )
    return postgres_server


def launch(
    zoo: Zoo,
    server: PostgresServer,
    way: str,
    user: str = "trust",
    host: str = "127.0.0.1",
    count: int = 1,
    first: str = "",
    **env: str,
) -> Animal:
    where = str(server.folder) if host == "unix" else host
    conninfo = f"host={where} port={server.port} user={user} dbname=postgres"
    passwords = zoo.home / ".pgpass"
    passwords.write_text(
        "".join(f"*:*:*:{name}:{name}-secret\n" for name in ("clear", "md5", "scram"))
    )
    passwords.chmod(0o600)
    env["PYTHONPATH"] = sysconfig.get_path("purelib")
    return zoo.launch("postgres_client.py", way, conninfo, str(count), first, env=env, quiet=False)


def outcomes(animal: Animal) -> list[tuple[str, str]]:
    return sorted({(c["policy"], c["outcome"]) for c in animal.answer["connections"]})


@pytest.mark.parametrize(
    ("user", "host"), [("scram", "127.0.0.1"), ("md5", "::1"), ("clear", "unix")]
)
def test_a_pool_in_two_processes(
    server: PostgresServer, zoo: Zoo, trip: Trip, user: str, host: str
) -> None:
    """Every connection of parent and child goes on with its next statement, prepared ones
    included.
    """
    animal = launch(zoo, server, "pool", user, host, count=3)
    before = animal.ask()
    assert before["mine"][2][:3] == [2, True, "public, extra"]
    report = trip.dump(animal, "--connections", "reconnect")
    assert {c["policy"] for c in report["connections"]} == {"reconnect"}
    server.restart()
    restored = trip.restore(report, animal, equal=False)
    assert outcomes(restored) == [("reconnect", "reconnected")]
    assert len(restored.answer["connections"]) == 6
    after = restored.ask()
    assert after["mine"] == before["mine"]
    assert ast.literal_eval(after["theirs"]) == ast.literal_eval(before["theirs"])


def test_the_password_of_its_environment(server: PostgresServer, zoo: Zoo, trip: Trip) -> None:
    """What libpq took at the start of the program serves again, unless a rule knows better."""
    animal = launch(
        zoo, server, "pool", "scram", count=1, PGPASSFILE="/dev/null", PGPASSWORD="scram-secret"
    )
    report = trip.dump(animal, "--connections", "reconnect")
    server.restart()
    restored = trip.restore(report, animal, equal=False)
    assert outcomes(restored) == [("reconnect", "reconnected")]
    assert "scram-secret" not in str(report) + str(restored.answer)
    assert restored.ask()["mine"][0][0] == 0


@pytest.mark.parametrize("wish", ["at the dump", "at the restore"])
def test_psql(server: PostgresServer, zoo: Zoo, trip: Trip, wish: str) -> None:
    animal = launch(zoo, server, "psql")
    answer = animal.ask()
    assert (answer["twice"], answer["date"]) == ("2", "01.02.2026")
    option = ("--connections", "reconnect")
    report = trip.dump(animal, *(option if wish == "at the dump" else ()))
    server.restart()
    restored = trip.restore(
        report, animal, *(option if wish == "at the restore" else ()), equal=False
    )
    assert outcomes(restored) == [("reconnect", "reconnected")]
    answer = restored.ask()
    assert (answer["twice"], answer["date"]) == ("4", "01.02.2026")


def test_a_migration_resumes_at_the_next_statement(
    server: PostgresServer, zoo: Zoo, trip: Trip
) -> None:
    animal = launch(zoo, server, "migration")
    for done in (1, 3, 5, 7, 9):
        assert animal.ask()["done"] == done
        animal = trip.restore(trip.dump(animal, "--connections", "reconnect"), animal, equal=False)
        assert outcomes(animal) == [("reconnect", "reconnected")]
        assert animal.ask()["done"] == done + 1
    assert server.execute("SELECT n FROM steps ORDER BY ctid") == [(n,) for n in range(1, 9)]
    assert server.execute(
        "SELECT count(*) FROM pg_attribute WHERE attrelid = 'steps'::regclass AND attname = 'done'"
    ) == [(1,)]


def test_a_server_that_is_away_for_a_while(
    server: PostgresServer, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Connections that end at once, then refused ones, then a server that is still starting up: the
    restore goes on trying.
    """
    animal = launch(zoo, server, "pool", "scram", count=2)
    report = trip.dump(animal, "--connections", "reconnect")
    server.stop(signal.SIGQUIT)  # as a crash, so that it has to recover
    try:
        with socket.create_server(("127.0.0.1", server.port)) as listener:
            listener.settimeout(60)
            command = criuctl.start("restore", report["checkpoint"])
            for _ in range(9):
                listener.accept()[0].close()
    finally:
        server.start()
    assert command.process.wait(120) == 0, command.output()
    answer = command.json()
    assert {c["outcome"] for c in answer["connections"]} == {"reconnected"}
    assert max(c["attempts"] for c in answer["connections"]) > 2
    assert zoo.adopt(answer["pid"], animal).ask()["mine"][1][0] == 1


OBSTACLES = {
    "BEGIN": "a transaction is open",
    "CREATE TEMPORARY TABLE mine (a int)": "temporary objects: mine",
}


@pytest.mark.parametrize("statement", OBSTACLES)
def test_what_cannot_be_rebuilt_is_hung_up_and_reported(
    server: PostgresServer, zoo: Zoo, trip: Trip, statement: str
) -> None:
    """The client sees the end with its next statement and the report says why; the child's
    connection is not concerned.
    """
    animal = launch(zoo, server, "pool", count=1, first=statement)
    report = trip.dump(animal, "--connections", "reconnect")
    restored = trip.restore(report, animal, equal=False)
    assert outcomes(restored) == [("hangup", "hangup"), ("reconnect", "reconnected")]
    assert [
        c["reason"] for c in restored.answer["connections"] if OBSTACLES[statement] in c["reason"]
    ]
    answer = restored.ask()
    assert answer["mine"][0][0] == "OperationalError"
    assert ast.literal_eval(answer["theirs"])[0][0] == 100


@pytest.mark.parametrize("sslmode", ["require", "disable"])
def test_a_server_that_offers_tls(
    server: PostgresServer, zoo: Zoo, trip: Trip, sslmode: str
) -> None:
    """As Debian's does. An encrypted session is left alone, and reported; one next to it is found
    to be plain.
    """
    server.enable_tls()
    server.restart("ssl=on")
    try:
        animal = launch(zoo, server, "pool", "scram", PGSSLMODE=sslmode)
        report = trip.snapshot(animal, "--connections", "reconnect")
        found = {(c["policy"], c["reason"]) for c in report["connections"]}
        assert found == (
            {("hangup", "the session is encrypted (TLS)")}
            if sslmode == "require"
            else {("reconnect", "")}
        )
        assert animal.ask()["mine"][0][0] == 0
    finally:
        server.restart()


def test_an_advisory_lock_is_held_again(server: PostgresServer, zoo: Zoo, trip: Trip) -> None:
    """The server knows by then that the old session is over; a snapshot's copy cannot have what the
    original holds.
    """
    animal = launch(zoo, server, "pool", count=1, first="SELECT pg_advisory_lock(77)")
    report = trip.snapshot(animal, "--connections", "reconnect")
    answer = trip.criuctl("restore", report["checkpoint"], "--as", "copy", check=False)
    assert answer["exit_code"] == 11
    assert sorted(c["outcome"] for c in answer["connections"]) == ["failed", "reconnected"]
    assert any(
        "advisory lock (77::bigint) is held by another session" in c["reason"]
        for c in answer["connections"]
    )
    zoo.adopt(answer["pid"], animal).end()
    assert animal.ask()["mine"][0][0] == 0
    restored = trip.restore(trip.dump(animal, "--connections", "reconnect"), animal, equal=False)
    assert outcomes(restored) == [("reconnect", "reconnected")]
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND granted"
    assert server.execute(held) == [(1,)]
    restored.ask()


def test_a_password_that_was_changed(
    server: PostgresServer, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """An old password is no failed restore: the connection is hung up, the client goes on by
    itself; a fresh one opens.
    """
    animal = launch(zoo, server, "pool", "scram", count=1)
    report = trip.dump(animal, "--connections", "reconnect")
    server.execute("ALTER ROLE scram PASSWORD 'fresh-secret'")
    try:
        answer = criuctl("restore", report["checkpoint"], check=False)
        assert answer["exit_code"] == 11
        assert {c["outcome"] for c in answer["connections"]} == {"failed"}
        assert all("password authentication failed" in c["reason"] for c in answer["connections"])
        assert "scram-secret" not in str(answer)
        restored = zoo.adopt(answer["pid"], animal)
        assert restored.ask()["mine"][0][0] == "OperationalError"
        restored.end()
        rule = {
            "match": {"protocol": "postgresql"},
            "policy": "reconnect",
            "secret": {"env": "FRESH_PASSWORD"},
        }
        config = criuctl.home.path / "fresh.yaml"
        config.write_text(json.dumps({"connection_rules": [rule]}))
        criuctl.extra["FRESH_PASSWORD"] = "fresh-secret"
        answer = criuctl("--config", config, "restore", report["checkpoint"])
        assert {c["outcome"] for c in answer["connections"]} == {"reconnected"}
        assert zoo.adopt(answer["pid"], animal).ask()["mine"][0][0] == 0
        assert "fresh-secret" not in str(answer) + str(criuctl("show", report["checkpoint"]))
    finally:
        server.execute("ALTER ROLE scram PASSWORD 'scram-secret'")


def test_every_acknowledged_write_is_there_once(
    server: PostgresServer, zoo: Zoo, trip: Trip
) -> None:
    """Many times there and back under load: what is idle at the freeze goes on, what is busy is
    hung up and its client copes.
    """
    animal = launch(zoo, server, "load", "scram", count=4)
    log = animal.folder / "acknowledged"
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'scram'"
    seen: Counter[str] = Counter()
    for cycle in range(CYCLES):
        written = len(log.read_text().splitlines())
        wait_until(
            lambda written=written: len(log.read_text().splitlines()) > written + 40,
            60,
            "more writes",
        )
        report = trip.dump(animal, "--connections", "reconnect")
        # What was under way is done with: a client that looks for its last number can rely on what
        # it finds.
        wait_until(
            lambda: server.execute(sessions) == [(0,)], 60, "the server has ended the old sessions"
        )
        if cycle == 1:
            server.restart()
        animal = trip.restore(report, animal, equal=False)
        seen.update(c["outcome"] for c in animal.answer["connections"])
    wait_until(
        lambda: server.execute(sessions)[0][0] <= 8,
        60,
        "sessions that were given up are ended",
    )
    animal.end()
    lines = log.read_text().splitlines()
    acknowledged = {
        (int(worker), int(number))
        for worker, number in (line.split() for line in lines if line != "broken")
    }
    there = Counter(server.execute("SELECT worker, number FROM written"))
    print(dict(seen), len(acknowledged), "writes", lines.count("broken"), "ended connections")
    assert {key for key, times in there.items() if times != 1} == set()
    assert acknowledged - set(there) == set()
    assert len(set(there) - acknowledged) <= 4  # one for each writer, written when it was ended
    assert set(seen) <= {"reconnected", "hangup"} and seen["reconnected"] > 0
