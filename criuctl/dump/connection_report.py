"""Report the connections of a live tree and what a dump would do with them, without any change."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord
from ..config import Config
from ..connections.record import Connection
from ..connections.survey import Survey, refuse
from ..errors import Vetoed
from ..host.target import Target
from ..report import Finding, Reporter

_NAMED = 3


def connections(
    config: Config, target: Target, *, reporter: Reporter, requested: str | None = None
) -> list[ConnectionRecord]:
    """Return the records that a dump with this policy would begin with; PIDs are this host's."""
    survey = Survey(config, reporter, requested=requested)
    return [
        replace(c.record, pid=c.held.pid, holders=c.held.holders)
        for c in survey.look(target.root.pid)
    ]


def check_connections(config: Config, target: Target, *, reporter: Reporter) -> list[Finding]:
    """Return the findings of ``criuctl check`` on a tree's connections."""
    survey = Survey(config, reporter)
    records = [
        replace(c.record, pid=c.held.pid, holders=c.held.holders)
        for c in survey.look(target.root.pid)
    ]
    return judge(records, reported=len(survey.unasked)) + hung_up_unasked(survey.unasked)


def hung_up_unasked(made: Sequence[Connection]) -> list[Finding]:
    """Warn of connections to outside that the default hangs up.

    A program that depends on such a connection (``git clone``) ends when it is hung up.
    """
    if not made:
        return []
    some = ", ".join(
        f"{c.record.peer or 'an unnamed peer'} (PID {c.held.pid} fd {c.held.fd})"
        for c in made[:_NAMED]
    )
    more = f" and {len(made) - _NAMED} more" if len(made) > _NAMED else ""
    which = (
        "a connection that the tree has made"
        if len(made) == 1
        else f"{len(made)} connections that the tree has made"
    )
    return [
        Finding(
            "warning",
            "connections-hangup",
            f"{which} will be hung up at the restore, by default: {some}{more}",
            "Dump with `--connections keep` to keep them (at the same address, while the peers "
            "wait), or with `--connections reconnect`; connection_rules say it for each.",
            made[0].held.pid,
            made[0].held.fd,
        )
    ]


def judge(records: Sequence[ConnectionRecord], reported: int = 0) -> list[Finding]:
    """Return findings: connections that forbid a dump, those whose rule cannot be followed, and how
    many will be hung up.

    Those among `reported` already are left out.
    """
    found: list[Finding] = []
    denied: dict[str, list[ConnectionRecord]] = {}
    hung_up = -reported
    for record in records:
        try:
            refuse(record)
        except Vetoed as error:
            found.append(
                Finding(
                    "error",
                    "connection-refuse",
                    _after_pid(error.message),
                    error.hint,
                    record.pid,
                    record.fd,
                )
            )
        if record.external and record.policy == "hangup":
            hung_up += not record.queued
            if record.reason:
                denied.setdefault(record.reason, []).append(record)
    for reason, alike in denied.items():
        first = alike[0]
        which = (
            f"the connection to {first.peer or 'its peer'}"
            if len(alike) == 1
            else f"{len(alike)} connections"
        )
        found.append(
            Finding(
                "warning",
                "connection-hangup",
                f"{which} will be hung up: {reason}",
                "",
                first.pid,
                first.fd,
            )
        )
    if hung_up:
        text = (
            f"{hung_up} connection{'s' if hung_up > 1 else ''} to outside will be hung up at a "
            "restore"
        )
        found.append(
            Finding(
                "info",
                "connections-hangup",
                text,
                "`criuctl connections` shows them; see connection_rules.",
            )
        )
    return found


def _after_pid(message: str) -> str:
    return message.partition(": ")[2]
