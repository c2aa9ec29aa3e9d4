"""How a failure is printed, and its exit code.

Each function takes an exception, prints it, and returns the exit code. Under --json the failure is
the one JSON value on standard output, unless the answer was printed already; else it is a message
with a hint on standard error, or a line for each obstacle of a refused operation. -v adds the
causes, -vv the traceback. `main` decides which function an exception goes to.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from ..errors import CriuctlError, UsageError
from ..quoting import quoted
from ..redact import redacted
from .app import PROGRAM, App, takes_colours
from .streams import ResultLost, discard, jsonable, tell, write_result
from .text import printable


class Signalled(KeyboardInterrupt):
    """A signal asked criuctl to stop; raised once, in the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def as_usage_error(error: click.UsageError) -> UsageError:
    """Return click's error as criuctl's, with a hint."""
    path = error.ctx.command_path if error.ctx is not None else PROGRAM
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return UsageError("no command given", hint=f"`{path} --help` lists them.")
    hint = f"`{path} --help` explains the usage."
    if isinstance(error, click.NoSuchOption) and _takes_command(error.ctx):
        hint = (
            f"Options of the command itself come after --: `{path} ... -- COMMAND "
            f"{quoted(error.option_name)} ...`. {hint}"
        )
    return UsageError(error.format_message(), hint=hint)


def _takes_command(ctx: click.Context | None) -> bool:
    return ctx is not None and any(param.name == "command" for param in ctx.command.params)


def _say(text: str, hint: str = "") -> None:
    red, off = ("\x1b[31m", "\x1b[0m") if _coloured() else ("", "")
    first, *more = text.splitlines() or [""]
    tell(f"{red}{PROGRAM}:{off} {printable(first)}")
    for line in more:
        tell(f"  {printable(line)}")
    for i, line in enumerate(hint.splitlines()):
        tell(f"  {'hint: ' if i == 0 else '      '}{printable(line)}")


def _coloured() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and takes_colours()


def _in_json(app: App) -> bool:
    """Return whether an error is to be printed as the one JSON value."""
    return app.json and not app.answered


def _print_error(body: dict[str, Any]) -> None:
    import json

    try:
        write_result(json.dumps({"error": body}, default=jsonable))
    except BrokenPipeError:
        discard(1)
    except CriuctlError as error:
        _say(error.message)


def fail(error: CriuctlError, app: App) -> int:
    """Print an error of criuctl."""
    # `ResultLost` says that standard output takes no data
    if _in_json(app) and not isinstance(error, ResultLost):
        _print_error(error.to_dict())
    elif obstacles := [f for f in error.details.get("findings", ()) if f["level"] == "error"]:
        from .commands.check import findings_lines

        # Each obstacle on its own line, with its remedy; the message has them all in one sentence.
        _say("refused before anything was touched:")
        for line in findings_lines(obstacles):
            tell(f"  {line}")
    else:
        _say(error.message, error.hint)
    if app.verbose:
        _print_causes(error)
    if app.verbose > 1:
        _print_traceback(error)
    return error.exit_code


def _print_causes(error: BaseException) -> None:
    cause = error.__cause__
    while cause is not None:
        tell(f"  caused by: {type(cause).__name__}: {printable(cause)}")
        cause = cause.__cause__


def _print_traceback(error: BaseException) -> None:
    import traceback

    tell("".join(traceback.format_exception(error)).rstrip())


def bug(error: BaseException, app: App) -> int:
    """Print an exception that is a bug."""
    message = redacted(f"this is a bug in criuctl, sorry: {type(error).__name__}: {error}")
    hint = (
        "Run it again with -v and report the traceback together with the output of `criuctl "
        "version`."
    )
    if _in_json(app):
        _print_error({"code": "bug", "exit_code": 1, "message": message, "hint": hint})
    else:
        _say(message, hint)
    if app.verbose:
        _print_traceback(error)
    return 1


def interrupted(interrupt: KeyboardInterrupt, app: App) -> int:
    """Print that a signal stopped the command; other than `Signalled`, that is SIGINT."""
    number = interrupt.number if isinstance(interrupt, Signalled) else int(signal.SIGINT)
    notes = getattr(interrupt, "__notes__", ())  # what became of the tree
    text = "; ".join([f"stopped by {signal.Signals(number).name}", *notes])
    if _in_json(app):
        _print_error(
            {
                "code": "interrupted",
                "exit_code": 128 + number,
                "message": text,
                "hint": "",
            }
        )
    else:
        _say(text)
    if app.verbose > 1:
        _print_traceback(interrupt)
    return 128 + number
