"""``criuctl events``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ...errors import PlatformError, UsageError
from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..streams import reader_gone, tell, write_result
from ..tables import Column
from ..text import duration, printable, size

if TYPE_CHECKING:
    from ...host.journal.event_log import EventLog

_SHOWN = 30  # events, where nothing says how many

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


def _begin(ctx: click.Context, param: click.Parameter, value: str | None) -> int | datetime | None:
    """Return the number of an event, or the time, that `value` means."""
    if value is None:
        return None
    if value.isascii() and value.isdecimal():
        return int(value)
    today = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    days = {"today": today, "yesterday": today - timedelta(days=1)}
    try:
        return days[value] if value in days else _ago(value)
    except UsageError:
        pass
    try:
        return datetime.fromisoformat(value).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is neither the number of an event, nor a span (2h, 7d), nor a time "
            "(2026-11-27, '2026-11-27 14:00', today, yesterday)",
            ctx,
            param,
        ) from None


def _ago(span: str) -> datetime:
    from ...host.retention import patience

    return datetime.now(UTC) - timedelta(seconds=patience(span))


@page(
    examples=[
        ("The last operations of this host and their outcomes:", "criuctl events"),
        (
            "What was done to a session since yesterday:",
            "criuctl events --session web -S yesterday",
        ),
        ("What failed:", "criuctl events --json | jq '.[] | select(.outcome == \"failed\")'"),
        ("Each event, as a line of JSON, when it comes:", "criuctl events --follow --json"),
        ("Go on where a script has stopped reading:", "criuctl events --since 4711 --json"),
    ],
    exits=[13],
    see_also=["metrics", "log", "doctor"],
)
@click.option(
    "-S",
    "--since",
    callback=_begin,
    metavar="WHEN",
    help="Only events after the one of this number, or since a time: a span before now (2h, 7d), "
    "2026-11-27, '2026-11-27 14:00' (of this host's time zone), today, yesterday.  [default: the "
    f"last {_SHOWN}; all with --json or -q; with --follow those that come]",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only the last N of them; with --follow, those before the ones that come.  [default: as "
    "for --since]",
)
@click.option("-a", "--all", "all_", is_flag=True, help="All events that are kept.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@click.option(
    "--session",
    metavar="NAME",
    shell_complete=complete.session,
    help="Only events of this session.  [default: of all]",
)
@pass_app
def events(
    app: App,
    since: int | datetime | None,
    lines: int | None,
    all_: bool,
    follow: bool,
    session: str | None,
) -> int:
    """Print the end of this host's event log, the newest event last. It has an event for each
    operation that changed something, or failed to: run, dump, snapshot, restore, migrate, receive,
    resolve, pause, halt, resume, kill, forget, fence, rm, prune, pin, unpin, gc, import,
    store-init, key-add and the like, whether a person, a schedule or a supervisor started it. A
    schedule or supervisor adds one more event when it ends: schedule-run, maintenance-begin,
    maintenance-end, recover, supervise (which fails with 6 when it gives up); self-fence and
    self-fence-end are about a supervised session that stands still and goes on. Commands that only
    look have no events, nor have programs in a session, their end included.

    Events are numbered without gap, over reboots too, and are in events.jsonl in state_dir, one
    JSON object per line, readable by root alone. Full files have 4 MiB, and the newest eight are
    kept. Events hold names, numbers and codes, and no message, command line, label or secret.
    `events: journald` or `events: syslog` in the configuration sends them there, too.

    An event that cannot be written (disk full) is left out with a warning; the operation continues.
    When a criuctl was killed (kill -9, power cut), the next operation records that: interrupted,
    exit code 137, and when it began.

    --json prints an array, of all events without the options above, and with --follow one object
    per line.
    """
    if all_ and (since is not None or lines is not None):
        raise click.UsageError("--all excludes --since and --lines")
    from ...host.journal.event_log import EventLog

    log = EventLog(app.config.state_dir)
    chosen = all_ or since is not None or lines is not None
    cut = not (chosen or follow or app.json or app.quiet)
    if cut:
        lines = _SHOWN
    try:
        if follow and not chosen:
            _follow(app, log.follow(), session)
        found, count, newest = _last(log, since, lines, session)
        if follow:
            for event in found:
                _print_one(app, event)
            _follow(app, log.follow(newest), session)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise PlatformError(
            f"the event log {log.path} cannot be read: {error.strerror}",
            hint="Run criuctl as root.",
        ) from error
    app.emit_table(
        found,
        _COLUMNS,
        [_row(event) for event in found],
        empty="no events",
        brief=lambda: "\n".join(str(event["seq"]) for event in found),
    )
    if cut and count > len(found):
        tell(f"The last {len(found)} of {count} events; --all shows all of them.")
    return 0


def _last(
    log: EventLog, since: int | datetime | None, lines: int | None, session: str | None
) -> tuple[list[dict[str, Any]], int, int]:
    """Return the last `lines` of the wanted events, how many there are, and the number of the
    newest event of any session.
    """
    from ...host.journal.event_log import as_text

    after = since if isinstance(since, int) else 0
    # of the same form as the time of an event
    begin = as_text(since) if isinstance(since, datetime) else ""
    kept: deque[dict[str, Any]] = deque(maxlen=lines)
    count, newest = 0, after
    for event in log.read(after):
        newest = event["seq"]
        if _of(event, session) and str(event.get("time", "")) >= begin:
            kept.append(event)
            count += 1
    return list(kept), count, newest


def _follow(app: App, coming: Iterator[dict[str, Any] | None], session: str | None) -> NoReturn:
    """Follow the log until a signal, or until standard output is closed."""
    for event in coming:
        if event is None:
            if reader_gone():
                raise BrokenPipeError
        elif _of(event, session):
            _print_one(app, event)
    raise AssertionError("an event log has no end")


def _print_one(app: App, event: Mapping[str, Any]) -> None:
    import json

    write_result(json.dumps(event) if app.json else line(event))
