"""Requests to `criuctl ui` that make no sense: they are refused, and print no traceback."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from support.browsing import serving
from support.command import Home
from support.keeper import Keeper
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


def _requests(head: bytes) -> Iterator[bytes]:
    yield from (os.urandom(300), b"\x16\x03\x01\x02\x00" + os.urandom(50))
    yield from (b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"
    for path in (b"/%ff%fe", b"//[::1", b"/api/sessions/%00/steps", b"/api/live?x=\xff"):
        yield b"GET " + path + b" HTTP/1.1\r\n" + head + b"\r\n"
    post = b"POST /api/actions HTTP/1.1\r\n" + head
    yield from (post + b"Content-Length: -5\r\n\r\n", post + b"Content-Length: 100\r\n\r\nab")
    yield post + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"
    yield post + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"
    for body in (
        b'{"action":"run","command":"\\ud800"}',
        b'{"action":"run","command":"a\\u0000b"}',
        b'{"action":"pause","session":"\\u0000"}',
        b"\xff\xfe",
        b"1" * 5000,
    ):
        kind = b"Content-Type: application/json; charset=nonsense\r\n" if body[0] > 127 else b""
        yield post + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_nonsense_is_refused_without_a_traceback(operators: Operators) -> None:
    with serving(operators) as served:
        where = urlsplit(served.root)
        head = f"Host: {where.netloc}\r\nAuthorization: Bearer {served.token}\r\n".encode()
        for request in _requests(head):
            address = (where.hostname or "", where.port or 0)
            with socket.create_connection(address, TIMEOUT) as client:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                status = client.recv(64)
            assert not status.startswith(b"HTTP/1.1 2"), request[:80]
            if b"gzip" not in request:  # whose answer is aiohttp's own
                assert b" 500 " not in status, request[:80]
        assert "Traceback" not in served.command.err.read_text()
