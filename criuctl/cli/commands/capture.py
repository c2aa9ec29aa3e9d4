"""``criuctl capture``."""

from __future__ import annotations

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import page
from ..sessions import name_argument
from ..streams import write_bytes


@page(
    examples=[
        ("The screen as a person would see it:", "criuctl capture work"),
        (
            "Everything it printed that is still kept:",
            "criuctl capture build --scrollback > build.log",
        ),
        (
            "What it said to what was sent:",
            "criuctl send work --text date --enter\ncriuctl capture work --since 4711",
        ),
        ("As it comes, with colours:", "criuctl capture build --since 0 --follow --ansi"),
        ("Lines, cursor, size, for a program:", "criuctl capture work --json"),
    ],
    exits=[3, 9, 10],
    see_also=["send", "wait", "attach", "log"],
)
@name_argument
@click.option(
    "--screen",
    is_flag=True,
    help="What its terminal shows now.  [default without --since and --scrollback]",
)
@click.option(
    "--scrollback",
    is_flag=True,
    help="Lines that have scrolled by, as far as kept, and the screen; with --since from there on.",
)
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help="What it printed from this offset on.  [default: --screen]",
)
@click.option("--follow", is_flag=True, help="Go on printing what comes, until the session ends.")
@click.option(
    "--ansi",
    is_flag=True,
    help="With colours and attributes; with --follow, the very bytes.  [default: plain text]",
)
@pass_app
def capture(
    app: App, name: str, screen: bool, scrollback: bool, since: int | None, follow: bool, ansi: bool
) -> int:
    """Prints what a session shows, or what it has printed, as text. Needs no authority and disturbs
    nobody.

    The output of a session is a log of bytes with absolute offsets, and only the newest part is
    kept (scrollback_mib in the configuration): what is asked for and no longer there is left out.
    --json gives lines, cursor, size, and the offset at which the next capture goes on.

    --follow shows output in the order in which it came: what a program overwrites or erases stays
    to be seen.
    """
    from ...ops.output import capture as look

    if screen and (scrollback or since is not None):
        hint = (
            "--scrollback prints what was printed before, too, --since only what came behind an "
            "offset."
        )
        raise UsageError(
            "--screen is what is shown now, so it contradicts --scrollback and --since", hint=hint
        )
    if follow:
        if app.json:
            raise UsageError(
                "--follow has no JSON",
                hint="Ask again and again with --since OFFSET, each time with the offset before.",
            )
        return _follow(
            app, name, since if since is not None else "start" if scrollback else "now", ansi
        )
    body = look(app.config, name, scrollback=scrollback and since is None, since=since, ansi=ansi)
    app.emit(body, lambda: "\n".join(body["lines"]), raw=True)
    return 0


def _follow(app: App, name: str, since: int | str, ansi: bool) -> int:
    from ...ops.output import follow

    follow(app.config, name, write_bytes, since=since, ansi=ansi)
    return 0
