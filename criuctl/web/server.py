"""The server: binds, prints nothing itself, serves until a signal comes, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from aiohttp import ClientPayloadError, WSCloseCode, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from ..config import Config
from ..ops import host_checks, sessions
from ..report import Reporter
from ..session.client import caller
from ..share.invitation import Invitation
from ..transport import ssh
from .access import Access, harden
from .actions import Actions
from .bridge import SOCKETS, terminal
from .connection_limits import Gate
from .hosts import HOSTS, Hosts, OtherHost
from .hosts import hosts as other_hosts
from .live import Live
from .overview import COUNT, StoreCount
from .overview import ROUTES as OVERVIEW
from .remote_terminal import remote_terminal
from .rules import Address, listen
from .sharing import LINKS, limited
from .sharing import ROUTES as SHARING
from .steps import steps
from .views import DESK, ROUTES, Desk, errors

STATIC = Path(__file__).parent / "static"
_PATIENCE = 3.0  # seconds that answers under way have at the end


class Opened(Struct, frozen=True):
    """A server that listens; `url` holds the token, after a ``#``."""

    address: Address
    url: str
    read_only: bool
    limits: tuple[str, ...] = ()  # sentences: what this server lacks, and what will fail therefore


def serve(
    config: Config,
    address: Address,
    *,
    program: Sequence[str],
    reporter: Reporter,
    read_only: bool = False,
    names: Sequence[str] = (),
    hosts: Sequence[ssh.Host] = (),
    shares: Sequence[Invitation] = (),
    opened: Callable[[Opened], None],
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; `opened` is called when the page can be opened.

    `program` is the criuctl, with its global options, that runs the page's actions; `hosts` are
    those whose sessions are shown as well, and `shares` are those of others. Raise `Conflict` when
    the address is taken, `PlatformError` when this user may not see the sessions.
    """
    sessions.sessions(config)  # where this fails, the page would show nothing else
    asyncio.run(_serve(config, address, program, reporter, read_only, names, hosts, shares, opened))


async def _serve(
    config: Config,
    address: Address,
    program: Sequence[str],
    reporter: Reporter,
    read_only: bool,
    names: Sequence[str],
    hosts: Sequence[ssh.Host],
    shares: Sequence[Invitation],
    opened: Callable[[Opened], None],
) -> None:
    # What the page does, here and by commands, a person does; a unit that serves it is none.
    os.environ.setdefault(caller.KIND, "human")
    desk = Desk(
        config,
        read_only,
        reporter,
        limits=tuple(_limits(config)),
        hosts=(*(share.name for share in shares), *(host.name for host in hosts)),
    )
    access = Access([address.host, *names])
    live, actions = Live(desk), Actions(desk, program)
    gate, others = Gate(), Hosts(hosts, desk, _shared(shares, desk))
    runner = web.AppRunner(
        application(desk, access, live, actions, gate, others),
        access_log=None,
        logger=_logger(reporter),
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
        sock = listen(address)
        for number in signals:
            loop.add_signal_handler(number, ended.set)
        assert runner.server is not None
        async with gate.opened(runner.server, sock=sock):
            bound = Address(address.host, sock.getsockname()[1])
            opened(Opened(bound, f"{bound.url()}#token={access.token}", read_only, desk.limits))
            await ended.wait()
            await actions.close()
    finally:
        await runner.cleanup()
        others.close()
        desk.close()
        for number in signals:
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def _logger(reporter: Reporter) -> logging.Logger:
    """Return a logger for aiohttp: its bugs are warnings; a client's nonsense is not reported."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if not isinstance(error, HttpProcessingError | ClientPayloadError | ConnectionError):
                reporter.warning(f"{record.getMessage()}: {error!r}")

    logger = logging.getLogger("criuctl.web")
    logger.handlers, logger.propagate = [Handler(logging.ERROR)], False
    return logger


def _shared(shares: Sequence[Invitation], desk: Desk) -> list[OtherHost]:
    if not shares:
        return []
    from .shared_host import SharedHost  # needs the package of the extra `share`

    return [SharedHost(share, desk) for share in shares]


def _limits(config: Config) -> Iterator[str]:
    for finding in host_checks.rights(config):
        if finding.level == "error":
            yield f"{finding.text}: snapshot, dump and restore will fail."


def application(
    desk: Desk,
    access: Access,
    live: Live,
    actions: Actions,
    gate: Gate,
    others: Hosts | None = None,
) -> web.Application:
    """Return the application with all its routes."""
    app = web.Application(
        middlewares=[gate.middleware, access.middleware, errors, limited],
        client_max_size=64 << 10,
    )
    app[DESK] = desk
    app[SOCKETS] = set()
    app.on_response_prepare.append(harden)
    app[COUNT] = StoreCount()
    app[LINKS] = access.links
    app[HOSTS] = others or Hosts()
    app.cleanup_ctx.append(access.links.watch)
    app.add_routes([*ROUTES, *OVERVIEW, *SHARING])
    app.router.add_get("/api/live", live.listen)
    app.router.add_get("/api/sessions/{name}/steps", steps)
    app.router.add_get("/api/sessions/{name}/terminal", terminal)
    app.router.add_get("/api/hosts", other_hosts)
    app.router.add_get("/api/hosts/{host}/sessions/{name}/terminal", remote_terminal)
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
