"""``criuctl kill``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ...errors import UsageError
from ...host.journal.worst_exit_code import worst
from ...session import protocol
from .. import complete
from ..app import App, pass_app
from ..descriptions import print_failure
from ..grouping import group_option, only_with_group
from ..pages import page
from ..sessions import command_option, timeout_option
from ..streams import tell
from ..text import plural, printable


@page(
    examples=[
        ("End a session; its processes may clean up for five seconds:", "criuctl kill build"),
        ("At once:", "criuctl kill build --timeout 0"),
        ("An agent and everything that it works with:", "criuctl kill --group work"),
        ("One command, and not the session:", "criuctl kill work --command c1"),
        ("The copies that fork has made of it:", "criuctl kill --forks-of work"),
    ],
    exits=[3, 9, 10, 12],
    see_also=["signal", "halt", "forget", "ls"],
)
@click.argument("name", required=False, shell_complete=complete.session, help="The session's name.")
@group_option("End every session of this group that runs.  [default: NAME]")
@timeout_option(
    "Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once. An hour at most.",
    5.0,
    protocol.MAX_GRACE,
)
@command_option(
    "End only the command with this id (see criuctl exec): an interrupt, then SIGKILL.  [default: "
    "the session]"
)
@click.option(
    "--forks-of",
    is_flag=True,
    help="End the copies that `criuctl fork` has made of NAME, and not NAME.",
)
@pass_app
def kill(
    app: App,
    name: str | None,
    group: str | None,
    timeout: float,
    command_id: str | None,
    forks_of: bool,
) -> int:
    """End every process of a session, daemons included: SIGTERM, for shells SIGHUP, after the
    time-out SIGKILL, until no process is left. Exit status 0 means that this was verified.

    A paused session is resumed to receive the signal. A checkpointed session is given up: its
    checkpoints stay in the store until `prune` removes them, and any host that shares the store may
    restore them, because the session's lease is given back. A session without a holder, such as a
    dumped PID, is forgotten: its exit code is unknown.
    """
    only_with_group(group, name, "NAME", command=command_id, forks_of=forks_of)
    if group is not None:
        return _kill_group(app, group, timeout)
    assert name is not None
    if forks_of and command_id is not None:
        raise UsageError("--forks-of and --command exclude each other")
    if forks_of:
        return _kill_forks(app, name, timeout)
    if command_id is not None:
        return _kill_command(app, name, command_id, timeout)
    from ...ops.kill import kill as end

    body = end(app.config, name, timeout)
    _tell_leases(body)
    app.emit(body, lambda: _ended(body), brief=lambda: "")
    return 0


def _ended(body: Mapping[str, Any]) -> str:
    count = plural(body["killed"], "process", "processes")
    return f"{printable(body['session'])}: {count} ended, nothing is left"


def _tell_leases(body: Mapping[str, Any]) -> None:
    for url in body["leases_kept"]:
        tell(
            f"criuctl: {printable(body['session'])}: its lease in {printable(url)} could not be "
            "given back; another host restores it with --take-over"
        )


def _kill_group(app: App, group: str, timeout: float) -> int:
    from ...ops.groups import kill_group

    done = kill_group(app.config, group, timeout)
    for one in done:
        if one.body is not None:
            _tell_leases(one.body)
    app.emit(
        [one.to_dict() for one in done],
        lambda: "\n".join(_ended(one.body) for one in done if one.body is not None),
        brief=lambda: "",
    )
    if not app.json:
        for one in done:
            if one.error is not None:
                print_failure(one.session, one.error)
    return worst(one.error.exit_code for one in done if one.error is not None)


def _kill_forks(app: App, name: str, timeout: float) -> int:
    from ...ops.fork import kill_forks

    bodies = kill_forks(app.config, name, timeout)
    for body in bodies:
        _tell_leases(body)
    app.emit(
        {"session": name, "forks": bodies},
        lambda: "\n".join(map(_ended, bodies)),
        brief=lambda: "",
    )
    return 0


def _kill_command(app: App, name: str, command_id: str, timeout: float) -> int:
    from ...ops import commands

    body = commands.kill(app.config, name, command_id, timeout)
    app.emit(body, lambda: f"{printable(name)}: command {command_id} is {body['state']}")
    return 12 if body["state"] == "timed-out" else 0
