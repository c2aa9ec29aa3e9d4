"""Limits for the connections of the page's server: idle connections do not keep others out.

aiohttp waits for a request without limit, and for any number of clients. The gate is between the
port and aiohttp: a connection *waits* until aiohttp has the whole head of a request, and again when
that is answered (`criuctl.proc.idle_connections`). A connection with a request, above all a
WebSocket, does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from ..proc.idle_connections import Waiting
from .access import Handler, refusal

BODY = 10.0  # seconds for the body of a request: it has 64 KiB at most
_PERIOD = 1.0  # seconds between two looks for those whose time is over


class Gate:
    """Makes the protocol of each connection, and knows which connections wait."""

    def __init__(self, waiting: Waiting[asyncio.Transport] | None = None) -> None:
        self.waiting = waiting if waiting is not None else Waiting()

    @contextlib.asynccontextmanager
    async def opened(
        self, make: Callable[[], asyncio.BaseProtocol], **where: Any
    ) -> AsyncIterator[asyncio.Server]:
        """Accept connections while the block runs; `make` makes aiohttp's protocol."""
        server = await asyncio.get_running_loop().create_server(
            lambda: _Guarded(self, cast("asyncio.Protocol", make())), **where
        )
        watching = asyncio.create_task(self._watch())
        try:
            yield server
        finally:
            watching.cancel()
            server.close()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note, as the outermost middleware, that the head of a request is complete."""
        transport = request.transport
        if transport is None or not self.waiting.end(transport):
            return await handler(request)  # it was cut off, or has not come through the gate
        try:
            try:
                async with asyncio.timeout(BODY):
                    # the few bytes of it, so that no handler has to wait for them
                    await request.read()
            except TimeoutError:
                return refusal(408, "timeout", "the request did not come to its end")
            except (HttpProcessingError, ClientPayloadError, ConnectionError):
                return refusal(400, "body", "the request's body cannot be read")
            return await handler(request)
        finally:
            if not transport.is_closing():
                self.begin(transport)

    def begin(self, transport: asyncio.Transport) -> None:
        """Note that the connection waits."""
        for other in self.waiting.begin(transport, _peer(transport)):
            other.abort()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            for transport in self.waiting.overdue():
                transport.abort()


class _Guarded(asyncio.Protocol):
    """One connection: everything is passed to aiohttp."""

    def __init__(self, gate: Gate, inner: asyncio.Protocol) -> None:
        self._gate, self._inner = gate, inner
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(transport)
        self._gate.begin(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._gate.waiting.end(self._transport)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _peer(transport: asyncio.Transport) -> str:
    """Return the address of the other end, without its port."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if name else ""
