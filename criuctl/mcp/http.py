"""The transport for other clients of this host: streamable HTTP, guarded as the page is.

Every request needs the token, a ``Host`` that is this server's, and no foreign ``Origin``
(`criuctl.web.rules`); nothing is answered before that is checked.  Connections that send no request
keep no others out (`criuctl.proc.idle_connections`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..proc.idle_connections import Waiting
from ..web.rules import Address, Rules, listen
from .service import Service

PATH = "/mcp"
_MOST_REQUESTS = 200  # at the same time
_MOST_SESSIONS = 200
_PATIENCE = 3  # seconds that answers under way have at the end
_PERIOD = 1.0  # seconds between two looks for connections whose time is over
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """Refuses requests without access."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        elif scope["type"] != "lifespan":  # a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if not self._rules.knows(headers.get("Host")):
            return _refused(403, "host", "this server is not known under that name")
        if not self._rules.own_origin(headers):
            return _refused(403, "origin", "this request comes from another site's page")
        if not self._rules.bears_token(headers):
            return _refused(401, "token", "the bearer token is missing or wrong")
        return None


def _refused(status: int, code: str, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def guarded(server: MCPServer[Service], rules: Rules) -> ASGIApp:
    """Return the server as an application that the rules protect."""
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        max_sessions=_MOST_SESSIONS,
        # `Guard` checks more strictly: by default the SDK checks nothing without a loopback host.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Guard(app, rules)


class _Server(uvicorn.Server):
    """uvicorn without its handlers of signals, which would end this process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _limiting(waiting: Waiting[asyncio.BaseTransport]) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol of a connection, which notes whether the connection waits."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._begin()

        def connection_lost(self, error: Exception | None) -> None:
            waiting.end(self.transport)
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                waiting.end(self.transport)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._begin()

        def _begin(self) -> None:
            peer = str(self.client[0]) if self.client else ""
            for other in waiting.begin(self.transport, peer):
                _abort(other)

    return Connection


def _abort(transport: asyncio.BaseTransport) -> None:
    if isinstance(transport, asyncio.Transport):
        transport.abort()


async def _watch(waiting: Waiting[asyncio.BaseTransport]) -> None:
    while True:
        await asyncio.sleep(_PERIOD)
        for transport in waiting.overdue():
            _abort(transport)


async def serve_http(
    server: MCPServer[Service],
    service: Service,
    address: Address,
    rules: Rules,
    opened: Callable[[Address], None],
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; `opened` is called when clients can connect.

    `Conflict` when the address is taken.
    """
    sock = listen(address)
    waiting: Waiting[asyncio.BaseTransport] = Waiting()
    config = uvicorn.Config(
        guarded(server, rules),
        http=_limiting(waiting),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=_PATIENCE,
        ws="none",
    )
    serving = _Server(config)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, setattr, serving, "should_exit", True)
    opened(Address(address.host, sock.getsockname()[1]))
    watching = asyncio.create_task(_watch(waiting))
    await serving.serve(sockets=[sock])
    watching.cancel()
    await service.operations.close(interrupt=True)
