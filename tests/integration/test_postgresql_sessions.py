"""PostgreSQL sessions are learned and set up again under a client that knows nothing of it, at a
real server.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers.postgresql import PostgresServer
from support.handback import Handback

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.protocols.base import CannotRebuild, PeerAway, Settings
from criuctl.connections.protocols.postgresql import PROTOCOL

pytestmark = pytest.mark.integration


def secret(tmp_path: Path, text: str, **options: Any) -> Settings:
    path = tmp_path / "secret"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return Settings({"file": str(path)}, options)


@pytest.fixture
def server(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    monkeypatch.setenv("HOME", "/proc/nonexistent")  # no .pgpass of the user who runs the tests
    return postgres_server


@pytest.fixture
def client(server: PostgresServer) -> Iterator[Any]:
    with server.connect(prepare_threshold=0) as connection:
        yield connection


def value(connection: Any, statement: str, *arguments: Any) -> Any:
    return connection.execute(statement, arguments or None).fetchone()[0]


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("user", "host"),
    [
        ("trust", "127.0.0.1"),
        ("clear", "::1"),
        ("md5", "unix"),
        ("scram", "127.0.0.1"),
        ("scram", "unix"),
    ],
)
def test_the_next_statement_works(
    server: PostgresServer, user: str, host: str, tmp_path: Path
) -> None:
    """All that the session held is there again, for psycopg's prepared statements and for SQL's."""
    options = "-c work_mem=5MB"
    with server.connect(
        user, host, prepare_threshold=0, application_name="billing", options=options
    ) as client:
        client.execute("CREATE TABLE IF NOT EXISTS things (number bigint, name text)")
        client.execute('SET search_path = public, "odd, name"')
        client.execute("SET statement_timeout = '77s'")
        client.execute("SET TimeZone = 'Asia/Kolkata'")
        client.execute("SET my.own = 'it''s mine: ''ä'''")
        client.execute("SET default_transaction_isolation = 'serializable'")
        client.execute("PREPARE adding (int, int) AS SELECT $1 + $2")
        client.execute('LISTEN "News"')
        client.execute(
            "SELECT pg_advisory_lock(5), pg_advisory_lock(-2), pg_advisory_lock_shared(-1, 7)"
        )
        client.execute("SET ROLE plain")
        insert = "INSERT INTO public.things VALUES (%s, %s) RETURNING number"
        client.execute("RESET ROLE")
        client.execute(insert, (1, "one"))
        client.execute("SET ROLE plain")
        held = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        )
        statements = "SELECT array_agg(name ORDER BY name) FROM pg_prepared_statements"
        before = [
            value(client, q)
            for q in (
                held,
                statements,
                "SHOW search_path",
                "SHOW work_mem",
                "SELECT pg_backend_pid()",
            )
        ]
        hand = Handback(
            PROTOCOL, client.fileno(), secret(tmp_path, f"{user}-secret", settings=["my.own"])
        )
        facts = hand.round()
        after = [
            value(client, q)
            for q in (
                held,
                statements,
                "SHOW search_path",
                "SHOW work_mem",
                "SELECT pg_backend_pid()",
            )
        ]
        assert before[0] == 3
        assert "_pg3_0" in before[1] and "adding" in before[1]
        # The questions above were prepared one by one, so the later list has those as well.
        assert [before[0], *before[2:4]] == [after[0], *after[2:4]] and set(before[1]) <= set(
            after[1]
        )
        assert before[4] != after[4] == facts["backend"]
        assert not [name for name in after[1] if "criuctl" in name]
        assert value(client, "SHOW statement_timeout") == "77s"
        assert value(client, "SHOW my.own") == "it's mine: 'ä'"
        assert value(client, "SHOW application_name") == "billing"
        assert value(client, "SHOW default_transaction_isolation") == "serializable"
        assert value(client, "SELECT current_user") == "plain"
        assert value(client, "SELECT session_user") == user
        client.execute("RESET ROLE; RESET work_mem", prepare=False)
        assert value(client, "SHOW work_mem") == "5MB"
        assert client.execute(insert, (2, "two")).fetchone() == (2,)
        assert value(client, "EXECUTE adding (3, 4)") == 7
        assert client.info.timezone.key == "Asia/Kolkata"
        with server.connect() as other:
            other.execute("NOTIFY \"News\", 'hello'")
        assert [n.payload for n in client.notifies(timeout=60, stop_after=1)] == ["hello"]


def test_looking_leaves_no_trace(client: Any) -> None:
    """The unnamed statement, the settings and the list of statements are what they were; the
    session is the same one.
    """
    raw = client.pgconn
    raw.prepare(b"", b"SELECT 'the unnamed one'")
    backend = raw.backend_pid
    state = Handback(PROTOCOL, client.fileno()).inspect()
    assert state["backend"] == backend
    assert raw.exec_prepared(b"", []).get_value(0, 0) == b"the unnamed one"
    assert (
        value(client, "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE '%criuctl%'")
        == 0
    )
    assert state["settings"] == {}
    assert state["plain"] == "the server has no TLS"


def test_a_session_of_another_user(server: PostgresServer) -> None:
    with server.connect() as client:
        client.execute("SET SESSION AUTHORIZATION plain")
        Handback(PROTOCOL, client.fileno()).round()
        assert client.execute("SELECT session_user, current_user").fetchone() == ("plain", "plain")
        client.execute("RESET SESSION AUTHORIZATION")
        assert client.execute("SELECT session_user, current_user").fetchone() == ("trust", "trust")


def test_another_client_encoding(client: Any) -> None:
    client.execute("SET client_encoding = 'LATIN1'")
    client.execute("SET my.own = 'größer'")
    client.execute("SELECT 'Ärger' || %s", ("!",))
    Handback(PROTOCOL, client.fileno(), Settings({}, {"settings": ["my.own"]})).round()
    assert client.info.encoding == "iso8859-1"
    assert value(client, "SELECT 'Ärger' || %s", "!") == "Ärger!"
    assert value(client, "SHOW my.own") == "größer"


def test_types_that_users_made(server: PostgresServer, client: Any) -> None:
    """They come back with their numbers; if they are others now, that is said instead of
    guessed.
    """
    client.execute(
        "DROP TYPE IF EXISTS mood; CREATE TYPE mood AS ENUM ('glad', 'sad')", prepare=False
    )
    client.execute("PREPARE how (mood) AS SELECT $1", prepare=False)
    client.execute("SELECT 1 WHERE 'glad'::mood = %s", ("glad",))
    hand = Handback(PROTOCOL, client.fileno())
    hand.round()
    assert value(client, "EXECUTE how ('sad')") == "sad"
    hand.inspect()
    server.execute("DROP TYPE mood; CREATE TYPE mood AS ENUM ('glad', 'sad')")
    hand.cut()
    with pytest.raises(CannotRebuild):
        hand.reconnect()


def test_a_statement_that_the_server_does_not_understand_any_more(
    server: PostgresServer, client: Any
) -> None:
    """It was of no use before either: a warning, and all others are there."""
    client.execute("CREATE TABLE passing (a int)")
    for statement in ("SELECT %s + 1", "INSERT INTO passing VALUES (%s)", "SELECT %s + 2"):
        client.execute(statement, (1,))
    client.execute("PREPARE old AS SELECT * FROM passing")
    server.execute("DROP TABLE passing")
    facts = Handback(PROTOCOL, client.fileno()).round()
    assert len([text for text in facts["warnings"] if '"passing" does not exist' in text]) == 2
    assert (value(client, "SELECT %s + 1", 1), value(client, "SELECT %s + 2", 1)) == (2, 3)


OBSTACLES = [
    ("BEGIN", "a transaction is open"),
    ("CREATE TEMPORARY TABLE mine (a int)", "temporary objects: mine"),
    (
        "CREATE FUNCTION pg_temp.helper() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "temporary objects: helper",
    ),
    ("BEGIN; DECLARE far CURSOR WITH HOLD FOR SELECT 1; COMMIT", "WITH HOLD cursors: far"),
    ("SELECT 1; PREPARE two AS SELECT 2; SELECT 3", "two was made by several commands"),
]


@pytest.mark.parametrize(("statement", "reason"), OBSTACLES)
def test_what_cannot_be_rebuilt(client: Any, statement: str, reason: str) -> None:
    client.execute(statement, prepare=False)
    with pytest.raises(CannotRebuild, match=reason):
        Handback(PROTOCOL, client.fileno()).inspect()
    assert value(client, "SELECT 42") == 42


def test_a_failed_transaction_is_an_open_one(client: Any) -> None:
    client.execute("BEGIN")
    with pytest.raises(psycopg.errors.UndefinedTable):
        client.execute("SELECT * FROM nothing_of_that_name")
    with pytest.raises(CannotRebuild, match="a transaction is open"):
        Handback(PROTOCOL, client.fileno()).inspect()
    client.execute("ROLLBACK")
    assert value(client, "SELECT 42") == 42


@pytest.mark.parametrize("local", [True, False])
def test_a_query_in_flight(server: PostgresServer, client: Any, local: bool) -> None:
    """Asked for and not answered: the program gets its answer, and only that.

    A local server process says that it is busy; of another server TCP may know, or the answer is
    found in front of ours.
    """
    raw = client.pgconn
    with server.connect() as other:
        other.execute("SELECT pg_advisory_lock(4711)")
        # "sent after received" comes from a clock that ticks every few milliseconds
        time.sleep(0.05)
        raw.send_query(b"SELECT pg_advisory_lock(4711), 'done'")
        raw.flush()
        waits = f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {raw.backend_pid}"
        wait_for(lambda: server.execute(waits) == [("Lock",)])
        hand = Handback(
            PROTOCOL, client.fileno(), peer_process=f"{raw.backend_pid} (postgres)" if local else ""
        )
        with pytest.raises(CannotRebuild, match="in flight"):
            hand.inspect()
    assert raw.get_result().get_value(0, 1) == b"done"
    assert raw.get_result() is None
    assert value(client, "SELECT 42") == 42


def test_an_unread_answer(client: Any) -> None:
    raw = client.pgconn
    raw.send_query(b"SELECT 'done'")
    raw.flush()
    assert select.select([client.fileno()], [], [], 60)[0]
    with pytest.raises(CannotRebuild, match="has not read"):
        Handback(PROTOCOL, client.fileno()).inspect()
    assert raw.get_result().get_value(0, 0) == b"done"
    assert raw.get_result() is None
    assert value(client, "SELECT 42") == 42


def test_a_copy_under_way(client: Any) -> None:
    client.execute("CREATE TABLE IF NOT EXISTS copied (a int)")
    with client.cursor().copy("COPY copied FROM STDIN") as copy:
        copy.write_row((1,))
        with pytest.raises(CannotRebuild):
            Handback(PROTOCOL, client.fileno()).inspect(seconds=0.5)
        copy.write_row((2,))
    assert value(client, "SELECT count(*) FROM copied") == 2


def test_an_advisory_lock_that_is_taken(server: PostgresServer, client: Any) -> None:
    client.execute("SELECT pg_advisory_lock(11)")
    hand = Handback(PROTOCOL, client.fileno())
    hand.inspect()
    hand.cut()
    with server.connect() as other:
        other.execute("SELECT pg_advisory_lock(11)")
        with pytest.raises(CannotRebuild, match="held by another session"):
            hand.reconnect()


def test_a_server_that_was_restarted(server: PostgresServer, client: Any) -> None:
    client.execute("SELECT %s + 1", (1,))
    hand = Handback(PROTOCOL, client.fileno())
    hand.inspect()
    hand.cut()
    server.restart()
    hand.reconnect()
    assert value(client, "SELECT %s + 1", 2) == 3


def test_defaults_that_changed_meanwhile(server: PostgresServer, client: Any) -> None:
    """A client relies on the settings that the server reported: what can be kept is, the rest is a
    warning.
    """
    state_before = client.info.parameter_status("DateStyle")
    hand = Handback(PROTOCOL, client.fileno())
    hand.inspect()["reported"]["server_version"] = "9.6.1"
    hand.cut()
    server.execute("ALTER ROLE trust SET DateStyle = 'German'")
    try:
        facts = hand.reconnect()
    finally:
        server.execute("ALTER ROLE trust RESET DateStyle")
    assert any("server_version was 9.6.1 and is" in text for text in facts["warnings"])
    assert value(client, "SHOW DateStyle") == state_before


# -- passwords ------------------------------------------------------------------------------------


def test_a_password_that_was_changed(server: PostgresServer, tmp_path: Path) -> None:
    """The error says that the old one is wrong and does not repeat it; the new one opens."""
    with server.connect("scram") as client:
        hand = Handback(PROTOCOL, client.fileno(), secret(tmp_path, "scram-secret"))
        hand.inspect()
        hand.cut()
        server.execute("ALTER ROLE scram PASSWORD 'another-secret'")
        try:
            with pytest.raises(CannotRebuild, match="password authentication failed") as caught:
                hand.reconnect()
            assert "scram-secret" not in str(caught.value) + caught.value.hint
            hand.cut()
            hand.settings = secret(tmp_path, "another-secret")
            hand.reconnect()
        finally:
            server.execute("ALTER ROLE scram PASSWORD 'scram-secret'")
        assert value(client, "SELECT 42") == 42


def test_no_password_is_known(server: PostgresServer) -> None:
    with server.connect("scram") as client:
        hand = Handback(PROTOCOL, client.fileno())
        with pytest.raises(CannotRebuild, match="wants a password and none is known") as caught:
            hand.round()
        assert "secret:" in caught.value.hint


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_password_file_of_the_program(
    server: PostgresServer, tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "pgpass"
    path.write_text(
        "# mine\nlocalhost:1:*:*:wrong\n"
        f"localhost:{server.port}:postgres:clear:clear-secret\n*:*:*:*:last\n"
    )
    path.chmod(mode)
    with server.connect("clear", "unix") as client:
        hand = Handback(PROTOCOL, client.fileno())
        hand.inspect()["password_file"] = str(path)
        hand.cut()
        if mode == 0o600:
            hand.reconnect()
            assert value(client, "SELECT 42") == 42
        else:
            with pytest.raises(CannotRebuild, match=r"none is known .*may be read by others"):
                hand.reconnect()


def test_a_database_that_is_gone_and_a_server_that_is_full(server: PostgresServer) -> None:
    """One will not come back by waiting, the other may."""
    server.execute("CREATE DATABASE passing")
    with server.connect(dbname="passing") as client:
        hand = Handback(PROTOCOL, client.fileno())
        hand.inspect()
        hand.cut()
        wait_for(
            lambda: not server.execute("SELECT 1 FROM pg_stat_activity WHERE datname = 'passing'")
        )
        server.execute("DROP DATABASE passing")
        with pytest.raises(CannotRebuild, match='database "passing" does not exist'):
            hand.reconnect()
    with server.connect("plain") as client:
        hand = Handback(PROTOCOL, client.fileno())
        hand.inspect()
        server.execute("ALTER ROLE plain CONNECTION LIMIT 0")
        hand.cut()
        try:
            with pytest.raises(PeerAway, match="too many connections"):
                hand.reconnect()
        finally:
            server.execute("ALTER ROLE plain CONNECTION LIMIT -1")
        hand.cut()
        hand.reconnect()
        assert value(client, "SELECT 42") == 42


# -- encryption -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    postgres_server.enable_tls()
    postgres_server.restart("ssl=on")
    yield postgres_server
    postgres_server.restart()


class TestEncryption:
    """A plain word into an encrypted session ends it, so none is said unless the session is proved
    to be plain.
    """

    @pytest.fixture(autouse=True)
    def _no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/proc/nonexistent")

    @pytest.mark.parametrize("options", [{}, {"user": "trust", "database": "postgres"}])
    def test_encrypted(self, tls_server: PostgresServer, options: dict[str, str]) -> None:
        with tls_server.connect(sslmode="require") as client:
            with pytest.raises(
                CannotRebuild, match="encrypted" if options else "unknown|cannot determine"
            ):
                Handback(PROTOCOL, client.fileno(), Settings({}, options)).inspect()
            assert value(client, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") is True

    def test_plain(self, tls_server: PostgresServer) -> None:
        with tls_server.connect(sslmode="disable") as client:
            hand = Handback(
                PROTOCOL, client.fileno(), Settings({}, {"user": "trust", "database": "postgres"})
            )
            hand.round()
            assert hand.record.session["plain"] == "the server says so"
            assert value(client, "SELECT 42") == 42
            ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'criuctl'"
            # the server ends a session after its client has gone
            wait_for(lambda: tls_server.execute(ours) == [(0,)])

    def test_seen_there_to_be_busy(self, tls_server: PostgresServer) -> None:
        with tls_server.connect(sslmode="disable") as client:
            client.execute("BEGIN")
            with pytest.raises(CannotRebuild, match="a transaction is open"):
                Handback(
                    PROTOCOL,
                    client.fileno(),
                    Settings({}, {"user": "trust", "database": "postgres"}),
                ).inspect()

    def test_vouched_for(self, tls_server: PostgresServer) -> None:
        with tls_server.connect(sslmode="disable") as client:
            hand = Handback(PROTOCOL, client.fileno(), Settings({}, {"tls": False}))
            hand.round()
            assert value(client, "SELECT 42") == 42

    def test_a_unix_socket_has_none(self, tls_server: PostgresServer) -> None:
        with tls_server.connect(host="unix") as client:
            Handback(PROTOCOL, client.fileno()).round()
            assert value(client, "SELECT 42") == 42


# -- servers that are none, or lie ----------------------------------------------------------------


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


AUTHENTICATED = message(b"R", struct.pack("!I", 0))
SASL = message(b"R", struct.pack("!I", 10) + b"SCRAM-SHA-256\0\0")
READY = message(b"Z", b"I")


@contextmanager
def fake(*answers: bytes) -> Iterator[socket.socket]:
    """The client's end of a connection whose server sends the next of `answers` for whatever comes,
    then only listens.
    """
    mine, theirs = socket.socketpair()

    def serve() -> None:
        with suppress(ConnectionError):  # a client that turns away is what most of these are about
            for answer in answers:
                if not theirs.recv(1 << 16):
                    return
                theirs.sendall(answer)
            while theirs.recv(1 << 16):
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield mine
    finally:
        mine.close()
        thread.join(20)
        theirs.close()


LIES = {
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
    "silence": (),
    "a length beyond reason": (b"R\xff\xff\xff\xff",),
    "a length below reason": (b"R\0\0\0\0",),
    "an unknown method": (message(b"R", struct.pack("!I", 77)),),
    "no method": (message(b"R"),),
    "ready at once": (READY,),
    "no proof": (SASL, AUTHENTICATED + READY),
    "a nonce that is not ours": (
        SASL,
        message(b"R", struct.pack("!I", 11) + b"r=other,s=AAAA,i=4096"),
    ),
    "no challenge": (SASL, message(b"R", struct.pack("!I", 11) + b"\xff\xff")),
    "a transaction": (AUTHENTICATED + READY, message(b"1") + message(b"Z", b"T")),
    "half a row": (AUTHENTICATED + READY, message(b"D", b"\0\5") + READY),
    "a copy": (AUTHENTICATED + READY, message(b"G", b"\0\0\0")),
    "cannot fork": (b"Ecould not fork new process\n\0",),
}
STATE = {
    "user": "u", "database": "d", "authorization": "u", "role": "none", "encoding": "UTF8",
    "startup": {}, "settings": {"a.b": "c"}, "reported": {}, "prepared": [], "channels": [],
    "locks": [], "notifications": [],
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_lies_at_the_restore(name: str, tmp_path: Path) -> None:
    """Reported within the deadline, whatever it sends; no other exception gets out."""
    with fake(*LIES[name]) as sock:
        record = ConnectionRecord(pid=os.getpid(), fd=9, session=STATE)
        began = time.monotonic()
        with pytest.raises((CannotRebuild, PeerAway)) as caught:
            PROTOCOL.reconnect(sock, record, secret(tmp_path, "hidden-word"), began + 1)
        assert time.monotonic() - began < 11
        assert "hidden-word" not in str(caught.value)


@pytest.mark.parametrize(
    "answers",
    [
        (b"garbage",),
        (),
        (message(b"C", b"SELECT 1\0"),),
        (message(b"Z", b"T"),),
        (READY, b"garbage"),
        (READY, READY),
        (
            READY,
            2 * (message(b"D", struct.pack("!HI", 1, 4) + b"null") + message(b"C", b"\0")) + READY,
        ),
        (
            READY,
            2 * (message(b"D", struct.pack("!HI", 1, 2) + b"{}") + message(b"C", b"\0")) + READY,
        ),
        (READY, message(b"D", b"\0\1\0\0\0\1x") + READY),
        (READY, message(b"E", b"SERROR\0C42601\0Mno\0\0") + READY, READY),
    ],
)
def test_a_server_that_lies_at_the_dump(answers: tuple[bytes, ...]) -> None:
    with fake(*answers) as sock:
        began = time.monotonic()
        with pytest.raises(CannotRebuild):
            PROTOCOL.inspect(sock, ConnectionRecord(pid=os.getpid(), fd=9), Settings(), began + 1)
        assert time.monotonic() - began < 11


def test_a_notification_that_comes_between_is_reported() -> None:
    """It cannot be put back into the queue, so a warning says so."""
    session = {
        "pid": 7, "database": "d", "authorization": "u", "role": "none", "version": "150000",
        "settings": None, "activity": {"usename": "u", "backend_start": "now"}, "reported": {},
        "prepared": None, "channels": ["news"], "locks": None, "temporary": None, "cursors": None,
    }  # fmt: skip
    answers = b"".join(
        message(b"D", struct.pack("!HI", 1, len(text)) + text) + message(b"C", b"SELECT 1\0")
        for text in (b"UTF8", json.dumps(session).encode())
    )
    notification = message(b"A", struct.pack("!I", 99) + b"news\0stop the press\0")
    with fake(READY, notification + answers + READY) as sock:
        state = PROTOCOL.inspect(
            sock, ConnectionRecord(pid=os.getpid(), fd=9), Settings(), time.monotonic() + 60
        )
    assert state["notifications"] == [["news", "stop the press", 99]]
    assert "stop the press" in state["warnings"][0]


def test_what_is_not_ours_is_left_in_the_queue() -> None:
    """An answer to the program's own query, found in front of ours, is the program's to read."""
    answer = message(b"C", b"SELECT 1\0") + READY
    with fake(answer) as sock:
        with pytest.raises(CannotRebuild, match="a query is in flight"):
            PROTOCOL.inspect(
                sock, ConnectionRecord(pid=os.getpid(), fd=9), Settings(), time.monotonic() + 60
            )
        sock.settimeout(60)
        assert sock.recv(100) == answer


def test_a_record_of_another_version() -> None:
    with fake(AUTHENTICATED + READY) as sock:
        record = ConnectionRecord(pid=1, fd=9, session={"user": "u"})
        with pytest.raises(CannotRebuild, match="not one of this version"):
            PROTOCOL.reconnect(sock, record, Settings(), time.monotonic() + 60)
