"""The server: binds, prints nothing itself, serves until a signal comes, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import WSCloseCode, web
from msgspec import Struct

from ..config import Config
from ..errors import Conflict, UsageError
from ..report import Reporter
from ..session.client import caller
from .access import Access, harden, is_loopback
from .actions import Actions
from .bridge import SOCKETS, terminal
from .connection_limits import Gate
from .live import Live
from .views import DESK, ROUTES, Desk, errors

STATIC = Path(__file__).parent / "static"
_PATIENCE = 3.0  # seconds that answers under way have at the end


class Address(Struct, frozen=True):
    """Where the server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``HOST:PORT``, ``[IPV6]:PORT``, or a port alone; raise `UsageError`."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            raise UsageError(
                f"{text!r} is no address to listen on", hint="Like 127.0.0.1:8765, or [::1]:8765."
            )
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def url(self) -> str:
        """Return the page's address, as a browser on this machine opens it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"


class Opened(Struct, frozen=True):
    """A server that listens; `url` holds the token, after a ``#``."""

    address: Address
    url: str
    read_only: bool


def serve(
    config: Config,
    address: Address,
    *,
    program: Sequence[str],
    reporter: Reporter,
    read_only: bool = False,
    names: Sequence[str] = (),
    opened: Callable[[Opened], None],
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; `opened` is called when the page can be opened.

    `program` is the criuctl, with its global options, that runs the page's actions. Raise
    `Conflict` when the address is taken.
    """
    asyncio.run(_serve(config, address, program, reporter, read_only, names, opened))


async def _serve(
    config: Config,
    address: Address,
    program: Sequence[str],
    reporter: Reporter,
    read_only: bool,
    names: Sequence[str],
    opened: Callable[[Opened], None],
) -> None:
    # What the page does, here and by commands, a person does; a unit that serves it is none.
    os.environ.setdefault(caller.KIND, "human")
    desk = Desk(config, read_only, reporter)
    access = Access([address.host, *names])
    live, actions = Live(desk), Actions(desk, program)
    gate = Gate()
    runner = web.AppRunner(
        application(desk, access, live, actions, gate),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=_PATIENCE,
    )
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) is not signal.SIG_IGN
    ]
    await runner.setup()
    try:
        sock = _listen(address)
        for number in signals:
            loop.add_signal_handler(number, ended.set)
        assert runner.server is not None
        async with gate.opened(runner.server, sock=sock):
            bound = Address(address.host, sock.getsockname()[1])
            opened(Opened(bound, f"{bound.url()}#token={access.token}", read_only))
            await ended.wait()
            await actions.close()
    finally:
        await runner.cleanup()
        desk.close()
        for number in signals:
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def application(
    desk: Desk, access: Access, live: Live, actions: Actions, gate: Gate
) -> web.Application:
    """Return the application with all its routes."""
    app = web.Application(
        middlewares=[gate.middleware, access.middleware, errors], client_max_size=64 << 10
    )
    app[DESK] = desk
    app[SOCKETS] = set()
    app.on_response_prepare.append(harden)
    app.add_routes(ROUTES)
    app.router.add_get("/api/live", live.listen)
    app.router.add_get("/api/sessions/{name}/terminal", terminal)
    app.router.add_post("/api/actions", actions.handle)
    app.router.add_get("/", _page)
    app.router.add_static("/static/", STATIC)

    async def hang_up(app: web.Application) -> None:
        closing = (sock.close(code=WSCloseCode.GOING_AWAY) for sock in app[SOCKETS])
        await asyncio.gather(live.close(), *closing, return_exceptions=True)

    app.on_shutdown.append(hang_up)
    return app


async def _page(_request: web.Request) -> web.FileResponse:
    return web.FileResponse(STATIC / "index.html")


def _listen(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UsageError(f"{address.host}: no such address ({error.strerror or error})") from error
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
    except OSError as error:
        sock.close()
        message = f"{address.host}:{address.port} cannot be listened on ({error.strerror or error})"
        raise Conflict(
            message, hint="Another port: --listen 127.0.0.1:0 takes any that is free."
        ) from error
    return sock
