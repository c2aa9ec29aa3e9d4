"""``criuctl exec``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Seconds, page
from ..sessions import (
    command_argument,
    environment_variables,
    name_argument,
    take_option,
    timeout_option,
)
from ..streams import tell, write_bytes

INTERRUPTED = 130  # as a shell reports SIGINT


def exit_status(body: dict[str, Any]) -> int:
    """Return the exit status for a command's result: its own, if it has one."""
    if body["state"] == "done":
        return int(body["exit_code"])
    error = body.get("error")
    return int(error["exit_code"]) if error is not None else INTERRUPTED


@page(
    examples=[
        ("In the folder and environment in which the shell is:", "criuctl exec work -- git status"),
        ("A line of shell, which changes it:", "criuctl exec work -- 'cd src && source env.sh'"),
        ("Output and exit code for a program:", "criuctl exec work --json -- make test"),
        (
            "Start it, and come back for it:",
            "criuctl exec work --detach -- make\ncriuctl wait work --command c1",
        ),
        (
            "While the terminal is busy, with its errors apart:",
            "criuctl exec work --new --cwd /srv --json -- git status",
        ),
        (
            "Not longer than a minute:",
            "criuctl exec work --timeout 60 --on-timeout kill -- make test",
        ),
    ],
    exits=[2, 3, 9, 10, 12],
    see_also=["output", "wait", "kill", "send", "run"],
)
@name_argument
@click.option(
    "--new",
    is_flag=True,
    help=(
        "Run it next to the terminal, as a process of its own in the session.  [default: in the "
        "live shell]"
    ),
)
@click.option(
    "--detach",
    is_flag=True,
    help="Return when it has begun, and print its id.  [default: when it has ended]",
)
@timeout_option("Seconds until the command has to be done; ends with 12.  [default: none]", None)
@click.option(
    "--no-output-timeout",
    "silence",
    type=Seconds(min=0, max=31536000),
    metavar="SECONDS",
    help="Seconds that it may print nothing; ends with 12.  [default: none]",
)
@click.option(
    "--on-timeout",
    type=click.Choice(["leave", "interrupt", "kill"]),
    default="leave",
    show_default=True,
    help="What happens to a command that is late: it runs on, gets an interrupt, or is killed.",
)
@click.option(
    "--cwd",
    metavar="DIR",
    help="With --new: where it runs.  [default: the folder of the program in the foreground]",
)
@click.option(
    "--env",
    "variables",
    metavar="KEY=VALUE",
    multiple=True,
    callback=environment_variables,
    help=(
        "With --new: a variable of its environment; may be given several times.  [default: as the "
        "program in the foreground was started]"
    ),
)
@click.option(
    "--user",
    metavar="USER",
    help="With --new: run it as this user, by name or number.  [default: the session's]",
)
@click.option(
    "--stdin",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="With --new: its standard input; - is this command's.  [default: empty]",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Without control sequences.  [default: the output as the terminal gets it]",
)
@click.option(
    "--force",
    is_flag=True,
    help=(
        "Type it, whatever reads the terminal: to a shell behind ssh, say. Ends with 12 after "
        "--timeout, or a minute."
    ),
)
@take_option
@command_argument(
    required=True, help="A command and its arguments; a single word is a line of shell."
)
@pass_app
def exec_(
    app: App,
    name: str,
    new: bool,
    detach: bool,
    timeout: float | None,
    silence: float | None,
    on_timeout: str,
    cwd: str | None,
    variables: Mapping[str, str],
    user: str | None,
    stdin: str | None,
    plain: bool,
    force: bool,
    take: bool,
    command: tuple[str, ...],
) -> int:
    """Run a command in the live shell of a session (bash, zsh, fish, sh, dash), print its output,
    and exit with its exit code. The shell itself evaluates it, so cd and variables persist. The
    terminal shows it as if it had been typed at the prompt; the shell's history does not change. A
    half-typed line is dropped.

    The shell has to be at its prompt: else this reports what is in the foreground, exits with 9,
    and types nothing. criuctl run gives a shell the hooks by which its prompt is known; a shell in
    another shell, behind ssh or sudo has none, and --force types to it.

    Output is that of the terminal, standard error included. A command that is interrupted, ends the
    shell, or is late ends this too, with the output so far: with 130, 3, and 12. One that is
    incomplete, as with an open quote, is not run: 2. What is killed (--on-timeout kill, criuctl
    kill --command) ends with all that it has started, also in the background; what had become a
    daemon before, with a session of its own and without a parent, stays.

    With --new the command is a process of its own in the session: in its namespaces, with standard
    output and error of its own, dumped and restored with it. It needs no prompt and no terminal,
    and changes nothing of the shell. A single word is a line for /bin/sh. The newest 16 MiB of each
    stream are kept. --cwd, --env, --user and --stdin need --new: in the live shell, cd and export
    do it.

    In the JSON, state is done, interrupted, shell-died or timed-out, exit_code null unless it is
    done, and output text, or base64 if encoding says so. missing counts bytes of output that were
    not kept long enough to be read. With --new, stdout and stderr are apart, output is stdout, and
    offset and end are offsets in it.
    """
    from ...ops import commands
    from ...session.client.commands import New

    if not new and (cwd or variables or user or stdin):
        raise UsageError(
            "--cwd, --env, --user and --stdin need --new: the live shell has its own",
            hint="In the live shell: `criuctl exec NAME -- 'cd DIR && KEY=VALUE CMD < FILE'`.",
        )
    if new and (force or take):
        raise UsageError("--new types nothing: it goes without --force and --take")
    if force and (detach or silence is not None or on_timeout != "leave"):
        hint = "--detach, --no-output-timeout and --on-timeout need a shell with hooks."
        raise UsageError("--force only types the command", hint=hint)
    show = None if app.json else write_stream
    limits = commands.Limits(timeout, silence, on_timeout)
    if new:
        new_process = New(cwd, variables, user, None if stdin is None else _read(stdin))
        body = commands.run_new(
            app.config, name, command, show, new_process, limits, detach=detach, plain=plain
        )
    elif force:
        body = commands.run_typed(
            app.config, name, command, show, timeout=timeout, take=take, plain=plain
        )
    else:
        body = commands.run_in_shell(
            app.config, name, command, show, limits, detach=detach, take=take, plain=plain
        )
    if detach:
        app.emit(body, lambda: str(body["command_id"]))
        return 0
    report(app, body)
    return exit_status(body)


def write_stream(stream: str, data: bytes) -> None:
    """Write output of a command: a new one's standard error to standard error."""
    if stream == "stderr":
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
    else:
        write_bytes(data)


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def report(app: App, body: dict[str, Any]) -> None:
    """Print a command's result as JSON, or what there is to say besides its output."""
    if app.json:
        app.emit(body, lambda: "")
        return
    if body["missing"]:
        tell(f"criuctl: warning: {body['missing']} bytes of its output were not kept")
    if error := body.get("error"):
        tell(f"criuctl: {error['message']}")
        if error["hint"]:
            tell(f"  {error['hint']}")
