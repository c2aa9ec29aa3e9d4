"""``criuctl connections``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from ...checkpoint.connection_record import UNCONNECTED
from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..tables import Column
from ..text import printable
from .dump import POLICIES

COLUMNS = (
    Column("pid", right=True),
    Column("fd", right=True),
    Column("protocol", rank=4),
    Column("state", rank=3),
    Column("direction", rank=6),
    Column("local", rank=2),
    Column("peer", prose=True),
    Column("policy", rank=1),
    Column("why", rank=5, prose=True),
)


def rows(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return records of connections as rows of `COLUMNS`."""
    found = []
    for c in records:
        behind = f"  {c['peer_process']}" if c.get("peer_process") else ""
        policy = c["policy"]
        if policy == "reconnect" and c.get("application"):
            policy += f" ({c['application']})"
        elif not c["external"]:
            policy = "" if c["state"] in ("listen", "bound", UNCONNECTED) else "inside the tree"
        others = len(c.get("holders", ())) - 1
        protocol = c["protocol"] or f"{c['family']} {c['type']}"
        fd = f"{c['fd']}" + (f" +{others}" if others > 0 else "")
        cells = (
            str(c["pid"]),
            fd,
            protocol,
            c["state"],
            c["direction"],
            c["local"],
            f"{c['peer']}{behind}",
            policy,
        )
        found.append(tuple(printable(cell) for cell in (*cells, c.get("reason", ""))))
    return found


@page(
    examples=[
        ("Which connections has process 4711 with its descendants?", "criuctl connections 4711"),
        ("Could they all be connected again?", "criuctl connections 4711 --connections reconnect"),
        (
            "The peers outside, for a script:",
            "criuctl connections web --json | jq -r '.[] | select(.external) | .peer'",
        ),
    ],
    exits=[3, 13],
    see_also=["check", "dump", "show"],
)
@click.argument(
    "target",
    shell_complete=complete.target,
    help="A PID, a session's name, unit:NAME or cgroup:PATH.",
)
@click.option(
    "--connections",
    "requested",
    type=POLICIES,
    help=(
        "Show the effect of this policy for all connections, without the rules.  [default: by "
        "the rules]"
    ),
)
@pass_app
def connections(app: App, target: str, requested: str | None) -> int:
    """List the sockets of the process tree under TARGET that have, or wait for, another end: TCP
    and UDP, and unix sockets whose other end is outside the tree; with the policy that a dump would
    apply now, by the rules of the configuration (connection_rules, connections). `criuctl help
    connection-policies` explains the rules.

    \b
    keep       comes back established, if its address is there
    reconnect  is connected again, its session set up by (the protocol)
    hangup     the program sees the end of the connection
    refuse     there is no dump as long as it is open

    A number after the descriptor is the number of other descriptors that share the socket. The tree
    is not stopped, and nothing is sent on its connections. Where a reconnect is requested and the
    port or program does not show the peer's protocol, the peer is asked over a new connection.
    """
    from ...dump.connection_report import connections as look
    from ...host.registry import Registry
    from ...host.target import resolve_target

    registry = Registry(app.config)
    resolved = resolve_target(target, registry.lookup, registry.session_of)
    with app.reporting() as reporter:
        found = [
            record.to_dict()
            for record in look(app.config, resolved, reporter=reporter, requested=requested)
        ]
    app.emit_table(found, COLUMNS, rows(found), empty="no connections", brief=lambda: "")
    return 0
