"""A relay of this process, and TLS servers for it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from servers.certificates import Authority

from criuctl.ops.relaying import postgresql_login, relay
from criuctl.ops.relaying.listeners import Place, listening
from criuctl.ops.relaying.relay import Relay
from criuctl.ops.relaying.tls import Server, Trust

SECONDS = 30.0


@contextmanager
def tls_server(
    authority: Authority, talk: Callable[[ssl.SSLSocket], None], *, before: bytes = b""
) -> Iterator[int]:
    """A server whose connections `talk` serves in turn; it answers `before` to eight plain bytes
    first, as PostgreSQL does.
    """
    certificate, key = authority.issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), plain:
                plain.settimeout(SECONDS)
                if before:
                    assert plain.recv(8) == postgresql_login.SSL_REQUEST
                    plain.sendall(before)
                with context.wrap_socket(plain, server_side=True) as wrapped:
                    talk(wrapped)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SECONDS)


@contextmanager
def serving(server: Server, trust: Trust, place: Place) -> Iterator[list[str]]:
    """A relay in a thread; yields what it tells."""
    told: list[str] = []
    with listening(place) as sock:
        ready = threading.Event()
        loop = asyncio.new_event_loop()
        made = Relay(server, trust, told.append, connections=2)

        async def run() -> None:
            task = asyncio.create_task(made.run(sock, ready.set))
            stop.append(task.cancel)
            with suppress(asyncio.CancelledError):
                await task

        stop: list[Callable[[], bool]] = []
        thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relay, "_SIGNALS", ())  # a thread takes none
            thread.start()
            assert ready.wait(SECONDS)
        try:
            yield told
        finally:
            loop.call_soon_threadsafe(stop[0])
            thread.join(SECONDS)
            loop.close()


def said(path: Path, data: bytes) -> bytes:
    """All that comes from a socket after these bytes were sent."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(str(path))
        client.sendall(data)
        found = b""
        with suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                found += piece
        return found
