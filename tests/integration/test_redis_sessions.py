"""The redis protocol on real servers, without CRIU: what a session holds is learned, and set up
again under the program's feet.

`Program` stands for the program: it owns a descriptor, and after `Program.move` the same descriptor
is another connection.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers.common import free_ports
from servers.redis import RedisServer, redis_server

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.protocols.base import CannotRebuild, PeerAway, Settings
from criuctl.connections.protocols.redis import PROTOCOL
from criuctl.connections.protocols.redis_wire import Resp
from criuctl.connections.protocols.wire import Wire

pytestmark = pytest.mark.integration

SECONDS = 60.0
LUA_SLEEP = "local t=redis.call('TIME')[1] while redis.call('TIME')[1]-t<2 do end return 'late'"


class Program:
    """A client that holds one descriptor for ever, whatever is behind it."""

    def __init__(self, server: RedisServer, family: str = "inet", **options: Any) -> None:
        self.server, self.family = server, family
        self.sock = server.connect(family)
        self.resp = Resp(Wire(self.sock, time.monotonic() + 60))
        self.settings = Settings(options.pop("secret", {}), options)

    def __call__(self, *words: str | int) -> Any:
        return self.resp.ask(*words)

    @property
    def record(self) -> ConnectionRecord:
        return ConnectionRecord(
            os.getpid(), self.sock.fileno(), type="stream", peer=self.server.address
        )

    def inspect(self, settings: Settings | None = None, seconds: float = SECONDS) -> dict[str, Any]:
        flags = os.get_blocking(self.sock.fileno())
        with socket.socket(fileno=os.dup(self.sock.fileno())) as borrowed:
            try:
                return PROTOCOL.inspect(
                    borrowed, self.record, settings or self.settings, time.monotonic() + seconds
                )
            finally:
                assert os.get_blocking(self.sock.fileno()) == flags

    def reconnect(
        self, session: Mapping[str, Any], settings: Settings | None = None
    ) -> dict[str, Any]:
        """A fresh connection under the program's descriptor."""
        with self.server.connect(self.family) as fresh:
            os.dup2(fresh.fileno(), self.sock.fileno())
        record = ConnectionRecord(
            os.getpid(), self.sock.fileno(), type="stream", session=dict(session)
        )
        with socket.socket(fileno=os.dup(self.sock.fileno())) as borrowed:
            facts = PROTOCOL.reconnect(
                borrowed, record, settings or self.settings, time.monotonic() + SECONDS
            )
        assert self.resp.wire.unread() == 0
        return facts

    def move(self) -> dict[str, Any]:
        """What a dump and a restore do."""
        return self.reconnect(self.inspect())

    def close(self) -> None:
        self.sock.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """The server of this module without data or users of another test's."""
    with shared.client() as admin:
        admin.flushall()
    return shared


@pytest.fixture
def program(server: RedisServer) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def make(family: str = "inet", **options: Any) -> Program:
        made.append(Program(server, family, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., Program]


# -- what is brought back
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["inet", "inet6", "unix"])
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_session_moves(family: str, protocol: int, program: Make) -> None:
    """Database, name, RESP version, NO-EVICT: the same descriptor goes on as if nothing had
    happened.
    """
    client = program(family)
    assert isinstance(client("HELLO", protocol), dict if protocol == 3 else list)
    assert [
        client(*words)
        for words in (
            ("SELECT", 5),
            ("CLIENT", "SETNAME", "worker-7"),
            ("CLIENT", "NO-EVICT", "ON"),
        )
    ] == ["OK"] * 3
    client("SET", "k", "v")
    before = client("CLIENT", "ID")
    facts = client.move()
    assert facts["db"] == 5 and facts["resp"] == protocol and "left_out" not in facts
    assert client("CLIENT", "ID") > before
    assert client("GET", "k") == "v"
    info = client("CLIENT", "INFO")
    assert client.resp.kind == ("=" if protocol == 3 else "$")
    for part in (
        " db=5 ",
        " name=worker-7 ",
        f" resp={protocol}",
        " flags=e" if family != "unix" else " flags=Ue",
    ):
        assert part in info


def test_nothing_is_said_on_the_programs_connection(program: Make) -> None:
    client = program()
    client("SET", "k", "v")
    before = client("CLIENT", "INFO")
    assert " cmd=client|info " in before
    client("GET", "k")
    session = client.inspect()
    assert session["last_command"] == "get"
    assert client.inspect()["last_command"] == "get"
    assert client("CLIENT", "ID") == session["id"]


def test_a_user_with_a_password(server: RedisServer, program: Make, tmp_path: Path) -> None:
    """The user comes from the session, the password from the secret, read again when it is
    needed.
    """
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    secret.chmod(0o600)
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">first", "~*", "+@all")
    client = program(secret={"file": str(secret)}, user="app")
    assert client("AUTH", "app", "first") == "OK"
    session = client.inspect()
    assert session["user"] == "app"
    assert "first" not in str(session)
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "resetpass", ">second")
    with pytest.raises(CannotRebuild, match="WRONGPASS") as refused:
        client.reconnect(session)
    assert "first" not in refused.value.message + refused.value.hint
    secret.write_text("second\n")
    # the user is the session's
    assert client.reconnect(session, Settings({"file": str(secret)}))["user"] == "app"
    assert client("ACL", "WHOAMI") == "app"


def test_a_session_does_not_gain_the_rights_of_the_rules_user(
    server: RedisServer, program: Make, monkeypatch: Any
) -> None:
    monkeypatch.setenv("REDIS_SECRET", "pw")
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "other", "on", ">pw", "~*", "+@all")
    client = program(secret={"env": "REDIS_SECRET"}, user="other")
    assert client.move()["user"] == "default"
    assert client("ACL", "WHOAMI") == "default"
    # an account that the operator has replaced by another
    session = {**client.inspect(), "user": "retired"}
    assert "user_changed" in client.reconnect(session)
    assert client("ACL", "WHOAMI") == "other"


def test_a_password_that_the_server_does_not_want_any_more(
    program: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_SECRET", "whatever")
    client = program(secret={"env": "REDIS_SECRET"})
    client.move()
    assert client("PING") == "PONG"


def test_requirepass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SECRET", "hush")
    with redis_server("requirepass hush") as server:
        client = Program(server)
        assert client("AUTH", "hush") == "OK"
        with pytest.raises(CannotRebuild, match="NOAUTH") as refused:
            client.inspect()
        assert "secret" in refused.value.hint
        client.settings = Settings({"env": "REDIS_SECRET"})
        session = client.inspect()
        with pytest.raises(CannotRebuild, match="NOAUTH"):
            client.reconnect(session, Settings())
        monkeypatch.delenv("REDIS_SECRET")
        with pytest.raises(CannotRebuild, match="REDIS_SECRET is not set"):
            client.reconnect(session)
        monkeypatch.setenv("REDIS_SECRET", "wrong-one")
        with pytest.raises(CannotRebuild, match="WRONGPASS") as refused:
            client.reconnect(session)
        assert "wrong-one" not in refused.value.message + refused.value.hint
        monkeypatch.setenv("REDIS_SECRET", "hush")
        client.reconnect(session)
        assert client("PING") == "PONG"
        client.close()


def test_redis_py_goes_on(server: RedisServer) -> None:
    """An unmodified redis-py client, in RESP2 and RESP3, with a pipeline before and after."""
    for protocol in (2, 3):
        client = server.client(protocol=protocol, db=2, client_name="py")
        assert client.pipeline().set("a", 1).incr("a").execute() == [True, 2]
        (connection,) = client.connection_pool._available_connections
        for expected in range(3, 6):
            with (
                socket.socket(fileno=os.dup(connection._sock.fileno())) as borrowed,
                server.connect() as fresh,
            ):
                record = ConnectionRecord(os.getpid(), connection._sock.fileno(), type="stream")
                session = PROTOCOL.inspect(borrowed, record, Settings(), time.monotonic() + SECONDS)
                os.dup2(fresh.fileno(), connection._sock.fileno())
            record = ConnectionRecord(
                os.getpid(), connection._sock.fileno(), type="stream", session=session
            )
            with socket.socket(fileno=os.dup(connection._sock.fileno())) as borrowed:
                PROTOCOL.reconnect(borrowed, record, Settings(), time.monotonic() + SECONDS)
            assert client.incr("a") == expected
            assert client.client_info()["name"] == "py"
        (after,) = client.connection_pool._available_connections
        assert after is connection  # it never noticed
        client.delete("a")


def test_the_server_was_started_again_meanwhile(tmp_path: Path) -> None:
    with redis_server() as server:
        client = Program(server)
        client("SELECT", 1)
        client("SET", "k", "v")
        session = client.inspect()
        server.stop()
        server.start()
        client.reconnect(session)
        assert client("GET", "k") == "v"
        client.close()


# -- what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        ([("MULTI",), ("SET", "k", "1")], "transaction"),
        ([("MULTI",)], "transaction"),
        ([("WATCH", "k")], "WATCH"),
        ([("WATCH", "k"), ("GET", "k")], "WATCH"),
        ([("SUBSCRIBE", "c")], "subscriptions"),
        ([("HELLO", 3), ("SUBSCRIBE", "c")], "subscriptions"),
        ([("PSUBSCRIBE", "c*")], "subscriptions"),
        ([("SSUBSCRIBE", "c")], "subscriptions"),
        ([("MONITOR",)], "MONITOR"),
        ([("HELLO", 3), ("CLIENT", "TRACKING", "ON")], "CLIENT TRACKING"),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else " ".join(str(word) for words in value for word in words)
    ),
)
def test_what_cannot_be_rebuilt(
    commands: list[tuple[Any, ...]], reason: str, program: Make
) -> None:
    client = program()
    for words in commands:
        client.resp.wire.send(b"")
        if words[0].endswith("SUBSCRIBE"):
            client.resp.wire.send(_command(*words))
            assert client.resp._value(0)[1][0] == words[0].lower()
        else:
            client(*words)
    with pytest.raises(CannotRebuild, match=reason):
        client.inspect()


def test_a_transaction_is_not_disturbed_by_being_looked_at(program: Make) -> None:
    """CLIENT INFO in a MULTI would be part of it; with --leave-running the program goes on, and its
    EXEC must be its own.
    """
    client = program()
    client("MULTI")
    client("INCR", "n")
    with pytest.raises(CannotRebuild, match="transaction"):
        client.inspect()
    assert client("EXEC") == [1]
    client.move()
    assert client("INCR", "n") == 2


def test_watch_is_noticed_however_long_ago(program: Make, server: RedisServer) -> None:
    """Redis 7.0 does not tell; it is judged by the memory of the connection, and must not be wrong
    in either direction.
    """
    client = program()
    client("SET", "big", "x" * 300_000)
    client("GET", "big")
    client.inspect()
    client("WATCH", "big")
    client("GET", "big")
    with pytest.raises(CannotRebuild, match="WATCH"):
        client.inspect()
    with server.client() as other:
        other.set("big", "y")
    assert client("MULTI") == "OK"
    client("SET", "big", "z")
    assert client("EXEC") is None  # it was watched to the end
    client.inspect()
    client("WATCH", "big")
    client("UNWATCH")
    client("GET", "big")
    client.inspect()
    for _ in range(50):
        client("MULTI")
        client("GET", "big")
        client("EXEC")
        client("PING", "p" * 500)
    client.move()


@pytest.mark.parametrize(("family", "reason"), [("unix", r"blocks \(blpop\)"), ("inet", r"blocks")])
def test_a_blocking_command(family: str, reason: str, program: Make, server: RedisServer) -> None:
    """Over a unix socket only the server knows; TCP itself may know that there was no answer."""
    client = program(family)
    client("SET", "k", "v")
    client.resp.wire.send(_command("BLPOP", "list", "0"))
    with server.client() as other:
        _until(lambda: other.info("clients")["blocked_clients"] == 1)
    with pytest.raises(CannotRebuild, match=reason):
        client.inspect()
    with server.client() as other:
        other.rpush("list", "x")
    assert client.resp.answer() == ["list", "x"]  # exactly its own answer, nothing else
    client.move()
    assert client("GET", "k") == "v"


@pytest.mark.parametrize("family", ["unix", "inet"])
def test_a_command_that_is_half_sent(family: str, program: Make) -> None:
    client = program(family)
    client("PING")
    client.resp.wire.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nab")
    # as the server, or as the kernel sees it
    with pytest.raises(CannotRebuild, match=r"half sent|has not been answered"):
        client.inspect()
    client.resp.wire.send(b"cde\r\n")
    assert client.resp.answer() == "OK"
    assert client("GET", "k") == "abcde"


def test_an_unread_answer(program: Make) -> None:
    client = program()
    client.resp.wire.send(_command("PING"))
    assert client.resp.wire.arrives(SECONDS)
    with pytest.raises(CannotRebuild, match="7 bytes from the server have not been read"):
        client.inspect()
    assert client.resp.answer() == "PONG"


def test_a_busy_server(program: Make, server: RedisServer) -> None:
    """A script that runs for two seconds: the look ends when it may take no longer, and the answer
    is the program's.
    """
    client = program()
    client.resp.wire.send(_command("EVAL", LUA_SLEEP, "0"))
    with pytest.raises(CannotRebuild):
        client.inspect(seconds=0.3)
    assert client.resp.answer() == "late"


def test_replies_turned_off(program: Make) -> None:
    client = program()
    client("PING")
    time.sleep(0.05)  # the clock that tells "sent after received" ticks every few milliseconds
    client.resp.wire.send(_command("CLIENT", "REPLY", "OFF"))
    with pytest.raises(CannotRebuild, match="replies are turned off"):
        client.inspect()


def test_a_closed_connection(program: Make, server: RedisServer) -> None:
    client = program()
    with server.client() as admin:
        admin.client_kill_filter(_id=client("CLIENT", "ID"))
    _until(client.resp.wire.closed)
    with pytest.raises(CannotRebuild, match="closed"):
        client.inspect()


def test_tls(tmp_path: Path) -> None:
    """Its keys are in the program: nothing is said in plain text on it, and it goes on."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    _self_signed(certificate, key)
    (port,) = free_ports(1)
    lines = (
        f"tls-port {port}",
        f"tls-cert-file {certificate}",
        f"tls-key-file {key}",
        "tls-auth-clients no",
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate)
    with (
        redis_server(*lines),
        socket.create_connection(("127.0.0.1", port)) as plain,
        socket.socket(fileno=os.dup(plain.fileno())) as borrowed,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        tls.sendall(b"PING\r\n")
        assert tls.recv(16) == b"+PONG\r\n"
        record = ConnectionRecord(os.getpid(), borrowed.fileno(), type="stream")
        for options in ({}, {"ask": "own"}):
            with pytest.raises(CannotRebuild, match="TLS"):
                PROTOCOL.inspect(
                    borrowed, record, Settings({}, options), time.monotonic() + SECONDS
                )
        tls.sendall(b"PING\r\n")
        assert tls.recv(16) == b"+PONG\r\n"


def _self_signed(certificate: Path, key: Path) -> None:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(
            name,
            name,
            secret.public_key(),
            x509.random_serial_number(),
            now - timedelta(1),
            now + timedelta(1),
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(secret.private_bytes(serialization.Encoding.PEM, form, no_password))


def test_tracking_where_the_rule_allows_a_stale_cache(program: Make, server: RedisServer) -> None:
    client = program(stale_cache=True, watch="never")
    client("HELLO", 3)
    client("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "a:", "PREFIX", "b:", "NOLOOP")
    facts = client.move()
    assert "stale" in facts["stale_cache"]
    assert client("CLIENT", "TRACKINGINFO")["prefixes"] == ["a:", "b:"]
    assert set(client("CLIENT", "TRACKINGINFO")["flags"]) == {"on", "bcast", "noloop"}
    with server.client() as other:
        other.set("a:1", "x")
    kind, value = client.resp._value(0)
    assert (kind, value) == (">", ["invalidate", ["a:1"]])


def test_tracking_that_is_redirected(program: Make, server: RedisServer) -> None:
    target, client = program(stale_cache=True), program(stale_cache=True)
    number = target("HELLO", 3)["id"]
    assert client("CLIENT", "TRACKING", "ON", "REDIRECT", number) == "OK"
    for each in (target, client):
        with pytest.raises(CannotRebuild, match="redirected"):
            each.inspect()


# -- who may not look
# -------------------------------------------------------------------------------------------------


def test_a_user_who_may_not_look(
    server: RedisServer, program: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CLIENT LIST another user may look, or the user vouches that a question on the
    connection itself does no harm.
    """
    monkeypatch.setenv("REDIS_SECRET", "pw")
    monkeypatch.setenv("REDIS_ADMIN", "adminpw")
    with server.client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "small", "on", ">pw", "~*", "+@all", "-@admin", "-@dangerous"
        )
        admin.execute_command(
            "ACL", "SETUSER", "watchman", "on", ">adminpw", "+client|list", "+client|id"
        )
    secret = {"env": "REDIS_SECRET"}
    client = program(secret=secret, user="small")
    assert client("AUTH", "small", "pw") == "OK"
    client("SELECT", 2)
    with pytest.raises(CannotRebuild, match="refuses CLIENT LIST") as refused:
        client.inspect()
    assert "ask_user" in refused.value.hint
    watched = Settings(
        secret, {"user": "small", "ask_user": "watchman", "ask_secret": {"env": "REDIS_ADMIN"}}
    )
    session = client.inspect(watched)
    assert (session["user"], session["db"]) == ("small", 2)
    own = Settings(secret, {"user": "small", "ask": "own", "watch": "never"})
    assert client.inspect(own)["db"] == 2
    client.settings = own
    client.move()
    assert (client("ACL", "WHOAMI"), " db=2 " in client("CLIENT", "INFO")) == ("small", True)


def test_asked_on_its_own_connection_in_a_transaction(program: Make) -> None:
    """The user vouched and was wrong: said, and not called rebuilt."""
    client = program(ask="own", watch="never")
    client("MULTI")
    with pytest.raises(CannotRebuild, match="transaction"):
        client.inspect()


def test_asked_on_its_own_connection_while_it_blocks(program: Make, server: RedisServer) -> None:
    """A late answer must never be taken for another: if there is no answer in time, the connection
    is closed.
    """
    client = program(ask="own", watch="never")
    client("PING")
    client.resp.wire.send(_command("BLPOP", "list", "0"))
    with pytest.raises(CannotRebuild, match=r"not been answered|was closed"):
        client.inspect(seconds=1)


def test_options_that_make_no_sense(program: Make) -> None:
    client = program()
    for options in (
        {"ask": "loudly"},
        {"frobnicate": 1},
        {"stale_cache": "yes"},
        {"ask_secret": "geheim"},
    ):
        with pytest.raises(CannotRebuild, match=next(iter(options))) as refused:
            client.inspect(Settings({}, options))
        assert "geheim" not in refused.value.message + refused.value.hint


# -- servers that are away, or are none
# -------------------------------------------------------------------------------


@contextmanager
def fake(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that does `talk` on each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection:
            try:
                talk(connection)
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
            threads[-1].start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join(5)


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Answers the first question with `data`, and then says nothing."""

    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(data)
        while connection.recv(4096):
            pass

    return talk


LIES = {
    "garbage": b"\x00\x01\x02\r\n\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "tls": b"\x15\x03\x03\x00\x02\x02\x46",
    "silence": b"",
    "half": b"$100\r\nabc",
    "huge": b"$99999999999\r\n",
    "many": b"*1000000000\r\n",
    "deep": b"*1\r\n" * 100,
    "negative": b"$-5\r\n",
    "no number": b":abc\r\n",
    "endless line": b"+" + b"a" * 100_000,
    "wrong length": b"$3\r\nabcdef\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "full": b"-ERR max number of clients reached\r\n",
}


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_server_that_lies(lie: str) -> None:
    """Always an answer in time, always one of the two errors, and nothing but PeerAway asks for
    another try.
    """
    # who is waited for in vain
    seconds = 0.5 if lie in ("silence", "half", "loading", "full", "endless line") else 30.0
    with fake(says(LIES[lie])) as address:
        began = time.monotonic()
        with socket.create_connection(address) as connection:
            record = ConnectionRecord(
                os.getpid(), connection.fileno(), type="stream", session={"db": 1, "resp": 3}
            )
            with pytest.raises(
                PeerAway
                if lie in ("silence", "half", "loading", "full", "endless line")
                else CannotRebuild
            ):
                PROTOCOL.reconnect(connection, record, Settings(), time.monotonic() + seconds)
        with (
            socket.create_connection(address) as connection,
            pytest.raises(CannotRebuild) as raised,
        ):
            PROTOCOL.inspect(connection, record, Settings(), time.monotonic() + seconds)
        assert time.monotonic() - began < 20
        if lie == "tls":
            assert "TLS" in raised.value.message


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "id=1 addr=10.0.0.1:5 fd=8 flags=N db=0\n",
        "id=1 addr={0} db=0\nid=2 addr={0} db=0\n",
        "id=1 addr={0} db=x flags=N\n",
    ],
    ids=["nobody", "somebody else", "twice", "no number"],
)
def test_a_server_that_does_not_list_us(listing: str) -> None:
    def talk(connection: socket.socket) -> None:
        while question := connection.recv(4096):
            text = listing.format(client[0])
            hello = b"*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n8.0.0\r\n"
            connection.sendall(
                hello if b"HELLO" in question else b"$%d\r\n%s\r\n" % (len(text), text.encode())
            )

    client = [""]
    with fake(talk) as address, socket.create_connection(address) as connection:
        client[0] = "{}:{}".format(*connection.getsockname())
        record = ConnectionRecord(os.getpid(), connection.fileno(), type="stream")
        with pytest.raises(CannotRebuild):
            PROTOCOL.inspect(connection, record, Settings(), time.monotonic() + 5)


@pytest.mark.parametrize(
    "session",
    [
        {"db": "0"},
        {"db": -1},
        {"resp": 4},
        {"user": 5},
        {"db": 99999},
        {"tracking": "yes"},
        {"name": ["x"]},
    ],
    ids=str,
)
def test_a_hostile_record(session: dict[str, Any], program: Make) -> None:
    client = program(stale_cache=True)
    with pytest.raises(CannotRebuild):
        client.reconnect(session)


def test_a_name_cannot_smuggle_a_command(program: Make, server: RedisServer) -> None:
    client = program()
    facts = client.reconnect({"name": "x\r\nFLUSHALL\r\n", "lib_name": "a b"})
    assert "CLIENT SETNAME" in facts["left_out"][0]
    assert client("PING") == "PONG"


def _command(*words: str) -> bytes:
    from criuctl.connections.protocols.redis_wire import command

    return command(*words)


def _until(ready: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
