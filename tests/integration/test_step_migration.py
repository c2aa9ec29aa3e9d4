"""A migration of a real PostgreSQL server, statement by statement as durable steps: it goes on at
its next statement after a kill, after a restore, and after another host has taken it over.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from servers.postgresql import PostgresServer
from support import oracle
from support.homes import Homes
from support.keeper import wait_until
from support.operating import TIMEOUT
from support.stepping import run_program, steps_of
from support.supervising import Supervised

pytestmark = pytest.mark.integration

STATEMENTS = 120
OPTIONS = ("--every", "0.5s", "--lease", "2s", "--backoff", "0.01s", "--stable-after", "0.01s")

# No statement can be run twice: `CREATE TABLE` fails, and the ledger has no duplicate.
PROGRAM = """
import psycopg
folders = [f"{folder}/session" for folder in sys.argv[3:]]
inside._session_folder = lambda: next(f for f in folders if os.path.exists(f + "/session.json"))

def execute(statement):
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone() if cursor.description else None

def applied(number):
    return execute(f"SELECT to_regclass('step_{number}') IS NOT NULL")[0]

number = 0
while number < int(sys.argv[2]):
    try:
        with inside.step(f"migrate-{number}", verify=lambda key: applied(number)) as s:
            if not s.done:
                execute(f"CREATE TABLE step_{number} AS SELECT clock_timestamp() AS at")
    except psycopg.OperationalError as error:
        say("again", number, error)
        continue
    number += 1
    time.sleep(0.02)
say("migrated")
time.sleep(10000)
"""


def applied(server: PostgresServer) -> int:
    """How many statements there are in the database."""
    with server.connect() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'step\\_%'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_migration_goes_on_at_its_next_statement(
    homes: Homes, postgres_server: PostgresServer
) -> None:
    a, b = homes("a"), homes("b")
    for host in (a, b):
        host.extra["CRIUCTL_CONNECTIONS"] = "hangup"
    dsn = f"host=127.0.0.1 port={postgres_server.port} user=trust dbname=postgres"
    folders = (str(a.home.run), str(b.home.run))
    run_program(a, "web", PROGRAM, dsn, str(STATEMENTS), *folders)
    watch = Supervised(a.start("supervise", "web", *OPTIONS))
    watch.wait("snapshot")
    standby = Supervised(b.start("supervise", "web", "--standby", *OPTIONS))
    standby.wait("standby")

    def more() -> None:
        before = applied(postgres_server)
        wait_until(lambda: applied(postgres_server) > before + 5, TIMEOUT, "it goes on")
        time.sleep(0.3)  # what is done now was done after the newest checkpoint

    more()
    for pid in oracle.tree(a("status", "web")["pid"]):
        os.kill(pid, signal.SIGKILL)
    watch.wait("recovered")
    more()
    known = a("status", "web")
    watch.command.process.kill(signal.SIGKILL)
    watch.command.process.wait(TIMEOUT)
    for pid in (known["holder_pid"], *oracle.tree(known["pid"])):
        os.kill(pid, signal.SIGKILL)
    standby.wait("recovered")
    more()
    assert standby.stop() == 0
    b("dump", "web")
    b("restore", "web", "--detach")
    wait_until(lambda: applied(postgres_server) == STATEMENTS, TIMEOUT, "it is migrated")
    b("wait", "web", "--match", "migrated", "--since", "0", "--timeout", TIMEOUT)
    steps = steps_of(b, "web")
    assert len(steps) == STATEMENTS
    assert {step["state"] for step in steps.values()} == {"done"}
