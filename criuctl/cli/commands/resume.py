"""``criuctl resume``."""

from __future__ import annotations

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..text import printable


@page(
    examples=[
        ("Go on:", "criuctl resume build"),
        (
            "Go on after a halt, but without the agents; then let one write again:",
            "criuctl resume work --agent-stays-out\ncriuctl role work builder write",
        ),
    ],
    exits=[3, 9, 10],
    see_also=["pause", "halt", "role"],
)
@name_argument
@click.option(
    "--agent-stays-out",
    is_flag=True,
    help="Agents and services only observe from now on.  [default: they write as before]",
)
@pass_app
def resume(app: App, name: str, agent_stays_out: bool) -> int:
    """Let a session that was paused or halted continue. Processes that were stopped before that
    stay stopped. An agent cannot resume a session that was halted.

    With --agent-stays-out, no agent and no script types, signals, pauses or kills until criuctl
    role gives it the role write, or admin, again; '*' means all of them. This lasts over a dump and
    restore. criuctl's own dumps, restores and supervision go on.
    """
    from ...ops.pause import resume as go_on

    app.emit(
        go_on(app.config, name, agents_stay_out=agent_stays_out).to_dict(),
        lambda: f"{printable(name)}: goes on{', without agents' if agent_stays_out else ''}",
        brief=lambda: "",
    )
    return 0
