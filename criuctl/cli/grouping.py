"""Shared parts of the commands on groups of sessions: the option, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UsageError
from .app import DEGRADED, App
from .descriptions import print_failure
from .streams import unheard
from .text import age, duration, plural, printable

if TYPE_CHECKING:
    from ..ops.group_fork import GroupForkResult

F = TypeVar("F", bound=Callable[..., Any])


def group_option(what: str, metavar: str = "GROUP") -> Callable[[F], F]:
    """Add the option ``--group``."""
    return click.option("--group", metavar=metavar, help=what)


def only_with_group(group: str | None, named: object, word: str, **others: object) -> None:
    """Raise `UsageError` unless there is either a `group` or what `word` names, and with a group
    none of the options in `others`, by their names.
    """
    if group is None and not named:
        raise UsageError(f"Missing argument {word!r}, or --group")
    if group is not None and named:
        raise UsageError(f"give either {word} or --group, not both")
    if group is not None:
        for name, value in others.items():
            if value:
                raise UsageError(f"--{name.replace('_', '-')} does not go with --group")


def print_stored(app: App, result: Any, line: Callable[[Mapping[str, Any]], str]) -> int:
    """Print the result of a dump or a snapshot of a group, `line` for each member; return the exit
    code.
    """
    body = result.to_dict()

    def human() -> str:
        first = (
            f"group {printable(body['group'])}: checkpoint {body['number']} "
            f"({body['checkpoint'][:12]}), {plural(len(body['members']), 'session')}, frozen "
            f"{duration(body['frozen_ms'])}, total {duration(body['total_ms'])}"
        )
        return "\n".join([first, *(f"  {line(member)}" for member in body["members"])])

    lost = unheard(lambda: app.emit(body, human, brief=lambda: str(body["checkpoint"])))
    return DEGRADED if result.degraded or lost else 0


def print_restored(app: App, result: Any, lines: Callable[[Mapping[str, Any]], str]) -> int:
    """Print the result of a restore of a group, `lines` for each member; return the exit code."""
    body = result.to_dict()

    def human() -> str:
        first = (
            f"group {printable(body['group'])}: {plural(len(body['members']), 'session')} of "
            f"checkpoint {body['number']} ({body['checkpoint'][:12]}, {age(body['created'])} old) "
            f"restored in {duration(body['elapsed_ms'])}"
        )
        each = ("\n".join(f"  {line}" for line in lines(m).split("\n")) for m in body["members"])
        return "\n".join([first, *each])

    app.emit(
        body,
        human,
        brief=lambda: "\n".join(str(member["pid"]) for member in body["members"]),
    )
    return DEGRADED if result.degraded else 0


def print_forked(app: App, result: GroupForkResult) -> int:
    """Print the result of a fork of a group; return the exit code."""
    made = [one for one in result.sets if one.error is None]

    def human() -> str:
        still = "" if result.frozen_ms is None else f", frozen {duration(result.frozen_ms)}"
        lines = [
            f"group {printable(result.origin)}: {plural(len(made), 'set')} of copies of checkpoint "
            f"{result.checkpoint.number} ({result.checkpoint.id[:12]}) in "
            f"{duration(result.elapsed_ms)}{still}"
        ]
        for one in made:
            copies = (f"{printable(copy.session)} (PID {copy.pid})" for copy in one.members)
            lines.append(f"  {printable(one.group)}: {', '.join(copies)}")
        return "\n".join(lines)

    app.emit(result.to_dict(), human, brief=lambda: "\n".join(one.group for one in made))
    if not app.json:
        for one in result.sets:
            if one.error is not None:
                print_failure(one.group, one.error)
    return DEGRADED if result.degraded else 0
