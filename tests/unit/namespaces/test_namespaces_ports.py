"""A port is free again for the tree's listener: of what the tree has left there, and of nothing of
anybody else's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.keeper import wait_until

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.criu.images import ImageSet
from criuctl.namespaces.ports import free_ports
from criuctl.proc.sockdiag import end_waits

_FIN_WAIT1, _FIN_WAIT2 = "04", "05"


def _states(port: int) -> list[str]:
    """The states of the connections, over IPv4 and then IPv6, whose end with this port no process
    has open.
    """
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    words = [line.split() for table in tables for line in table]
    return [w[3] for w in words if w[1].endswith(f":{port:04X}") and w[9] == "0"]


@contextmanager
def _closed_first(
    host: str, *, words: bytes = b"", state: str = _FIN_WAIT2, shared: bool = False
) -> Iterator[tuple[int, socket.socket]]:
    """The port of a server that has sent these words and closed, the connection and then itself,
    and its client.
    """
    with (
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server,
        socket.socket(server.family) as client,
    ):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect((host, port))
        with server.accept()[0] as accepted:
            accepted.setblocking(False)
            while words:
                try:
                    accepted.send(words)
                except BlockingIOError:
                    break
        server.close()
        wait_until(lambda: _states(port) == [state], 60, "its end is known")
        yield port, client


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _free(local: str) -> None:
    record = ConnectionRecord(
        pid=1, fd=3, family="inet", type="stream", protocol="tcp", state="listen", local=local
    )
    free_ports([record], ImageSet(-1), None)


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_the_port_of_a_server_that_closed_first(bound: str) -> None:
    with _closed_first("127.0.0.1") as (port, _client):
        assert not _can_bind(bound, port)
        _free(f"{bound}:{port}")
        assert _can_bind(bound, port)


def test_what_its_peer_has_not_read_is_waited_for() -> None:
    """A client that is slow, but not too slow, gets all of it; its server's port is free then."""
    with _closed_first("127.0.0.1", words=b"x" * 65536, state=_FIN_WAIT1) as (port, client):
        late = threading.Timer(0.3, lambda: [None for _ in iter(lambda: client.recv(1 << 20), b"")])
        late.start()
        _free(f"127.0.0.1:{port}")
        late.join()
        assert _can_bind("127.0.0.1", port)


def test_what_its_peer_does_not_read_is_not_taken_from_him() -> None:
    with _closed_first("127.0.0.1", words=b"x" * 65536, state=_FIN_WAIT1) as (port, client):
        began = time.monotonic()
        _free(f"127.0.0.1:{port}")
        assert time.monotonic() - began < 30
        assert _states(port) == [_FIN_WAIT1]
        assert client.recv(1) == b"x"


@pytest.mark.parametrize(
    ("host", "bound", "v6only", "ended"),
    [
        ("127.0.0.1", "127.0.0.1", False, True),
        ("127.0.0.1", "127.0.0.2", False, False),
        ("127.0.0.1", "0.0.0.0", False, True),
        ("::1", "0.0.0.0", False, False),
        ("127.0.0.1", "::", False, True),
        ("127.0.0.1", "::", True, False),
        ("::1", "::", True, True),
    ],
)
def test_what_ends_is_of_the_address_that_is_wanted(
    host: str, bound: str, v6only: bool, ended: bool
) -> None:
    with _closed_first(host) as (port, _client):
        assert end_waits(bound, port, v6only=v6only) is False
        assert _states(port) == ([] if ended else [_FIN_WAIT2])


@pytest.mark.parametrize(
    ("host", "listens", "v6only", "his"),
    [
        ("127.0.0.1", "0.0.0.0", False, True),
        ("127.0.0.1", "127.0.0.1", False, True),
        ("127.0.0.1", "127.0.0.2", False, False),
        ("::1", "127.0.0.1", False, False),
        ("127.0.0.1", "::", False, True),
        ("127.0.0.1", "::", True, False),
        ("::1", "::", True, True),
    ],
)
def test_connections_of_a_listening_server_stay(
    host: str, listens: str, v6only: bool, his: bool
) -> None:
    with (
        _closed_first(host, shared=True) as (port, _client),
        socket.socket(socket.AF_INET6 if ":" in listens else socket.AF_INET) as stranger,
    ):
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if stranger.family == socket.AF_INET6:
            stranger.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only))
        stranger.bind((listens, port))
        stranger.listen()
        assert end_waits("::", port) is False
        assert _states(port) == ([_FIN_WAIT2] if his else [])
