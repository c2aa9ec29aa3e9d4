"""``criuctl exec``."""

from __future__ import annotations

import click

from ..app import App, pass_app
from ..pages import page
from ..sessions import command_argument, name_argument, take_option, timeout_option
from ..streams import write_bytes


@page(
    examples=[
        ("In the folder and environment in which the shell is:", "criuctl exec work -- git status"),
        ("A line of shell, which changes it:", "criuctl exec work -- 'cd src && source env.sh'"),
        ("Output and exit code for a program:", "criuctl exec work --json -- make test"),
    ],
    exits=[3, 9, 10, 12],
    see_also=["send", "wait", "run"],
)
@name_argument
@click.option(
    "--force",
    is_flag=True,
    help="Type it even if no shell is seen at its prompt: a shell behind ssh, say.",
)
@take_option
@timeout_option(
    (
        "Seconds until the command has to be done; ends with 12, and the command runs on.  "
        "[default: none]"
    ),
    None,
)
@command_argument(
    required=True, help="A command and its arguments; a single word is a line of shell."
)
@pass_app
def exec_(
    app: App, name: str, force: bool, take: bool, timeout: float | None, command: tuple[str, ...]
) -> int:
    """Run a command in the live shell of a session (bash, zsh, sh), as if typed at its prompt,
    print its output, and exit with its exit code. The shell itself evaluates it, so cd and
    variables persist. A half-typed line is dropped.

    If no shell is at a prompt, report what is in the foreground, and exit with 9. Output is that of
    the terminal, standard error included.
    """
    from ...ops.typing import run_in_shell

    body = run_in_shell(
        app.config,
        name,
        command,
        None if app.json else write_bytes,
        take=take,
        timeout=timeout,
        force=force,
    )
    if app.json:
        app.emit(body, lambda: "")
    return int(body["exit_code"])
