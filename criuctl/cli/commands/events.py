"""``criuctl events``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from ...errors import PlatformError
from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..streams import reader_gone, write_result
from ..tables import Column
from ..text import duration, printable, size

_COLUMNS = (
    Column("seq", right=True, rank=3),
    Column("time", rank=1),
    Column("operation"),
    Column("session"),
    Column("outcome", prose=True),
    Column("facts", rank=2, prose=True),
)


def _facts(event: Mapping[str, Any]) -> str:
    facts = []
    if event.get("total_ms") or event.get("seconds"):
        facts.append(duration(event.get("total_ms") or event["seconds"] * 1000))
    if event.get("frozen_ms"):
        facts.append(f"frozen {duration(event['frozen_ms'])}")
    if "stored" in event.get("bytes", {}):
        facts.append(f"{size(event['bytes']['stored'])} stored")
    if event.get("freed_bytes"):
        facts.append(f"{size(event['freed_bytes'])} freed")
    facts += [f"{count} {state}" for state, count in event.get("states", {}).items()]
    if "removed" in event:
        facts.append(f"{event['removed']} removed")
    facts += [f"{count} {outcome}" for outcome, count in event.get("connections", {}).items()]
    if event.get("to"):
        facts.append(f"to {event['to']}")
    return printable(", ".join(facts))


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    outcome = str(event.get("outcome", ""))
    if outcome in ("failed", "interrupted"):
        outcome += f" {event.get('exit_code')} ({event.get('error', '')})"
    session = str(event.get("session") or event.get("schedule") or event.get("pid") or "-")
    session += f"@{event['number']}" if event.get("number") else ""
    columns = (
        event["seq"],
        event.get("time", ""),
        event.get("operation", ""),
        session,
        outcome,
        _facts(event),
    )
    return tuple(printable(str(value)) for value in columns)


def line(event: Mapping[str, Any]) -> str:
    """Return an event as one line."""
    return "  ".join(_row(event))


def _of(event: Mapping[str, Any], session: str | None) -> bool:
    return (
        session is None or session == event.get("session") or session in event.get("sessions", ())
    )


@page(
    examples=[
        ("The operations of this host and their outcomes:", "criuctl events"),
        ("What failed:", "criuctl events --json | jq '.[] | select(.outcome == \"failed\")'"),
        ("Each event, as a line of JSON, when it comes:", "criuctl events --follow --json"),
        ("Go on where a script has stopped reading:", "criuctl events --since 4711 --json"),
    ],
    exits=[13],
    see_also=["metrics", "log", "doctor"],
)
@click.option(
    "--since",
    type=click.IntRange(min=0),
    metavar="SEQ",
    help="Only events after this one.  [default: all; with --follow those that come]",
)
@click.option("--follow", is_flag=True, help="Continue with new events.")
@click.option(
    "--session",
    metavar="NAME",
    shell_complete=complete.session,
    help="Only events of this session.  [default: of all]",
)
@pass_app
def events(app: App, since: int | None, follow: bool, session: str | None) -> int:
    """Print the event log of this host. It has an event for each operation that changed something,
    or failed to: run, dump, snapshot, restore, migrate, receive, resolve, pause, halt, resume,
    kill, forget, fence, rm, prune, pin, unpin, gc, import, store-init, key-add and the like,
    whether a person, a schedule or a supervisor started it. A schedule or supervisor adds one more
    event when it ends: schedule-run, maintenance-begin, maintenance-end, recover, supervise (which
    fails with 6 when it gives up); self-fence and self-fence-end are about a supervised session
    that stands still and goes on. Commands that only look have no events, nor have programs in a
    session, their end included.

    Events are numbered without gap, over reboots too, and are in events.jsonl in state_dir, one
    JSON object per line, readable by root alone. Full files have 4 MiB, and the newest eight are
    kept. Events hold names, numbers and codes, and no message, command line, label or secret.
    `events: journald` or `events: syslog` in the configuration sends them there, too.

    An event that cannot be written (disk full) is left out with a warning; the operation continues.
    When a criuctl was killed (kill -9, power cut), the next operation records that: interrupted,
    exit code 137, and when it began.

    --json prints an array, and with --follow one object per line.
    """
    from ...host.journal.event_log import EventLog

    log = EventLog(app.config.state_dir)
    try:
        if follow:
            _follow(app, log.follow(since), session)
        found = [event for event in log.read(since or 0) if _of(event, session)]
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise PlatformError(
            f"the event log {log.path} cannot be read: {error.strerror}",
            hint="Run criuctl as root.",
        ) from error
    rows = [_row(event) for event in found]
    app.emit_table(
        found,
        _COLUMNS,
        rows,
        empty="no events",
        brief=lambda: "\n".join(str(event["seq"]) for event in found),
    )
    return 0


def _follow(app: App, coming: Iterator[dict[str, Any] | None], session: str | None) -> None:
    """Follow the log until a signal, or until standard output is closed."""
    import json

    for event in coming:
        if event is None:
            if reader_gone():
                raise BrokenPipeError
        elif _of(event, session):
            write_result(json.dumps(event) if app.json else line(event))
