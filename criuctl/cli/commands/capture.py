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
            "Its answer to the text that was sent:",
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
    help="Print the current screen.  [default without --since and --scrollback]",
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
    help="Print the output from this offset on.  [default: --screen]",
)
@click.option("--follow", is_flag=True, help="Continue with new output, until the session ends.")
@click.option(
    "--ansi",
    is_flag=True,
    help="With colours and attributes; with --follow, the very bytes.  [default: plain text]",
)
@pass_app
def capture(
    app: App, name: str, screen: bool, scrollback: bool, since: int | None, follow: bool, ansi: bool
) -> int:
    """Print the screen of a session, or its output, as text. Needs no authority and does not
    disturb the session.

    The output of a session is a log of bytes with absolute offsets, and only the newest part is
    kept (scrollback_mib in the configuration): output that is no longer kept is left out. --json
    gives lines, cursor, size, and the offset at which the next capture continues.

    --follow prints output in the order in which it came: text that the program overwrites or erases
    later stays visible.
    """
    from ...ops.output import capture as look

    if screen and (scrollback or since is not None):
        hint = "--scrollback prints earlier output too, --since only output after an offset."
        raise UsageError(
            "--screen prints the current screen, which excludes --scrollback and --since", hint=hint
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
