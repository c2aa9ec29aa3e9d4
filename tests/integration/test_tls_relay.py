"""Databases over TLS through `criuctl tls-relay`: sessions are handed back as plain ones are, and a
server that is not the right one gets nothing.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from servers.certificates import Authority
from servers.common import free_ports
from servers.postgresql import PostgresServer
from servers.redis import redis_server
from support.command import Command, Criuctl, Home
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

Relays = Callable[..., Command]
PATIENCE = 60.0


@pytest.fixture
def relay(criuctl: Criuctl, home: Home) -> Iterator[Relays]:
    """Starts relays, which are ended in order afterwards."""
    started: list[Command] = []

    def start(*options: str | int | Path) -> Command:
        command = criuctl.start("tls-relay", *options)
        started.append(command)
        wait_until(
            lambda: command.out.stat().st_size or command.process.poll() is not None,
            PATIENCE,
            "the relay listens",
        )
        return command

    yield start
    for command in started:
        command.process.kill(signal.SIGTERM)
        assert command.process.wait(PATIENCE) == 0, command.output()
    assert not [*home.path.rglob(".s.PGSQL.*")], "its socket is gone"


@pytest.fixture
def authority(home: Home) -> Authority:
    folder = home.path / "tls"
    folder.mkdir()
    return Authority(folder)


@pytest.fixture
def server(postgres_server: PostgresServer, authority: Authority) -> Iterator[PostgresServer]:
    """A server with a certificate of the authority's."""
    postgres_server.execute(
        "DROP TABLE IF EXISTS things; CREATE TABLE things (number int, name text);"
        "CREATE SCHEMA IF NOT EXISTS extra"
    )
    uid = (postgres_server.data / "postgresql.conf").stat().st_uid
    made = authority.issue("localhost", uid=uid)
    names = [postgres_server.data / file.name for file in made]
    for file, name in zip(made, names, strict=True):
        name.write_bytes(file.read_bytes())
        name.chmod(0o600)
        os.chown(name, uid, -1)
    postgres_server.restart(
        "ssl=on", f"ssl_cert_file={names[0].name}", f"ssl_key_file={names[1].name}"
    )
    yield postgres_server
    postgres_server.restart()


def _start_again(server: PostgresServer) -> None:
    server.restart("ssl=on", "ssl_cert_file=localhost.pem", "ssl_key_file=localhost.key")


def _pool(zoo: Zoo, folder: Path, count: int) -> Animal:
    passwords = zoo.home / ".pgpass"
    passwords.write_text("*:*:*:scram:scram-secret\n")
    passwords.chmod(0o600)
    conninfo = f"host={folder} port=5432 user=scram dbname=postgres sslmode=prefer"
    env = {"PYTHONPATH": sysconfig.get_path("purelib")}
    return zoo.launch("postgres_client.py", "pool", conninfo, str(count), "", env=env, quiet=False)


def test_postgresql_sessions_are_handed_back(
    server: PostgresServer,
    authority: Authority,
    relay: Relays,
    zoo: Zoo,
    trip: Trip,
    home: Home,
) -> None:
    """Login by SCRAM, settings and prepared statements are there again, over new TLS connections,
    after a restart of the server.
    """
    folder = home.path / "relay"
    listen = folder / ".s.PGSQL.5432"
    relay("--listen", listen, "--to", f"localhost:{server.port}", "--protocol", "postgresql",
          "--ca", authority.ca)  # fmt: skip
    assert (listen.stat().st_mode & 0o777, listen.stat().st_uid) == (0o600, os.geteuid())
    animal = _pool(zoo, folder, 2)
    before = animal.ask()
    encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl"
    assert server.execute(f"{encrypted} AND usename = 'scram'") == [(4,)]
    report = trip.dump(animal, "--connections", "reconnect")
    assert {c["policy"] for c in report["connections"]} == {"reconnect"}
    wait_until(
        lambda: server.execute(f"{encrypted} AND usename = 'scram'") == [(0,)],
        PATIENCE,
        "the relay has closed what the dump has ended",
    )
    _start_again(server)
    restored = trip.restore(report, animal, equal=False)
    assert {c["outcome"] for c in restored.answer["connections"]} == {"reconnected"}
    assert server.execute(f"{encrypted} AND usename = 'scram'") == [(4,)]
    after = restored.ask()
    assert after["mine"] == before["mine"]
    assert ast.literal_eval(after["theirs"]) == ast.literal_eval(before["theirs"])


def test_a_restore_waits_for_a_server_behind_the_relay(
    server: PostgresServer,
    authority: Authority,
    relay: Relays,
    criuctl: Criuctl,
    zoo: Zoo,
    trip: Trip,
    home: Home,
) -> None:
    """The relay listens, and the server does not yet: that is "try again", not the end."""
    folder = home.path / "relay"
    command = relay("--listen", folder / ".s.PGSQL.5432", "--to", f"localhost:{server.port}",
                    "--protocol", "postgresql", "--ca", authority.ca)  # fmt: skip
    animal = _pool(zoo, folder, 1)
    animal.ask()
    report = trip.dump(animal, "--connections", "reconnect")
    server.stop()
    try:
        restoring = criuctl.start("restore", report["checkpoint"])
        wait_until(lambda: "refused" in command.err.read_text(), PATIENCE, "it was tried")
    finally:
        server.start("ssl=on", "ssl_cert_file=localhost.pem", "ssl_key_file=localhost.key")
    assert restoring.process.wait(120) == 0, restoring.output()
    restored = zoo.adopt(restoring.json()["pid"], animal)
    assert {c["outcome"] for c in restoring.json()["connections"]} == {"reconnected"}
    assert restored.ask()["mine"][0][0] == 0


def test_a_query_is_cancelled(
    server: PostgresServer, relay: Relays, authority: Authority, home: Home
) -> None:
    """The request has a connection of its own, with which the relay does as with any other."""
    folder = home.path / "relay"
    relay("--listen", folder / ".s.PGSQL.5432", "--to", f"localhost:{server.port}",
          "--protocol", "postgresql", "--ca", authority.ca)  # fmt: skip
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    with psycopg.connect(host=str(folder), user="trust", dbname="postgres") as connection:

        def cancel() -> None:
            wait_until(lambda: server.execute(asleep) == [(1,)], PATIENCE, "it sleeps")
            connection.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SELECT pg_sleep(600)")
        thread.join(PATIENCE)


def test_a_server_that_is_not_the_right_one_gets_nothing(
    server: PostgresServer, relay: Relays, authority: Authority, home: Home
) -> None:
    """Neither by another authority nor under another name; the client reads the reason."""
    other = home.path / "other"
    other.mkdir()
    wrong = {
        "authority": ("--ca", Authority(other, "another").ca),
        "name": ("--ca", authority.ca, "--server-name", "db.example.org"),
    }
    for number, (why, options) in enumerate(wrong.items(), 5001):
        folder = home.path / why
        to = ("--to", f"localhost:{server.port}", "--protocol", "postgresql")
        command = relay("--listen", folder / f".s.PGSQL.{number}", *to, *options)
        with pytest.raises(psycopg.OperationalError, match="is not trusted"):
            psycopg.connect(host=str(folder), port=number, user="trust", dbname="postgres")
        assert "is not trusted" in command.err.read_text()


def test_redis_connections_are_handed_back(
    authority: Authority, relay: Relays, zoo: Zoo, criuctl: Criuctl, home: Home
) -> None:
    """RESP2, RESP3, a pool, a forked child and asyncio over a port, and one over a unix socket."""
    certificate, key = authority.issue("localhost")
    tls_port, port = free_ports(2)
    tls = (f"tls-port {tls_port}", f"tls-cert-file {certificate}", f"tls-key-file {key}",
           f"tls-ca-cert-file {authority.ca}", "tls-auth-clients no")  # fmt: skip
    with redis_server("user app on >first ~* +@all", *tls) as server:
        path = home.path / "relay" / "redis.sock"
        for listen in (path, f"127.0.0.1:{port}"):
            relay("--listen", listen, "--to", f"localhost:{tls_port}", "--protocol", "redis",
                  "--ca", authority.ca)  # fmt: skip
        secret, config = home.path / "secret", home.path / "config.yaml"
        secret.touch(mode=0o600)
        secret.write_text("first\n")
        rule = {
            "match": {"protocol": "redis"},
            "policy": "reconnect",
            "application": "redis",
            "secret": {"file": str(secret)},
            "options": {"user": "app", "ask": "own", "watch": "never"},
        }
        config.write_text(json.dumps({"connection_rules": [rule]}))
        env = {"PYTHONPATH": sysconfig.get_path("purelib"), "REDIS_SECRET": "first"}
        animal = zoo.launch("cache.py", "quiet", str(port), str(path), quiet=False, env=env)
        first = animal.ask()
        report = criuctl("dump", animal.pid, "--config", config)
        server.stop()
        server.start()
        answer = criuctl("restore", report["checkpoint"], "--config", config)
        restored = zoo.adopt(answer["pid"], animal)
        assert {(c["outcome"], c["reason"]) for c in answer["connections"]} == {
            ("reconnected", "")
        }, first
        after = restored.ask()
        assert set(after["lost"].values()) | {after["child_lost"]} == {0}
        with server.client(username="app", password="first") as looking:
            assert looking.llen("unix") >= 2
        restored.end()
