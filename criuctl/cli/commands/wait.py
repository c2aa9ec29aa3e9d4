"""``criuctl wait``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Seconds, page
from ..sessions import command_option, name_argument, timeout_option
from ..streams import tell
from ..text import printable


def _text(body: dict[str, Any]) -> str:
    if "command_id" in body:
        return str(body["state"] if body["exit_code"] is None else body["exit_code"])
    if "exit_code" in body:
        return str(body["exit_code"]) if body["exit_code"] is not None else "unknown"
    if "match" in body:
        return printable(body["match"])
    if "foreground" in body:
        return printable(shlex.join(body["foreground"]["argv"]))
    return str(body["offset"])


@page(
    examples=[
        ("Until a build is done; prints its exit code:", "criuctl wait build --exit"),
        (
            "Until a server listens:",
            "criuctl wait web --match 'listening on port (\\d+)' --timeout 60",
        ),
        ("Until a command is done; prints its exit code:", "criuctl wait work --command c1"),
        ("Until a shell has done all that was typed:", "criuctl wait work --prompt"),
        ("Until a program asks something; prints which:", "criuctl wait build --reading"),
        ("Until nothing has been printed for two seconds:", "criuctl wait agent --idle 2"),
    ],
    exits=[3, 9, 10, 12],
    see_also=["send", "capture", "exec", "output"],
)
@name_argument
@click.option(
    "--exit", "exit_", is_flag=True, help="Until the session has ended; prints its exit code."
)
@click.option(
    "--idle",
    type=Seconds(min=0, max=86400),
    metavar="SECONDS",
    help="Until nothing was printed for so long.  [default: none]",
)
@click.option(
    "--match",
    metavar="REGEX",
    help=(
        "Until this is in its output, without escape sequences and the echo of what was typed; "
        "prints what matched.  [default: none]"
    ),
)
@click.option(
    "--prompt", is_flag=True, help="Until a shell is in the foreground and at its prompt."
)
@click.option(
    "--reading",
    is_flag=True,
    help="Until a program in the foreground waits for input of the terminal; prints which.",
)
@command_option(
    "Until the command with this id (see criuctl exec --detach) has ended; prints its exit code.  "
    "[default: none]"
)
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help=(
        "With --match: look from this offset on [default: from the last input on]; with --prompt: "
        "only after output behind it."
    ),
)
@timeout_option("Give up after so long, with exit status 12.  [default: never]", None)
@pass_app
def wait(
    app: App,
    name: str,
    exit_: bool,
    idle: float | None,
    match: str | None,
    prompt: bool,
    reading: bool,
    command_id: str | None,
    since: int | None,
    timeout: float | None,
) -> int:
    """Wait until a session has ended, is silent, has printed a text, is at a shell's prompt, waits
    for input, or has done a command.

    --match searches what programs print. The echo of what was typed, which the terminal or a line
    editor prints, is one character U+FFFC there, and a carriage return is a line end; ^ and $ are
    at each line. Of a line that was typed ahead of a line editor that is no shell started by
    criuctl run, only the first copy counts as an echo.

    --prompt is met only by a shell that criuctl run has started (bash, zsh, fish, sh, dash) and
    that waits for a command: not by a program's question, and not by a shell in a shell. --reading
    is met by any program.

    Exit with 0 when the event has come, also for --exit and --command (the code is printed, and in
    the JSON as exit_code; of --command, the JSON is that of criuctl exec); with 12 when the time is
    over; with 3 when the session ended before.
    --exit collects the exit status: afterwards the session's holder is not needed any more and
    ends. A tree that was dumped by its PID has no holder: --exit waits for it, too, but its exit
    code is unknown (null), and the others exit with 9.
    """
    from ...ops import commands, output

    wanted = (exit_, idle is not None, match is not None, prompt, reading, command_id is not None)
    if wanted.count(True) != 1:
        raise UsageError("give one of --exit, --idle, --match, --prompt, --reading and --command")
    if exit_:
        body = output.wait_exit(app.config, name, timeout)
    elif idle is not None:
        body = output.wait_idle(app.config, name, idle, timeout)
    elif match is not None:
        body = output.wait_match(app.config, name, match, since, timeout)
    elif command_id is not None:
        body = commands.wait(app.config, name, command_id, timeout)
        if app.json or "error" not in body or body["state"] != "timed-out":
            app.emit(body, lambda: _text(body))
        else:
            tell(f"criuctl: {body['error']['message']}")
        return 12 if body["state"] == "timed-out" else 0
    elif reading:
        body = output.wait_reading(app.config, name, timeout)
    else:
        body = output.wait_prompt(app.config, name, since, timeout)
    app.emit(body, lambda: _text(body))
    return 0
