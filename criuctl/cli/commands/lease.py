"""``criuctl lease request|take|yield``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ...report import utc_text
from ..app import App, pass_app
from ..pages import Entry, LazyGroup, page
from ..sessions import name_argument
from ..text import printable

_SELF = "criuctl.cli.commands.lease"
F = TypeVar("F", bound=Callable[..., Any])

lease = LazyGroup(
    "lease",
    entries={
        "request": Entry(f"{_SELF}:request", "Get the write lease if it is free."),
        "take": Entry(f"{_SELF}:take", "Take the write lease from its holder."),
        "yield": Entry(f"{_SELF}:yield_", "Give the write lease up."),
    },
    summary="Who writes into a session: get, take or give up its write lease.",
    help="""\
    One operator at a time writes into a session: it holds the write lease. Typing takes a free
    lease for the moment. These commands take it for a time, in which all commands of the same
    user, kind and name type into the session, and no other operator does. A person's terminal is
    a human; a script is a service; CRIUCTL_KIND and CRIUCTL_OPERATOR say otherwise (`criuctl help
    sessions`). `criuctl status` shows who has the lease.""",
    examples=[
        (
            "Keep the agent from typing for ten minutes:",
            "criuctl lease take work --hold 10m\ncriuctl attach work\ncriuctl lease yield work",
        ),
    ],
    exits=[3, 9, 10],
    see_also=["role", "halt", "send", "attach"],
)


def _hold(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    from ...host.retention import seconds

    return seconds(value)


def _hold_option(function: F) -> F:
    return click.option(
        "--hold",
        metavar="TIME",
        default="10m",
        show_default=True,
        callback=_hold,
        help="Keep it for so long, although this command ends: 30s, 10m, 2h; a day at most.",
    )(function)


def _got(body: dict[str, Any]) -> str:
    lease = body["lease"]
    text = f"{printable(body['session'])}: {printable(lease['name'])} ({lease['kind']}) writes"
    text += f" until {utc_text(lease['expires'])}"
    if (former := body["from"]) is not None:
        text += f"; taken from {printable(former['name'])} ({former['kind']})"
    return text


@page(
    examples=[("Type several times, without another in between:", "criuctl lease request work")],
    exits=[3, 9, 10],
    see_also=["lease take", "lease yield", "send"],
)
@name_argument
@_hold_option
@pass_app
def request(app: App, name: str, hold: float) -> int:
    """Get the write lease of a session and keep it after this command, for commands of the same
    user, kind and name. While another operator keeps it, this exits with 9. A later request sets
    the time again.
    """
    from ...ops.authority import request as ask

    body = ask(app.config, name, hold)
    app.emit(body, lambda: _got(body), brief=lambda: "")
    return 0


@page(
    examples=[("From an agent, for ten minutes:", "criuctl lease take work")],
    exits=[3, 9, 10],
    see_also=["lease request", "lease yield", "halt", "role"],
)
@name_argument
@_hold_option
@pass_app
def take(app: App, name: str, hold: float) -> int:
    """Take the write lease of a session from its holder, and keep it after this command, for
    commands of the same user, kind and name. A human takes it from any operator; an agent or a
    script takes it from none (10). A lease that is held for longer already is not shortened.
    """
    from ...ops.authority import take as take_it

    body = take_it(app.config, name, hold)
    app.emit(body, lambda: _got(body), brief=lambda: "")
    return 0


@page(
    examples=[("Let others type again:", "criuctl lease yield work")],
    exits=[3, 9, 10],
    see_also=["lease request", "lease take"],
)
@name_argument
@pass_app
def yield_(app: App, name: str) -> int:
    """Give up the write lease that a command of the same user, kind and name has got. If it is
    free already, nothing changes; if it is another operator's, this exits with 9.
    """
    from ...ops.authority import give_up

    body = give_up(app.config, name)
    app.emit(body, lambda: f"{printable(name)}: the lease is free", brief=lambda: "")
    return 0
