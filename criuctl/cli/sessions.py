"""Shared parts of the commands on sessions: their arguments, and the words for a session's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from . import complete
from .pages import Seconds
from .text import printable

F = TypeVar("F", bound=Callable[..., Any])


def name_argument(function: F) -> F:
    """Add the argument NAME: a session of this host."""
    return click.argument("name", shell_complete=complete.session, help="The session's name.")(
        function
    )


def take_option(function: F) -> F:
    """Add the option ``--take``."""
    return click.option(
        "--take",
        is_flag=True,
        help=(
            "Take the write lease from its holder; a person keeps it for 30 seconds.  [default: "
            "end with 9 when another client writes]"
        ),
    )(function)


def timeout_option(what: str, default: float | None, most: float = 31536000) -> Callable[[F], F]:
    """Add the option ``--timeout``, in seconds."""
    return click.option(
        "--timeout",
        type=Seconds(min=0, max=most),
        default=default,
        metavar="SECONDS",
        show_default=default is not None,
        help=what,
    )


def command_argument(*, required: bool, help: str) -> Callable[[F], F]:
    """Add the argument ``-- CMD...``."""
    metavar = "-- CMD..." if required else "[-- CMD...]"
    return click.argument(
        "command", nargs=-1, required=required, type=click.UNPROCESSED, metavar=metavar, help=help
    )


def command_option(what: str, *, required: bool = False) -> Callable[[F], F]:
    """Add the option ``--command``: the id of a command in the session."""
    return click.option("--command", "command_id", metavar="ID", required=required, help=what)


def environment_variables(
    _ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    """Parse the ``KEY=VALUE`` of ``--env``."""
    for one in given:
        if "=" not in one[1:]:
            raise click.BadParameter(f"{one!r} is not KEY=VALUE", param_hint="--env")
    return dict(one.split("=", 1) for one in given)


def state_words(body: Mapping[str, Any]) -> str:
    """Return the state in words, with the exit status of an ended session."""
    state = str(body["state"])
    if state == "exited":
        number = body.get("exit_signal")
        if body["exit_code"] is None:
            return state
        return f"exited ({body['exit_code']}{f', signal {number}' if number else ''})"
    return state


def command_words(command: list[str], limit: int = 60) -> str:
    """Return a command as text for a table."""
    import shlex

    text = printable(shlex.join(command))
    return text if len(text) <= limit else text[: limit - 1] + "…"
