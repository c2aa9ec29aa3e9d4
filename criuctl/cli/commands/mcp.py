"""``criuctl mcp``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..extras import need
from ..pages import page
from ..streams import tell, write_result

if TYPE_CHECKING:
    from ...report import Reporter

TOKEN = "CRIUCTL_MCP_TOKEN"
_SHORTEST = 20  # characters of a chosen token


@page(
    examples=[
        ("For one client, which starts it (see `criuctl help agents`):", "criuctl mcp"),
        (
            "For several, which may only look:",
            "criuctl mcp --http 127.0.0.1:8766 --role observe",
        ),
    ],
    exits=[9],
    see_also=["acp", "exec", "ui"],
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="Listen here, on loopback only, for clients that bring the token; port 0 is any that is "
    "free.  [default: one client, on standard input and output]",
)
@click.option(
    "--role",
    type=click.Choice(["observe", "write", "admin"]),
    default="write",
    show_default=True,
    help="The most that clients may do. observe: look. write: run and end commands, type, take and "
    "restore snapshots. admin: also end sessions, and take the write lease from others.",
)
@pass_app
def mcp(app: App, http: str | None, role: str) -> int:
    """Serve the sessions of this host to agents, by the Model Context Protocol: tools to run, list
    and look at sessions, to type, run commands and wait, to take snapshots, restore, fork and
    compare them; screens, logs and process trees as resources; and a prompt for taking up work
    after an interruption.

    Each client is an operator of the kind agent under its own name, in the audit log and for the
    write lease. No call waits longer than 40 seconds, and none ends what it waits for. Ending a
    session and taking the lease from another operator ask for confirmation.

    With --http, the address and the token are printed; clients send the token as a bearer token. It
    is new each time, unless CRIUCTL_MCP_TOKEN in the environment is one, of 20 characters at least.
    There is no TLS. ^C ends the server; sessions run on.

    Needs the package mcp: scripts/setup installs it; so does pip install
    '.[mcp]' in a clone of criuctl.
    """
    need("mcp", "mcp")
    import anyio

    if app.json and http is None:
        raise UsageError("--json needs --http: standard output is the protocol's")
    with app.reporting(bars=False) as reporter:
        if http is None:
            return int(anyio.run(_stdio, app, role, reporter))
        anyio.run(_http, app, role, http, reporter)
    return 0


async def _stdio(app: App, role: str, reporter: Reporter) -> int:
    from ...mcp.server import build, log_to
    from ...mcp.service import Service
    from ...mcp.stdio import serve_stdio
    from ...ops.own_commands import OwnCommands

    service = Service(app.config, role, OwnCommands(app.own_program(), reporter))
    server = build(service)
    log_to(reporter)
    return await serve_stdio(server, service)


async def _http(app: App, role: str, where: str, reporter: Reporter) -> None:
    from ...mcp.http import PATH, serve_http
    from ...mcp.server import build, log_to
    from ...mcp.service import Service
    from ...ops.own_commands import OwnCommands
    from ...web.rules import Address, Rules

    address = Address.parse(where)
    if not address.loopback:
        raise UsageError(
            f"{address.host} is reached from other machines, and there is no TLS",
            hint=f"From another machine: ssh -L {address.port}:127.0.0.1:{address.port}, or a "
            "proxy with TLS on this one.",
        )
    chosen = os.environ.get(TOKEN, "")
    if chosen and len(chosen) < _SHORTEST:
        raise UsageError(f"{TOKEN} has less than {_SHORTEST} characters")
    rules = Rules([address.host], chosen)
    service = Service(app.config, role, OwnCommands(app.own_program(), reporter))
    server = build(service)
    log_to(reporter)

    def opened(bound: Address) -> None:
        url = bound.url().rstrip("/") + PATH
        body = {"url": url, "address": bound.host, "port": bound.port, "role": role}
        if app.json:
            app.emit(body | {"token": rules.token}, lambda: "")
            return
        write_result(url)
        if chosen:
            tell(f"the token is that of {TOKEN}; ^C ends it")
        else:
            write_result(f"Authorization: Bearer {rules.token}")
            tell("^C ends it")

    await serve_http(server, service, address, rules, opened)
