"""``criuctl output``."""

from __future__ import annotations

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import command_option, name_argument
from .exec import report, write_stream


@page(
    examples=[
        ("What it has printed so far:", "criuctl output work --command c1"),
        ("What came since the last time:", "criuctl output work --command c1 --since 4711 --json"),
    ],
    exits=[3, 9, 10],
    see_also=["exec", "wait", "capture"],
)
@name_argument
@command_option(
    "The command's id, as criuctl exec --detach prints it.  [default: none]", required=True
)
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help="Only its output from this offset on: end of an earlier answer.  [default: all]",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Without control sequences.  [default: the output as the terminal gets it]",
)
@pass_app
def output(app: App, name: str, command_id: str, since: int | None, plain: bool) -> int:
    """Print the output of a command that criuctl exec has started: all of it, or what there is so
    far.

    The records of the newest hundred commands that have ended are kept, and their output as long as
    the session's (scrollback_mib in the configuration): missing in the JSON counts bytes that are
    not kept any more. state is running, done, interrupted or shell-died. Of a command of exec
    --new, the JSON has stdout and stderr, and --since is an offset in stdout.
    """
    from ...ops import commands

    show = None if app.json else write_stream
    body = commands.output(app.config, name, command_id, show, since=since, plain=plain)
    report(app, body)
    return 0
