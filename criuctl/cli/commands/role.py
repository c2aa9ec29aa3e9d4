"""``criuctl role``."""

from __future__ import annotations

import click

from ...session.protocol import ROLES
from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import plural, printable


@page(
    examples=[
        ("Let an agent look, and type no more:", "criuctl role work builder observe"),
        ("Give it the keyboard back:", "criuctl role work builder write"),
        ("All agents:", "criuctl role work 'agent:*' observe"),
    ],
    exits=[3, 9, 10],
    see_also=["lease", "halt", "resume", "status"],
)
@name_argument
@click.argument(
    "operator",
    help="[KIND:]NAME, or its id in criuctl status; KIND is human, agent or service, * any name.",
)
@click.argument("role", type=click.Choice(ROLES), help="What it may do at most.")
@pass_app
def role(app: App, name: str, operator: str, role: str) -> int:
    """Set the role that an operator has at most in a session, at once and for its later
    connections: observe reads; write types, pauses, and makes snapshots and copies as well; admin
    may do everything, such as dump, migrate, kill and rm. That holds for the command line, the
    Python API, MCP, ACP, the page and shares alike, also while the session is checkpointed. A NAME
    without a kind means the agent and the service of that name, not the human. What is set for one
    name goes before what is set for *; setting * replaces what was set for single names of that
    kind. criuctl's own services, which dump, restore and supervise, are limited only by name.

    Roles travel with checkpoints; criuctl status --json lists them as roles. They keep cooperating
    operators apart, and protect from no process of the session's user.
    """
    from ...ops.authority import set_role

    body = set_role(app.config, name, operator, role)
    words = ", ".join(f"{one['kind']} {printable(one['name'])}" for one in body["operators"])
    connected = plural(len(body["connected"]), "connected operator")
    app.emit(
        body,
        lambda: f"{printable(name)}: {words}: {role} at most ({connected})",
        brief=lambda: "",
    )
    return 0
