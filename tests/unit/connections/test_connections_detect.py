"""Which protocol a peer speaks: by what it looks like, and by asking it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.detect import by_appearance, probe
from criuctl.errors import NoSuchProcess


@pytest.mark.parametrize(
    ("peer", "family", "process", "application"),
    [
        ("10.0.0.1:5432", "inet", "", "postgresql"),
        ("[fd00::1]:6379", "inet6", "", "redis"),
        ("10.0.0.1:15432", "inet", "", ""),
        ("127.0.0.1:7", "inet", "12 (postgres)", "postgresql"),
        ("127.0.0.1:7", "inet", "12 (redis-server)", "redis"),
        ("127.0.0.1:5432", "inet", "12 (redis-server)", "redis"),
        ("127.0.0.1:7", "inet", "12 (my postgres)", ""),
        ("/var/run/postgresql/.s.PGSQL.5433", "unix", "", "postgresql"),
        ("/run/redis/redis-server.sock", "unix", "", "redis"),
        ("/run/redis/other.sock", "unix", "", ""),
        ("/run/systemd/journal/stdout", "unix", "", "journal"),
        ("/run/systemd/journal.web/stdout", "unix", "", "journal"),
        ("/run/systemd/journal/socket", "unix", "", ""),
        ("", "unix", "", ""),
    ],
)
def test_by_appearance(peer: str, family: str, process: str, application: str) -> None:
    record = ConnectionRecord(1, 3, family=family, type="stream", peer=peer, peer_process=process)
    assert by_appearance(record) == application


def _postgresql(client: socket.socket, data: bytes) -> None:
    if data == b"\0\0\0\x08\x04\xd2\x16\x2f":
        client.sendall(b"S")


def _redis(client: socket.socket, data: bytes) -> None:
    if data.startswith(b"*1\r\n"):
        client.sendall(b"-NOAUTH Authentication required.\r\n")


def _http(client: socket.socket, data: bytes) -> None:
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    client.close()


def _silent(client: socket.socket, data: bytes) -> None:
    pass


def _hangs_up(client: socket.socket, data: bytes) -> None:
    client.close()


@contextmanager
def _server(answer: Callable[[socket.socket, bytes], None]) -> Iterator[socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[socket.socket] = []

    def talk(client: socket.socket) -> None:
        try:
            while data := client.recv(64):
                answer(client, data)
        except OSError:
            pass

    def serve() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            clients.append(client)
            threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("answer", "application"),
    [(_postgresql, "postgresql"), (_redis, "redis"), (_http, ""), (_silent, ""), (_hangs_up, "")],
    ids=["postgresql", "redis", "http", "silent", "hangs-up"],
)
def test_a_peer_is_asked(answer: Callable[[socket.socket, bytes], None], application: str) -> None:
    with _server(answer) as listener:
        dial = (socket.socket, listener.getsockname())
        # Patience costs nothing where an answer comes; Redis is asked after a third of it.
        asked = probe({"it": dial, "same": dial}, seconds=0.5 if answer is _silent else 4.0)
        assert asked == {"it": application, "same": application}


def test_no_server_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    assert probe({"it": (socket.socket, address)}) == {"it": ""}
    assert probe({}) == {}


def test_who_held_the_connection_has_ended() -> None:
    """The tree runs on while its peers are asked, from where its processes are."""

    def gone() -> socket.socket:
        raise NoSuchProcess("there is no process with PID 4711")

    assert probe({"it": (gone, ("127.0.0.1", 1))}) == {"it": ""}


def test_a_hundred_silent_peers_do_not_take_a_hundred_seconds() -> None:
    with _server(_silent) as listener:
        began = time.monotonic()
        asked = probe(
            {str(n): (socket.socket, listener.getsockname()) for n in range(32)}, seconds=0.3
        )
        assert set(asked.values()) == {""}
        assert time.monotonic() - began < 32 * 0.3
