"""``criuctl ls`` and ``criuctl ps``."""

from __future__ import annotations

from typing import Any

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import command_words, state_words
from ..tables import Column
from ..text import age, labels, printable

_COLUMNS = (
    Column("session"),
    Column("state"),
    Column("pid", right=True, rank=3),
    Column("incarnation", right=True, rank=6),
    Column("since", right=True, rank=4),
    Column("command", rank=2, prose=True),
    Column("labels", rank=5, prose=True),
)


@page(
    examples=[
        ("The sessions that run here:", "criuctl ls"),
        ("The names of running sessions, for a script:", "criuctl ls --state running -q"),
    ],
    see_also=["run", "attach", "status", "forget", "list"],
)
@click.option(
    "--state",
    type=click.Choice(["running", "paused", "checkpointed", "exited", "lost"]),
    multiple=True,
    help="Only sessions in this state (repeatable).  [default: all]",
)
@pass_app
def ls(app: App, state: tuple[str, ...]) -> int:
    """List the sessions of this host: those that criuctl run started, and trees that were dumped or
    restored by name.

    running and paused have processes here. checkpointed: in a store, criuctl restore brings it
    back. exited: ended, with its exit code. lost: the processes or their holder ended unobserved.
    Both are listed until criuctl forget.

    Only local records are read, so this command cannot hang; criuctl status asks the session's
    holder. Checkpoints are listed by criuctl list.
    """
    from ...ops.sessions import sessions

    _print(app, [body for body in sessions(app.config) if not state or body["state"] in state])
    return 0


@page(
    examples=[
        ("The sessions that run here:", "criuctl ps"),
        ("Those with web in their names, ended ones too:", "criuctl ps -a web"),
    ],
    see_also=["ls", "status", "checkpoints"],
)
@click.argument("part", required=False, help="Only sessions with this in their names.")
@click.option(
    "-a", "--all", "all_", is_flag=True, help="Those that do not run, too.  [default: not]"
)
@pass_app
def ps(app: App, part: str | None, all_: bool) -> int:
    """List the sessions that run on this host, paused ones included; with -a all that it knows, as
    criuctl ls does.
    """
    from ...ops.sessions import sessions

    _print(
        app,
        [
            body
            for body in sessions(app.config)
            if (all_ or body["state"] in ("running", "paused")) and (part or "") in body["session"]
        ],
    )
    return 0


def _print(app: App, found: list[dict[str, Any]]) -> None:
    rows = [
        (
            printable(body["session"]),
            state_words(body),
            str(body["pid"] or "-"),
            str(body["incarnation"]),
            age(body["since"]) if body["since"] else "-",
            command_words(body["command"]),
            labels(body["labels"]),
        )
        for body in found
    ]
    app.emit_table(
        found,
        _COLUMNS,
        rows,
        empty="no sessions",
        brief=lambda: "\n".join(body["session"] for body in found),
    )
