"""``criuctl maintenance begin|end|status``; ``watch`` has a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ...host.journal.worst_exit_code import worst
from ..app import DEGRADED, App, pass_app
from ..descriptions import print_each, print_failure
from ..pages import Entry, LazyGroup, page
from ..streams import tell, write_result
from ..tables import Column
from ..text import plural, printable
from .snapshot import JOBS

if TYPE_CHECKING:
    from ...host.maintenance import Item

_SELF = "criuctl.cli.commands.maintenance"

maintenance = LazyGroup(
    "maintenance",
    entries={
        "begin": Entry(f"{_SELF}:begin", "Store everything that runs, and let nothing new begin."),
        "end": Entry(f"{_SELF}:end", "Bring back what was stored, and let new sessions begin."),
        "status": Entry(f"{_SELF}:status", "Show what was stored, and what has come back."),
        "watch": Entry(
            f"{_SELF}_watch:watch", "Store everything when a cloud takes this machine away."
        ),
    },
    summary="Store all sessions before a reboot, and restore them.",
    help="""\
    Before a host is rebooted, begin dumps every session and every configured tree that runs,
    refuses new sessions and writes down what to bring back; end, or recover at the boot, brings
    it back.

    Dependencies are given by an order, as with init scripts: the label order=N of a session, the
    key order of a configured tree, 50 by default. Begin ends the highest first; end brings back the
    lowest first. Those with the same number are processed at the same time.""",
    examples=[
        (
            "A reboot, after criuctl recover --install once:",
            "criuctl maintenance begin --reason 'new kernel'\nreboot",
        ),
        (
            "A database, and what needs it:",
            "criuctl run -d --label order=10 -- redis-server\ncriuctl run -d -- ./worker",
        ),
    ],
    exits=[3, 4, 5, 6, 7, 8, 9, 11, 12, 13],
    see_also=["recover", "snapshot", "dump", "restore"],
)


@page(
    examples=[
        ("Dump and end everything:", "criuctl maintenance begin --reason 'new kernel'"),
        ("Leave it running until the host goes down:", "criuctl maintenance begin --snapshot"),
    ],
    exits=[4, 5, 7, 8, 9, 10, 11, 12, 13],
    see_also=["maintenance end", "recover"],
)
@click.option("--dump", is_flag=True, help="Dump everything and end it, as without this option.")
@click.option(
    "--snapshot",
    is_flag=True,
    help="Leave everything running: what it does from then on is lost with the host.",
)
@click.option(
    "--reason",
    metavar="TEXT",
    default="",
    help="Shown to commands that are refused.  [default: none]",
)
@JOBS
@click.option(
    "--deadline",
    metavar="SPAN",
    help="Interrupt dumps that take longer; their trees run on.  [default: none]",
)
@pass_app
def begin(
    app: App, dump: bool, snapshot: bool, reason: str, jobs: int, deadline: str | None
) -> int:
    """Dump every session and every configured tree that runs on this host, the highest order first,
    one line or one JSON object each. From the first moment on, run, restore and receive exit with
    9, until maintenance is ended.

    What could not be stored runs on; another begin tries it again. If it is killed in the middle,
    the next call continues. With --snapshot, trees that were stored before the interruption are not
    stored again.

    A configured tree that something else keeps alive (a systemd unit with Restart=) is better
    stopped there: it would be started again. Exit with 0 if all was stored, otherwise with the
    worst exit code of all, as criuctl snapshot.
    """
    if dump and snapshot:
        raise click.UsageError("--dump and --snapshot contradict each other")
    from ...host.retention import patience
    from ...ops.maintenance import begin as start
    from ...ops.scheduling import batch

    with app.reporting(bars=False) as reporter:
        until = batch.ends_at(patience(deadline))
        items = start(
            app.config,
            "snapshot" if snapshot else "dump",
            reason,
            jobs=jobs,
            until=until,
            reporter=reporter,
        )
        codes = print_each(
            app, items, printer(app, "stored"), lambda item: item.to_dict(), to_the_end=True
        )
    if not app.json and not app.quiet:
        tell(
            f"{plural(len(codes), 'session')}; no session begins here until `criuctl maintenance "
            "end`"
        )
    return worst(codes)


RETRY = click.option(
    "--retry-after",
    metavar="SPAN",
    default="5s",
    show_default=True,
    help="Before what did not come back is tried again.",
)
AGAIN = click.option(
    "--again", is_flag=True, help="Also what was tried three times, from the first time on."
)


@page(
    examples=[
        ("After the reboot, where no boot unit has done it:", "criuctl maintenance end"),
        ("The store was not there; now it is:", "criuctl maintenance end --again"),
        ("Bring nothing back:", "criuctl maintenance end --abandon"),
    ],
    exits=[3, 4, 5, 6, 7, 8, 9, 10, 11, 13],
    see_also=["maintenance begin", "recover", "restore"],
)
@JOBS
@RETRY
@AGAIN
@click.option(
    "--abandon",
    is_flag=True,
    help="Bring nothing back: forget what was stored, and let new sessions begin.",
)
@pass_app
def end(app: App, jobs: int, retry_after: str, again: bool, abandon: bool) -> int:
    """Restore what maintenance has ended, the lowest order first, one line or one JSON object each,
    and let new sessions begin. Sessions that run already are left alone.

    Each is tried three times, over all calls: a try is counted before it is made, so that a restore
    that takes the host down is not tried for ever. After that it is reported, with the reason, and
    stays in criuctl maintenance status until --again brings it back, or --abandon forgets it; its
    checkpoint stays in the store in any case.

    Exit with 0 if all came back, otherwise with the worst exit code of all, as criuctl snapshot.
    """
    from ...host.retention import patience
    from ...ops.recovery import end as finish

    if again and abandon:
        raise click.UsageError("--again and --abandon contradict each other")
    with app.reporting(bars=False) as reporter:
        items = finish(
            app.config,
            jobs=jobs,
            pause=patience(retry_after),
            again=again,
            abandon=abandon,
            reporter=reporter,
        )
        print_outcome = printer(app, "back") if not abandon else _forgotten(app)
        codes = print_each(app, items, print_outcome, lambda item: item.to_dict(), to_the_end=True)
    return worst(codes)


@page(
    examples=[
        ("How far is it?", "criuctl maintenance status"),
        ("For a script:", "criuctl maintenance status --json"),
    ],
    exits=[8],
    see_also=["maintenance begin", "maintenance end"],
)
@pass_app
def status(app: App) -> int:
    """Show whether this host is in maintenance, since when and why, and of each session whether it
    is stored, has come back, or has been given up. In JSON: maintenance, phase, how, reason, since,
    sessions.
    """
    from ...host.maintenance import read

    record = read(app.config)
    if record is None:
        nothing: dict[str, Any] = {
            "maintenance": False,
            "phase": None,
            "how": None,
            "reason": "",
            "since": None,
            "sessions": [],
        }
        app.emit(nothing, lambda: "this host is not in maintenance", brief=lambda: "")
        return 0
    body = record.to_dict()
    if app.json:
        app.emit(body, lambda: "")
        return 0
    if not app.quiet:
        why = f": {printable(record.reason)}" if record.reason else ""
        now = "new sessions are refused" if record.shut else "new sessions may begin"
        write_result(f"{record.phase} since {body['since']}{why}; {now}")
    rows = []
    for item in record.items:
        error = printable(item.error["message"]) if item.error else ""
        rows.append(
            [
                printable(item.session),
                str(item.order),
                item.state,
                item.checkpoint[:12],
                str(item.tries),
                error,
            ]
        )
    columns = [
        Column("session"),
        Column("order", right=True, rank=3),
        Column("state"),
        Column("checkpoint", rank=2),
    ]
    columns += [Column("tries", right=True, rank=4), Column("why", rank=1, prose=True)]
    app.emit_table(
        body,
        columns,
        rows,
        empty="nothing ran here",
        brief=lambda: "\n".join(row[0] for row in rows),
    )
    return 0


def printer(app: App, wanted: str) -> Callable[[Item], int]:
    """Return the function that prints one item, which should be `wanted` now, and returns its exit
    code.
    """
    from ...ops.maintenance import failure

    def print_outcome(item: Item) -> int:
        error = failure(item)
        if error is not None:
            if not app.json:
                tries = f", after {plural(item.tries, 'try', 'tries')}" if item.tries else ""
                print_failure(f"{item.session}: {item.state}{tries}", error)
                if item.state == "given-up":
                    tell("  `criuctl maintenance end --again` tries it again, --abandon forgets it")
            return error.exit_code
        if not app.json and not app.quiet:
            checkpoint = f", checkpoint {item.checkpoint[:12]}" if item.checkpoint else ""
            pid = f" as PID {item.pid}" if item.pid and wanted == "back" else ""
            ended = {"gone": "has ended of itself", "moved": "another host has restored it"}
            said = ended.get(item.state) or f"{item.state}{pid}{checkpoint}"
            write_result(f"{printable(item.session)}: {said}")
        return DEGRADED if item.degraded and item.state == wanted else 0

    return print_outcome


def _forgotten(app: App) -> Callable[[Item], int]:
    def print_outcome(item: Item) -> int:
        if not app.json and not app.quiet:
            write_result(
                f"{printable(item.session)}: forgotten; it was {item.state}, checkpoint "
                f"{item.checkpoint[:12] or '-'}"
            )
        return 0

    return print_outcome
