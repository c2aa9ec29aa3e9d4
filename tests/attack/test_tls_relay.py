"""The relay that speaks TLS for programs: servers that are not the right one, and other users of
this host.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from servers.certificates import Authority
from support.tls_relaying import said, serving, tls_server

from criuctl.cli.main import main
from criuctl.errors import UntrustedPath
from criuctl.ops.relaying.listeners import Place, listening
from criuctl.ops.relaying.tls import Server, Trust

STRANGER = 65534
PASSWORD = b"*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n"
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("wrong", ["authority", "name"])
def test_an_impostor_gets_nothing(wrong: str, authority: Authority, tmp_path: Path) -> None:
    """Neither a server with another authority's certificate, nor one with another's name."""
    got: list[bytes] = []

    def impostor(connection: ssl.SSLSocket) -> None:
        got.append(connection.recv(1000))

    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    trust = Trust(str((other if wrong == "authority" else authority).ca))
    path = tmp_path / "redis.sock"
    with tls_server(authority, impostor) as port:
        name = "cache.example.org" if wrong == "name" else "localhost"
        server = Server("127.0.0.1", port, "redis", name)
        with serving(server, trust, Place(str(path))) as told:
            assert said(path, PASSWORD) == b""
    assert got in ([], [b""]), "the handshake did not come to an end"
    assert len(told) == 1 and "is not trusted" in told[0]


def test_an_answer_that_was_added_in_plain_text(authority: Authority, tmp_path: Path) -> None:
    """An attacker on the way adds "you are logged in" to the server's consent to TLS."""
    injected = b"S" + b"R\0\0\0\x08\0\0\0\0"
    path = tmp_path / ".s.PGSQL.5432"
    got: list[bytes] = []
    with tls_server(authority, lambda c: got.append(c.recv(9)), before=injected) as port:
        server = Server("localhost", port, "postgresql")
        with serving(server, Trust(str(authority.ca)), Place(str(path))):
            start = b"\0\0\0\x13\0\3\0\0user\0app\0\0\0"
            answer = said(path, start)
    assert answer[:1] == b"E" and b"R\0\0\0\x08" not in answer
    assert got == []


def test_another_user_does_not_reach_it(tmp_path: Path) -> None:
    """The socket is its owner's alone, wherever it is."""
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    path = tmp_path / "relay" / "redis.sock"
    with listening(Place(str(path))):
        done = subprocess.run(
            ["setpriv", f"--reuid={STRANGER}", "--clear-groups", sys.executable, "-c", CONNECT,
             str(path)], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "Permission denied" in done.stderr, done.stderr


def test_a_folder_that_another_user_can_change(tmp_path: Path) -> None:
    """Else the owner would be set of a file that was put in the socket's place."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, STRANGER, -1)
    with pytest.raises(UntrustedPath), listening(Place(str(folder / "x")), "nobody"):
        pass
    assert [*folder.iterdir()] == []


def test_a_client_certificate_is_not_lent_to_every_user(authority: Authority) -> None:
    certificate, key = authority.issue("app")
    words = ["--listen", "127.0.0.1:0", "--to", "localhost:6380", "--cert", str(certificate)]
    assert main(["--json", "tls-relay", *words, "--key", str(key)]) == 2
