"""``criuctl schedule add|list|remove|run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ...errors import CriuctlError, UsageError
from ...host.journal.worst_exit_code import worst
from ...session.client import caller
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..descriptions import insistent
from ..pages import Entry, LazyGroup, page
from ..streams import tell
from ..tables import Column
from ..text import age, plural, printable
from .dump import parse_labels
from .snapshot import JOBS, printer

if TYPE_CHECKING:
    from ...ops.schedule_run import Ran

_SELF = "criuctl.cli.commands.schedule"
_COUNT = click.IntRange(min=1)
_STATE = "CRIUCTL_STATE_DIR"  # the one variable that is passed on: a run finds its definition by it

schedule = LazyGroup(
    "schedule",
    entries={
        "add": Entry(f"{_SELF}:add", "Take snapshots regularly."),
        "list": Entry(
            f"{_SELF}:list_", "List the schedules, their next runs, and how the last ones ended."
        ),
        "remove": Entry(f"{_SELF}:remove", "Remove a schedule and all that starts it."),
        "run": Entry(f"{_SELF}:run", "Run a schedule now, as its timer does."),
    },
    summary="Take snapshots regularly, by systemd or cron.",
    help="""\
    A schedule defines which sessions are snapshotted, when, and which checkpoints are kept
    afterwards. It is started by a systemd timer where systemd runs, else by an entry in
    /etc/cron.d, and outlives a reboot.

    A failed snapshot runs the hooks of the phase snapshot-failed.""",
    examples=[
        (
            "Every session, every hour; the last day's are kept:",
            "criuctl schedule add hourly --all --every 1h --keep-hourly 24",
        ),
        ("How did it go?", "criuctl schedule list"),
    ],
    exits=[3, 9],
    see_also=["snapshot", "prune", "hooks"],
)


def complete_schedule(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the schedules."""
    from ...ops.schedules import names

    try:
        found = names((ctx.find_object(App) or App()).config)
    except CriuctlError:
        return []  # the command itself reports the error
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


@page(
    examples=[
        (
            "Every session, every hour:",
            "criuctl schedule add hourly --all --every 1h --keep-hourly 24",
        ),
        (
            "Two of them on working days:",
            "criuctl schedule add work web db --at 'Mon..Fri 08..18:00'",
        ),
        (
            "By label, spread over five minutes, with an end:",
            "criuctl schedule add p --label t=prod --at daily --jitter 5m --deadline 1h",
        ),
    ],
    exits=[9, 13],
    see_also=["schedule list", "snapshot", "prune"],
)
@click.argument("name", help="The schedule's name: letters, digits, '_' and '-'.")
@click.argument(
    "sessions",
    nargs=-1,
    metavar="[SESSION]...",
    shell_complete=complete.session_name,
    help="The sessions, by name.",
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Every session and configured tree that runs on this host at that time.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="K=V",
    callback=parse_labels,
    help=(
        "The sessions and configured trees that bear this label; all of them, if it is given "
        "several times."
    ),
)
@click.option(
    "--every",
    metavar="SPAN",
    help="The time from one run to the next: 15m, 1h, 1d.  [default: use --at]",
)
@click.option(
    "--at",
    metavar="CALENDAR",
    help="When, as `man systemd.time` has it: daily, 'Mon..Fri 08:30'.  [default: use --every]",
)
@click.option(
    "--jitter", metavar="SPAN", help="Begin up to this much later, by chance.  [default: 0]"
)
@click.option(
    "--deadline", metavar="SPAN", help="Interrupt a run that takes longer.  [default: none]"
)
@JOBS
@click.option(
    "--keep-last",
    type=_COUNT,
    metavar="N",
    help="Prune afterwards, and keep the N newest.  [default: no rule]",
)
@click.option(
    "--keep-hourly", type=_COUNT, metavar="N", help="As for `criuctl prune`.  [default: no rule]"
)
@click.option(
    "--keep-daily", type=_COUNT, metavar="N", help="As for `criuctl prune`.  [default: no rule]"
)
@click.option(
    "--keep-weekly", type=_COUNT, metavar="N", help="As for `criuctl prune`.  [default: no rule]"
)
@click.option(
    "--keep-monthly", type=_COUNT, metavar="N", help="As for `criuctl prune`.  [default: no rule]"
)
@click.option(
    "--keep-within", metavar="SPAN", help="As for `criuctl prune`: 36h, 7d.  [default: no rule]"
)
@click.option(
    "--keep-label", multiple=True, metavar="K=V", help="As for `criuctl prune`; may be repeated."
)
@pass_app
def add(
    app: App,
    /,
    name: str,
    sessions: tuple[str, ...],
    all_: bool,
    labels: dict[str, str],
    every: str | None,
    at: str | None,
    jitter: str | None,
    deadline: str | None,
    jobs: int,
    **keep: Any,
) -> int:
    """Make a schedule and start its timer: criuctl-schedule-NAME.timer and .service in
    /etc/systemd/system, or /etc/cron.d/criuctl-schedule-NAME where systemd does not run. If the
    host was off at a time of --at, systemd makes up for the missed run; cron does not.

    Without systemd, a period must divide an hour or a day, or be 1d or 1w, and a calendar must be
    one that cron can express, in local time.

    With --store or --config the runs use these, too. They do not see variables of this shell: put
    the credentials of a store into root's ~/.aws, other settings into the configuration. With a
    --keep option each run ends with a criuctl prune of the sessions that it has dumped; criuctl gc
    is not run.
    """
    from ...host.retention import patience
    from ...ops import schedules
    from ...ops.scheduling import timers
    from ...ops.sessions import sessions as all_sessions
    from ...store import from_anywhere

    if every and not patience(every):  # which is none at all to a `Schedule`
        raise UsageError(f"a period must be between 1m and 366d, not {every}")
    wanted = schedules.Schedule(
        name=name,
        every=patience(every),
        at=at or "",
        sessions=sessions,
        all=all_,
        labels=labels,
        jitter=patience(jitter),
        deadline=patience(deadline),
        jobs=jobs,
        store=from_anywhere(app.store) if app.store else None,
        config=os.path.abspath(app.config_file) if app.config_file else None,
        keep={
            key: list(value) if isinstance(value, tuple) else value
            for key, value in keep.items()
            if value
        },
    )
    variables = {_STATE: os.path.abspath(app.config.state_dir)} if os.environ.get(_STATE) else {}
    # the runs may do what their maker may do
    variables |= {caller.KIND: caller.kind(), caller.NAME: caller.name()}
    made = schedules.add(
        app.config, wanted, timers.own_program(sys.argv[0], sys.executable), variables
    )
    # damage of another schedule must not make this command fail
    (body,) = schedules.listed(app.config, [made.name])
    unseen = sorted(
        v for v in os.environ if v.startswith(("CRIUCTL_", "AWS_")) and v not in variables
    )
    if unseen and not app.quiet:
        tell(
            "criuctl: warning: the schedule's runs will not see what is set here: "
            f"{', '.join(unseen)}"
        )
    known = {one["session"] for one in all_sessions(app.config)} | app.config.trees.keys()
    unknown = [one for one in sessions if not (one in known or one.isdigit() or ":" in one)]
    if unknown and not app.quiet:
        tell(
            f"criuctl: warning: this host knows no session and no tree {', '.join(unknown)}: until "
            "it does, the schedule's runs fail"
        )
    app.emit(
        body,
        lambda: f"{printable(name)}: {_what(body)}, {_when(body)}; next {_moment(body['next'])}",
        brief=lambda: name,
    )
    return 0


@page(
    examples=[
        ("All of them:", "criuctl schedule list"),
        ("For a script:", "criuctl schedule list --json"),
    ],
    exits=[11],
    see_also=["schedule add", "list"],
)
@pass_app
def list_(app: App) -> int:
    """List this host's schedules: sessions, times, the next run, the age and the outcome of the
    last one, and the files. A schedule whose unit or crontab has been removed by hand is marked. A
    damaged definition is reported on standard error, and the exit status is 11; criuctl schedule
    remove removes it.

    In JSON, last has began, ended, result (ok, warnings, failed, interrupted, running, killed),
    exit_code, stored, pruned and failed. A run that was killed could not record when it ended, and
    may have stored more.
    """
    from ...ops.schedules import listed

    unreadable: list[CriuctlError] = []
    found = listed(app.config, unreadable=unreadable)
    rows = []
    for body in found:
        where = f"MISSING: {', '.join(body['missing'])}" if body["missing"] else body["files"][-1]
        rows.append(
            [
                printable(body["name"]),
                _what(body),
                _when(body),
                _moment(body["next"]),
                _ended(body["last"]),
                printable(where),
            ]
        )
    columns = [
        Column("name"),
        Column("what", rank=4, prose=True),
        Column("when", rank=1, prose=True),
        Column("next", rank=2),
        Column("last", rank=3, prose=True),
        # a missing file must be seen
        Column("where", rank=0 if any(b["missing"] for b in found) else 5, prose=True),
    ]
    app.emit_table(
        found,
        columns,
        rows,
        empty="there are no schedules",
        brief=lambda: "\n".join(b["name"] for b in found),
    )
    for error in unreadable:
        tell(f"criuctl: warning: {printable(error.message)}")
    return DEGRADED if unreadable else 0


def _ended(last: dict[str, Any] | None) -> str:
    if not last:
        return "-"
    if not last["ended"]:
        return f"{last['result']}, began {age(last['began'])}"
    return f"{last['result']} ({last['exit_code']}), {age(last['ended'])}"


def _what(body: dict[str, Any]) -> str:
    if body["all"]:
        return "all sessions"
    return printable(
        ", ".join(body["sessions"]) or ", ".join(f"{k}={v}" for k, v in body["labels"].items())
    )


def _when(body: dict[str, Any]) -> str:
    if body["at"]:
        return printable(body["at"])
    left, words = int(body["every"]), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            words.append(f"{left // size}{unit}")
            left %= size
    return f"every {''.join(words)}"


def _moment(text: str | None) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S") if text else "-"


@page(
    examples=[("Remove a schedule:", "criuctl schedule remove hourly")],
    exits=[3, 9, 13],
    see_also=["schedule add", "schedule list"],
)
@click.argument("name", shell_complete=complete_schedule, help="The schedule.")
@pass_app
def remove(app: App, name: str) -> int:
    """Stop the timer and remove the units or the crontab, the definition, and the record of the
    last run. The checkpoints stay. A run that is under way continues to its end.
    """
    from ...ops import schedules

    schedules.remove(app.config, name)
    app.emit(
        {"schedule": name, "removed": True}, lambda: f"{printable(name)} removed", brief=lambda: ""
    )
    return 0


@page(
    examples=[
        ("Try it now:", "criuctl schedule run hourly"),
        ("Its result:", "criuctl schedule run hourly --json"),
    ],
    exits=[3, 4, 5, 7, 8, 9, 10, 11, 12, 13],
    see_also=["schedule add", "snapshot"],
)
@click.argument("name", shell_complete=complete_schedule, help="The schedule.")
@click.option(
    "--delay",
    is_flag=True,
    help="First wait for a random part of the schedule's jitter, as the crontab does.",
)
@pass_app
def run(app: App, name: str, delay: bool) -> int:
    """Take the schedule's snapshots, some at a time, and print each on a line; then prune, if the
    schedule has keep rules. A failure of one does not prevent the others from being taken.

    Exit with 0 if all was done, otherwise with the worst exit code of all, as criuctl snapshot.
    While a run of the same schedule is under way another one exits with 9 at once. At the deadline
    the snapshots under way are interrupted and cleaned up, the sessions run on, and the exit code
    is 12. With -q only failures are printed.
    """
    from ... import config as configuration
    from ...ops import schedule_run, schedules

    wanted = schedules.get(app.config, name)
    config = app.config
    if wanted.config and not app.config_file:
        config = configuration.load(wanted.config).with_options(state_dir=config.state_dir)
    config = config.with_options(store=app.store or wanted.store)
    unheard: list[int] = []
    # a closed pipe of cron must not stop a schedule's snapshots
    report = insistent(printer(app), unheard)
    with app.reporting(bars=False) as reporter:
        ran, code = schedule_run.run(
            config, wanted, delay=delay, reporter=reporter, report=report, judge=_judge
        )
    if app.json:
        app.emit(ran.to_dict() | {"exit_code": code}, lambda: "")
        return code
    if not ran.outcomes and not app.quiet:
        tell("no such session runs on this host")
    if ran.pruned and not app.quiet:
        tell(f"{plural(ran.pruned, 'checkpoint')} pruned")
    for text in ran.warnings:
        tell(f"criuctl: warning: {printable(text)}")
    if ran.error is not None:
        tell(f"criuctl: prune: {printable(ran.error.message)}")
    return worst([code, *unheard])


def _judge(ran: Ran) -> int:
    codes: Sequence[int] = [
        o.error.exit_code if o.error else DEGRADED if o.degraded else 0 for o in ran.outcomes
    ]
    more = [ran.error.exit_code] if ran.error else [DEGRADED] if ran.warnings else []
    return worst([*codes, *more])
