"""The relay that speaks TLS for a program: who may reach it, whom it believes, and what it passes
on. Real databases are in tests/integration/test_tls_relay.py.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from pathlib import Path

import pytest
from servers.certificates import Authority
from support.tls_relaying import said, serving, tls_server

from criuctl.cli.main import main
from criuctl.errors import Conflict, CriuctlError, UntrustedPath, UsageError
from criuctl.ops.relaying import postgresql_login, tls
from criuctl.ops.relaying.listeners import Place, listening
from criuctl.ops.relaying.tls import Server, Trust

SASL = b"R" + struct.pack("!I", 10)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def echo(connection: ssl.SSLSocket) -> None:
    """One line, backwards."""
    connection.sendall(connection.recv(100)[::-1])


def test_it_passes_on_and_ends_with_the_server(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with tls_server(authority, echo) as port:
        server = Server("127.0.0.1", port, "redis")
        with serving(server, Trust(str(authority.ca)), Place(str(path))) as told:
            assert path.stat().st_mode & 0o777 == 0o600
            assert said(path, b"abc") == b"cba"
            assert said(path, b"abd") == b"dba"
    assert told == []
    assert not path.exists()


def test_large_answers_arrive_whole(authority: Authority, tmp_path: Path) -> None:
    large = os.urandom(3 << 20)

    def answer(connection: ssl.SSLSocket) -> None:
        connection.recv(1)
        connection.sendall(large)

    path = tmp_path / "redis.sock"
    with tls_server(authority, answer) as port:
        server = Server("localhost", port, "redis")
        with serving(server, Trust(str(authority.ca)), Place(str(path))):
            assert said(path, b"?") == large


@pytest.mark.parametrize("verify", [True, False])
def test_a_certificate_of_another_authority(
    verify: bool, authority: Authority, tmp_path: Path
) -> None:
    """By default it gets nothing; only who asks for it believes anybody."""
    (tmp_path / "other").mkdir()
    trust = Trust(str(Authority(tmp_path / "other", "other").ca), verify=verify)
    path = tmp_path / "redis.sock"
    with (
        tls_server(authority, echo) as port,
        serving(Server("127.0.0.1", port, "redis"), trust, Place(str(path))) as told,
    ):
        assert said(path, b"abc") == (b"" if verify else b"cba")
    assert [("is not trusted" in text) for text in told] == ([True] if verify else [])


def startup(code: int = 196608, body: bytes = b"user\0app\0\0") -> bytes:
    return struct.pack("!II", 8 + len(body), code) + body


def test_the_login_of_postgresql(authority: Authority, tmp_path: Path) -> None:
    """Encryption is declined, the start-up message passed on, channel binding not offered."""
    mechanisms = SASL + b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"
    got: list[bytes] = []

    def server(connection: ssl.SSLSocket) -> None:
        got.append(connection.recv(1000))
        message = mechanisms[:1] + struct.pack("!I", len(mechanisms) + 3) + mechanisms[1:]
        connection.sendall(message + b"R-PLUS\0")  # what follows is passed on as it is

    path = tmp_path / ".s.PGSQL.5432"
    with tls_server(authority, server, before=b"S") as port:
        to = Server("127.0.0.1", port, "postgresql")
        with serving(to, Trust(str(authority.ca)), Place(str(path))):
            requests = postgresql_login.SSL_REQUEST + postgresql_login.GSSENC_REQUEST
            answer = said(path, requests + startup())
    assert got == [startup()]
    wanted = SASL + b"SCRAM-SHA-256\0\0"
    assert answer == b"NN" + b"R" + struct.pack("!I", len(wanted) + 3) + wanted[1:] + b"R-PLUS\0"


@pytest.mark.parametrize(
    ("before", "first", "reason"),
    [
        (b"N", startup(), "has no TLS"),
        (b"E", startup(), "does not answer as PostgreSQL does"),
        # what somebody adds in plain text is taken for the handshake, not for the server's answer
        (b"S" + b"R\0\0\0\x08\0\0\0\0", startup(), "no TLS"),
        (b"S", b"\x16\x03\x01" + bytes(20), "does not speak PostgreSQL"),
        (b"S", startup(body=bytes(20_000)), "does not speak PostgreSQL"),
    ],
)
def test_a_client_of_postgresql_reads_what_is_wrong(
    before: bytes, first: bytes, reason: str, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / ".s.PGSQL.5432"
    with tls_server(authority, echo, before=before) as port:
        to = Server("127.0.0.1", port, "postgresql")
        with serving(to, Trust(str(authority.ca)), Place(str(path))) as told:
            answer = said(path, first)
    assert answer[:1] == b"E" and b"C08006\0" in answer and reason.encode() in answer
    assert int.from_bytes(answer[1:5]) == len(answer) - 1
    assert len(told) == 1 and reason in told[0]


def test_a_look_whether_it_listens_reaches_no_server(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / ".s.PGSQL.5432"
    to = Server("127.0.0.1", 1, "postgresql")
    with serving(to, Trust(str(authority.ca)), Place(str(path))) as told:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(postgresql_login.SSL_REQUEST)
            assert client.recv(10) == b"N"
        assert b"cannot be reached" in said(path, startup())
    assert len(told) == 1


def test_more_connections_than_allowed(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / ".s.PGSQL.5432"
    to = Server("127.0.0.1", 1, "postgresql")
    with serving(to, Trust(str(authority.ca)), Place(str(path))) as told:
        held = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for one in held:
            one.connect(str(path))
            one.sendall(postgresql_login.SSL_REQUEST)
            assert one.recv(1) == b"N"
        assert b"too many connections" in said(path, b"")
        for one in held:
            one.close()
    assert len(told) == 1


# -- where it listens


def test_places() -> None:
    assert str(Place.parse("/run/tls/../tls/x")) == "/run/tls/x"
    assert (str(Place.parse("localhost:1")), str(Place.parse("[::1]:2"))) == (
        "127.0.0.1:1",
        "[::1]:2",
    )
    for wrong in ("relative/path", "0.0.0.0:5432", "[::]:1", "db.example.org:5432", "127.0.0.1"):
        with pytest.raises(UsageError):
            Place.parse(wrong)


def test_the_socket_of_a_relay_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "made" / "redis.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with listening(Place(str(path))):
        with pytest.raises(Conflict, match="another program listens"), listening(Place(str(path))):
            pass
        assert path.exists()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(Conflict, match="no socket"), listening(Place(str(path))):
        pass
    assert path.read_text() == "mine"


def test_the_owner_of_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "made" / "redis.sock"
    with listening(Place(str(path)), "nobody"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (65534, 0o600)
    os.chown(path.parent, 65534, -1)
    with pytest.raises(UntrustedPath), listening(Place(str(path)), "nobody"):
        pass
    with pytest.raises(UsageError, match="no user"), listening(Place(str(path)), "no such"):
        pass


def test_a_private_key_that_others_can_read_is_refused(authority: Authority) -> None:
    certificate, key = authority.issue("client")
    Trust(str(authority.ca), str(certificate), str(key)).context()
    key.chmod(0o644)
    with pytest.raises(UntrustedPath, match="other users"):
        Trust(str(authority.ca), str(certificate), str(key)).context()
    with pytest.raises(UsageError, match="cannot be used"):
        Trust(str(key)).context()


def test_protocols_by_port() -> None:
    assert [tls.protocol_of(port) for port in (5432, 6379, 6380)] == [
        "postgresql",
        "redis",
        "redis",
    ]
    with pytest.raises(CriuctlError, match="not known"):
        tls.protocol_of(3306)


@pytest.mark.parametrize(
    "options",
    [
        ("--listen", "127.0.0.1:0", "--to", "localhost:6380", "--cert", __file__),
        ("--listen", "/proc/nonexistent/x", "--to", "localhost:6380", "--key", __file__),
        ("--listen", "127.0.0.1:0", "--to", "localhost:6380", "--owner", "root"),
        ("--listen", "127.0.0.1:0", "--to", "localhost"),
        ("--listen", "127.0.0.1:0", "--to", "localhost:1234"),
    ],
)
def test_what_is_refused_at_once(options: tuple[str, ...]) -> None:
    assert main(["--json", "tls-relay", *options]) == 2
