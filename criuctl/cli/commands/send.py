"""``criuctl send``."""

from __future__ import annotations

from typing import Any

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Page
from ..sessions import name_argument, take_option, timeout_option

_ORDER = "criuctl.send.order"
_WAYS = ("text", "enter", "keys", "paste")


class InOrder(Page):
    """A command that knows the order of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [param.name for param in order if param.name in _WAYS]
        return super().parse_args(ctx, args)


@click.command(
    cls=InOrder,
    examples=[
        (
            "Run a command line in a shell and print its output:",
            'criuctl send work --text "make test" --enter',
        ),
        ("Interrupt, then the line before once more:", 'criuctl send work --keys "C-c Up Enter"'),
        ("A whole file, as pasted:", "criuctl send work --paste notes.txt"),
        (
            "Wait for the answer to the sent text:",
            "criuctl send work --text ls --enter\ncriuctl wait work --match '[$#] $'",
        ),
    ],
    exits=[3, 9, 10, 12],
    see_also=["capture", "wait", "exec"],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@name_argument
@click.option("--text", metavar="TEXT", multiple=True, help="Type this text as it is.")
@click.option("--enter", count=True, expose_value=False, help="Press Enter.  [default: not]")
@click.option(
    "--keys",
    metavar="KEYS",
    multiple=True,
    help='Press these keys: "C-c Up M-x Escape F5 PageDown", or single characters.',
)
@click.option(
    "--paste",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Paste a file's text, bracketed if the program asked for that; - is standard input.",
)
@take_option
@timeout_option("Seconds until the terminal has to have taken it; ends with 12.", 30.0)
@pass_app
@click.pass_context
def send(
    ctx: click.Context,
    app: App,
    name: str,
    text: tuple[str, ...],
    keys: tuple[str, ...],
    paste: tuple[str, ...],
    take: bool,
    timeout: float,
) -> int:
    """Type into a session: the options' texts and keys in the order in which they are given.
    Return when the session's terminal has taken all of it, and print the offset in the
    output at which the first byte was typed: the program's answer is at or after it (see criuctl
    capture --since and criuctl wait --since). Input that the terminal has not taken after
    --timeout, because the program does not read, is dropped.

    Needs the write lease for the moment: it is taken if it is free. While another client writes,
    for example an attached person, this exits with 9, unless --take takes it away. A person's
    --take keeps the lease for 30 seconds after this command, so that an agent does not take it back
    at once; criuctl lease take --hold keeps it for longer.
    """
    from ...ops.typing import type_into

    values: dict[str, Any] = {"text": iter(text), "keys": iter(keys), "paste": iter(paste)}
    parts = [(way, "" if way == "enter" else next(values[way])) for way in ctx.meta[_ORDER]]
    if not parts:
        raise UsageError("nothing to send", hint="Give --text, --enter, --keys or --paste.")
    body = type_into(app.config, name, parts, take=take, timeout=timeout)
    offset = str(body["offset"])
    app.emit(body, lambda: f"typed; the answer begins at offset {offset}", brief=lambda: offset)
    return 0
