"""``criuctl help``: the same pages as ``--help``, under the name that people try first; the
manual's pages and the runbooks; pages for `man`.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ...errors import UsageError
from ..app import App, pass_app
from ..man_formatter import ManFormatter
from ..pages import LazyGroup, PageContext, page


def _complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from .. import topics

    root = ctx.find_root().command
    entries = root.entries if isinstance(root, LazyGroup) else {}
    known = {name: entry.summary for name, entry in entries.items()} | {
        name: topics.title(name) for name in topics.names()
    }
    return [
        CompletionItem(name, help=text)
        for name, text in known.items()
        if name.startswith(incomplete)
    ]


@page(
    examples=[
        ("How to make a store:", "criuctl help store init"),
        ("What cannot be checkpointed:", "criuctl help limits"),
        ("What to do when the key of a store is lost:", "criuctl help key-lost"),
        ("Pages for man:", "criuctl help --man-pages /usr/local/share/man"),
    ]
)
@click.argument(
    "command",
    nargs=-1,
    shell_complete=_complete,
    help="The command's words, for example: store init; or a topic, or a runbook.",
)
@click.option(
    "--man-pages",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help=(
        "Write manual pages of all commands, topics and runbooks to DIR/man1, DIR/man5 and "
        "DIR/man7.  [default: show one page]"
    ),
)
@click.pass_context
@pass_app
def help_(app: App, ctx: click.Context, command: tuple[str, ...], man_pages: Path | None) -> int:
    """Show the manual page of COMMAND, or the list of all commands and topics. The same as criuctl
    COMMAND --help.

    Also show the manual's pages about topics, such as limits or configuration, and runbooks: step
    by step instructions for when something has gone wrong (store-lost, key-lost, fenced-host,
    restore-refused, disk-full).
    """
    shown = ctx.find_root()
    if man_pages is not None:
        return _write(app, shown, man_pages, command)
    for word in command:
        found = (
            shown.command.get_command(shown, word) if isinstance(shown.command, LazyGroup) else None
        )
        if found is None:
            return _topic(app, ctx, " ".join(command))
        shown = PageContext(found, info_name=word, parent=shown)
    text = shown.get_help()
    app.emit({"command": " ".join(command), "text": text}, lambda: text)
    return 0


def _topic(app: App, ctx: click.Context, name: str) -> int:
    from .. import topics

    if name not in topics.names():
        raise click.UsageError(
            f"there is no command {name!r}, nor a topic or a runbook of that name", ctx=ctx
        )
    text = topics.text(name).rstrip("\n")
    kind = "runbook" if name in topics.runbooks() else "topic"
    app.emit({kind: name, "text": text}, lambda: _rendered(ctx, name))
    return 0


def _rendered(ctx: click.Context, name: str) -> str:
    """Return a page as `--help` shows one."""
    from .. import topics

    formatter = ctx.make_formatter()
    if not isinstance(formatter, ManFormatter):
        raise TypeError("a page is written by a ManFormatter")
    with formatter.section("Name"):
        formatter.write_text(f"{name} - {topics.summary(name)}")
        formatter.write_markdown(topics.body(name))
    return formatter.getvalue().rstrip("\n")


def _write(app: App, root: click.Context, folder: Path, command: tuple[str, ...]) -> int:
    from .. import manual

    if command:
        raise click.UsageError("--man-pages writes all pages; it takes no COMMAND")
    try:
        made = [
            str(path)
            for path in manual.write_pages(root.command, root.info_name or "criuctl", folder)
        ]
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder}: {error.strerror}",
            hint="Name a folder that can be written.",
        ) from error
    app.emit({"pages": made}, lambda: f"{len(made)} pages below {folder}", brief=lambda: "")
    return 0
