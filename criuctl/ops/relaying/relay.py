"""A relay between programs that speak plain text and a server that speaks TLS.

The program's side of a TLS connection cannot be handed back after a restore: its keys are in the
program's memory, and no server accepts them on another connection. Behind the relay the program
speaks plain text over a unix socket, or loopback, and TLS ends outside of the dumped tree. Such a
connection is hung up, or set up again, as any other of its protocol (`criuctl.connections`).

    program --plain--> relay --TLS--> server

One connection here is one there, opened when the program sends its first bytes: a probe that sends
none reaches no server. When one side ends, the other is closed after what had arrived is written:
TLS has no end of one direction that servers agree upon. Nothing is buffered beyond one piece in
each direction, so a slow side slows the other. PostgreSQL's login needs the relay's part
(`postgresql_login`).

A program sees why its server cannot be reached: a PostgreSQL client as an error of class 08, which
criuctl's own hand-back takes for "try again"; others see the end of the connection. Every failure
is also reported to the operator.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from . import postgresql_login
from .tls import Server, Trust, connected, message_of

Tell = Callable[[str], None]

CONNECTIONS = 200  # at the same time, by default
_FIRST_SECONDS = 60.0  # for the first message, as a PostgreSQL server allows
_CONNECT_SECONDS = 15.0  # for the connection to the server and its handshake
_PIECE = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Relay:
    """One relay; `run` serves until a signal comes."""

    def __init__(
        self, server: Server, trust: Trust, tell: Tell, *, connections: int = CONNECTIONS
    ) -> None:
        self._server, self._trust, self._tell = server, trust, tell
        self._most = connections
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket, opened: Callable[[], None]) -> None:
        """Serve on this listening socket until SIGINT, SIGTERM or SIGHUP; `opened` is called when
        programs can connect.
        """
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, over.set)
        sock.setblocking(False)
        make = asyncio.start_unix_server if sock.family == socket.AF_UNIX else asyncio.start_server
        serving = await make(self._accepted, sock=sock)
        opened()
        try:
            await over.wait()
        finally:
            serving.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._most:
            self._tell(f"more than {self._most} connections: one is refused")
            self._explain(writer, "the relay has too many connections")
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                first = await asyncio.wait_for(self._first(reader, writer), _FIRST_SECONDS)
                if not first:
                    return
                there = await asyncio.wait_for(
                    connected(self._server, self._trust), _CONNECT_SECONDS
                )
            except Exception as error:  # one connection's failure ends no other
                reason = message_of(error)
                self._tell(f"a connection is refused: {reason}")
                self._explain(writer, reason)
                return
            await self._join(reader, writer, *there, first)
        finally:
            await _closed(writer)

    async def _first(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Return the first bytes for the server; none if the program has hung up."""
        if self._server.protocol == "postgresql":
            return await postgresql_login.start_up(reader, writer)
        with suppress(ConnectionError):
            return await reader.read(_PIECE)
        return b""

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        their_reader: asyncio.StreamReader,
        their_writer: asyncio.StreamWriter,
        first: bytes,
    ) -> None:
        their_writer.write(first)
        ways = [
            asyncio.create_task(self._copy(reader, their_writer)),
            asyncio.create_task(self._answers(their_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await _closed(their_writer)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server.protocol == "postgresql":
            with suppress(OSError, asyncio.IncompleteReadError):
                async for message in postgresql_login.first_answers(reader):
                    writer.write(message)
        await self._copy(reader, writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_PIECE):
                writer.write(data)
                await writer.drain()
        except ssl.SSLError as error:
            self._tell(f"a connection to {self._server} broke: {message_of(error)}")
        except OSError:
            pass  # one side has hung up: so does the relay

    def _explain(self, writer: asyncio.StreamWriter, reason: str) -> None:
        if self._server.protocol == "postgresql":
            writer.write(postgresql_login.error_response(f"criuctl tls-relay: {reason}"))


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


def serve(relay: Coroutine[Any, Any, None]) -> None:
    """Run a relay to its end."""
    asyncio.run(relay)
