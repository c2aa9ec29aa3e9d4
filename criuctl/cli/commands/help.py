"""``criuctl help``: the same pages as ``--help``, under the name that people try first."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ..app import App, pass_app
from ..pages import LazyGroup, PageContext, page


def _complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    root = ctx.find_root().command
    entries = root.entries if isinstance(root, LazyGroup) else {}
    return [CompletionItem(name, help=e.summary) for name, e in entries.items() if name.startswith(incomplete)]


@page(examples=[("How to make a store:", "criuctl help store init")])
@click.argument("command", nargs=-1, shell_complete=_complete, help="The command's words, for example: store init.")
@click.pass_context
@pass_app
def help_(app: App, ctx: click.Context, command: tuple[str, ...]) -> int:
    """Shows the manual page of COMMAND, or the list of all commands. The same as criuctl COMMAND --help."""
    shown = ctx.find_root()
    for word in command:
        found = shown.command.get_command(shown, word) if isinstance(shown.command, LazyGroup) else None
        if found is None:
            raise click.UsageError(f"there is no command {' '.join(command)!r}", ctx=ctx)
        shown = PageContext(found, info_name=word, parent=shown)
    text = shown.get_help()
    app.emit({"command": " ".join(command), "text": text}, lambda: text)
    return 0
