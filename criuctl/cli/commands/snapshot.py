"""``criuctl snapshot``, for cron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from ...host.journal.worst_exit_code import worst
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..descriptions import print_each, print_failure
from ..grouping import group_option, only_with_group, print_stored
from ..pages import page
from ..streams import tell, write_result
from ..text import printable
from .dump import MAX_FREEZE, NO_ENCRYPT, WITH_WORKSPACE, outcome_line, parse_labels

if TYPE_CHECKING:
    from ...ops.snapshot import SnapshotOutcome

JOBS = click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    metavar="N",
    default=2,
    show_default=True,
    help="So many at the same time.",
)


@page(
    examples=[
        (
            "Every quarter of an hour, from cron:",
            "*/15 * * * * criuctl snapshot web db -q --store s3://backups/trees",
        ),
        (
            "Everything on this host, with an end:",
            "criuctl snapshot --all --jitter 2m --deadline 20m",
        ),
        ("An agent, its sub-agents and its database:", "criuctl snapshot --group work"),
        (
            "Sessions that were started with run --label tier=prod:",
            "criuctl snapshot --label tier=prod",
        ),
        ("Memory and files of the same moment:", "criuctl snapshot work --with-workspace"),
    ],
    exits=[3, 4, 5, 7, 8, 9, 10, 11, 12, 13],
    see_also=["dump", "schedule", "maintenance", "list"],
)
@click.argument(
    "targets",
    nargs=-1,
    metavar="[TARGET]...",
    shell_complete=complete.target,
    help="Sessions' and configured trees' names, PIDs, unit:NAME or cgroup:PATH.",
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Every session and every configured tree that runs on this host.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="K=V",
    callback=parse_labels,
    help="Those of them that bear this label; all of them, if it is given several times.",
)
@group_option(
    "All members of this group at one moment, with the connections among them.  [default: TARGETs]"
)
@JOBS
@click.option(
    "--wait",
    metavar="SPAN",
    help="Wait so long for the same snapshots that are being taken.  [default: 0]",
)
@click.option(
    "--jitter", metavar="SPAN", help="Begin up to this much later, by chance.  [default: 0]"
)
@click.option(
    "--deadline", metavar="SPAN", help="Interrupt snapshots that take longer.  [default: none]"
)
@WITH_WORKSPACE
@MAX_FREEZE
@NO_ENCRYPT
@pass_app
def snapshot(
    app: App,
    targets: tuple[str, ...],
    all_: bool,
    labels: dict[str, str],
    group: str | None,
    jobs: int,
    wait: str | None,
    jitter: str | None,
    deadline: str | None,
    with_workspace: bool,
    max_freeze: float | None,
    no_encrypt: bool,
) -> int:
    """Dump several trees, some at a time, and leave them running: criuctl dump --leave-running of
    each, and one line, or one JSON object, for each as soon as it is known. A failure of one does
    not prevent the others from being dumped. A configured tree that does not run is left out of
    --all and --label.

    With --group the checkpoints of all members are one: either all of them are stored, as they are
    at the same moment, or none. The answer is one object (group, checkpoint, number, members,
    frozen_ms). Connections among the members are stored with what is in their queues, and criuctl
    restore --group brings them back. See `criuctl help linked-sessions`.

    Exit with 0 if all were dumped, otherwise with the worst exit code of all, in this order: 1,
    128+N, 8, 6, 5, 7, 13, 12, 10, 9, 4, 3, 2, 11. With -q only failures are printed.

    While the same snapshots (the same TARGETs or labels, into the same store) are being taken, a
    second run exits with 9, or waits with --wait. At the deadline dumps under way are interrupted
    and cleaned up, and their trees run on; they and the dumps that were not begun have timed out
    (12). Failures run the hooks of the phase snapshot-failed.
    """
    if (bool(targets), all_, bool(labels), group is not None).count(True) != 1:
        raise click.UsageError("give either TARGETs, or --all, or --label, or --group")
    if group is not None:
        only_with_group(group, None, "TARGETs", wait=wait, jitter=jitter, deadline=deadline)
        return _grouped(app, group, max_freeze, no_encrypt)
    from ...host.retention import patience
    from ...ops.scheduling import batch
    from ...ops.scheduling.subjects import chosen
    from ...ops.snapshot import lock_of
    from ...ops.snapshot import snapshot as take

    spans = [patience(span) for span in (wait, jitter, deadline)]
    lock = lock_of(app.config, targets, [f"{key}={value}" for key, value in labels.items()])

    def taken() -> Iterator[SnapshotOutcome]:
        with (
            app.reporting(bars=len(targets) == 1) as reporter,
            batch.alone(app.config, lock, "these snapshots are being taken already", wait=spans[0]),
        ):
            batch.spread(spans[1])
            until = batch.ends_at(spans[2])
            late = f"the deadline of {spans[2]:g} s has passed"
            subjects = chosen(app.config, targets, every=all_, labels=labels)
            yield from take(
                app.config.with_options(plain_store=no_encrypt or None),
                subjects,
                reporter=reporter,
                jobs=jobs,
                until=until,
                late=late,
                max_freeze=max_freeze,
                with_workspace=with_workspace,
            )

    codes = print_each(app, taken(), printer(app), lambda outcome: outcome.to_dict())
    if not codes and not app.quiet and not app.json:
        which = "".join(
            f" with the label {printable(key)}={printable(value)}" for key, value in labels.items()
        )
        tell(f"no session{which} runs on this host")
    return worst(codes)


def _grouped(app: App, group: str, max_freeze: float | None, no_encrypt: bool) -> int:
    with app.reporting() as reporter:
        from ...dump.job import DumpRequest
        from ...ops.group_snapshot import snapshot_group

        result = snapshot_group(
            app.config.with_options(plain_store=no_encrypt or None),
            group,
            request=DumpRequest(leave_running=True, max_freeze=max_freeze),
            reporter=reporter,
        )
    return print_stored(app, result, outcome_line)


def printer(app: App) -> Callable[[SnapshotOutcome], int]:
    """Return the function that prints one outcome and returns its exit code."""

    def print_outcome(outcome: SnapshotOutcome) -> int:
        if outcome.error is not None:
            if not app.json:
                print_failure(outcome.target, outcome.error)
            return outcome.error.exit_code
        assert outcome.result is not None
        if not app.json and not app.quiet:
            write_result(outcome_line(outcome.result))
        return DEGRADED if outcome.degraded else 0

    return print_outcome
