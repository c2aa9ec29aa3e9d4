"""``criuctl acp``."""

from __future__ import annotations

import asyncio

from ...errors import UsageError
from ..app import App, pass_app
from ..extras import need
from ..pages import page
from ..sessions import command_argument


@page(
    examples=[
        (
            "As the command of an agent in an editor's settings:",
            "criuctl acp -- claude-code-acp",
        ),
        ("After the editor has ended, a terminal of its agent:", "criuctl attach acp-4b1f09c2d3"),
    ],
    exits=[3],
    see_also=["mcp", "attach", "ls"],
)
@command_argument(required=False, help="The agent and its arguments.")
@pass_app
def acp(app: App, command: tuple[str, ...]) -> int:
    """Stand between an editor and its agent, which speak the Agent Client Protocol on standard
    input and output, and keep the agent's terminals as sessions: they outlive the editor, can be
    attached to, dumped and restored.

    All messages pass, except those about terminals. An editor that can show terminals shows them by
    criuctl attach. The sessions are named acp-..., and have the agent's session as their label acp.
    One that the agent releases is ended and forgotten; when the editor, the agent or this command
    ends, they run on.

    Without an agent, this serves terminals alone, to a program that sends only requests about
    them. The exit status is the agent's.

    Needs the package agent-client-protocol: scripts/setup installs it; so does pip
    install '.[acp]' in a clone of criuctl.
    """
    need("acp", "acp")
    from ...acp.serving import serve

    if app.json:
        raise UsageError("--json has no meaning here: standard output is the protocol's")
    attach = [*app.own_program(), "attach", "--read-only"]
    with app.reporting(bars=False) as reporter:
        return asyncio.run(serve(app.config, command, attach, reporter))
