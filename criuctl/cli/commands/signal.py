"""``criuctl signal``."""

from __future__ import annotations

import re

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument, take_option
from ..text import plural, printable


@page(
    examples=[
        ("As ^C would:", "criuctl signal build INT"),
        ("To the session's first process:", "criuctl signal web HUP --to leader"),
    ],
    exits=[3, 9, 10],
    see_also=["kill", "pause", "halt", "send"],
)
@name_argument
@click.argument("signal", help="Its name or number: INT, SIGTERM, 10.")
@click.option(
    "--to",
    type=click.Choice(["foreground", "session", "leader"]),
    default="foreground",
    show_default=True,
    help="The group in the foreground of its terminal, every process, or the first.",
)
@take_option
@pass_app
def signal_(app: App, name: str, signal: str, to: str, take: bool) -> int:
    """Send a signal to processes of a session. Needs the write lease for the moment, as typing
    does.
    """
    from ...ops.typing import writer

    with writer(app.config, name, take=take) as session:
        count = session.signal(int(signal) if re.fullmatch("[0-9]{1,9}", signal) else signal, to)
    body = {"session": name, "signal": signal, "to": to, "signalled": count}
    app.emit(
        body,
        lambda: f"{printable(name)}: {plural(count, 'process', 'processes')} signalled",
        brief=lambda: "",
    )
    return 0
