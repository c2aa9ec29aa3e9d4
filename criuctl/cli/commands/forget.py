"""``criuctl forget``."""

from __future__ import annotations

import click

from ...host.journal.worst_exit_code import worst
from .. import complete
from ..app import App, pass_app
from ..descriptions import print_failure
from ..pages import page
from ..streams import tell
from ..text import plural, printable, size


@page(
    examples=[
        ("Remove output and audit log of a session that has ended:", "criuctl forget build"),
        (
            "In a cron job: of all that ended more than a week ago:",
            "criuctl forget --ended-before 7d",
        ),
    ],
    exits=[2, 3, 9],
    see_also=["ls", "kill", "rm", "prune"],
)
@click.argument(
    "names",
    nargs=-1,
    metavar="[NAME...]",
    shell_complete=complete.session,
    help="Sessions that have ended. None: all that --ended-before says.",
)
@click.option(
    "--ended-before",
    metavar="SPAN",
    help="Only those that ended longer ago than this: 36h, 7d, 4w.  [default: no limit]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@pass_app
def forget(app: App, names: tuple[str, ...], ended_before: str | None, dry_run: bool) -> int:
    """Remove the records that this host keeps of ended sessions: their output, their audit log, the
    journal of their steps and their line in `criuctl ls`. Until then `criuctl capture`, `criuctl
    log` and `criuctl step list` show them. Checkpoints stay in their stores.

    A session that runs is refused, and so is one that can be restored (checkpointed); `criuctl
    kill` gives that up. Without a NAME a lost session that has a checkpoint to come back from
    stays, too.
    """
    from ...host.retention import seconds
    from ...ops.forget import forget as remove

    done = remove(
        app.config,
        names,
        older=seconds(ended_before) if ended_before is not None else None,
        dry_run=dry_run,
    )
    gone = [one for one in done if one.error is None]
    total = sum(one.bytes for one in gone)
    word = "would be forgotten" if dry_run else "forgotten"
    body = {"dry_run": dry_run, "bytes": total, "sessions": [one.to_dict() for one in done]}

    def human() -> str:
        lines = [
            f"{printable(one.session)}: {word} ({one.state}, {size(one.bytes)})" for one in gone
        ]
        return "\n".join(
            [*lines, f"{plural(len(gone), 'session')} {word}, {size(total)}"]
            if not names
            else lines
        )

    app.emit(body, human, brief=lambda: "\n".join(one.session for one in gone))
    for one in done:
        if one.error is not None and not app.json:
            print_failure(one.session, one.error)
        for url in one.leases_kept:
            tell(
                f"criuctl: {printable(one.session)}: its lease in {printable(url)} could not be "
                "given back; another host restores it with --take-over"
            )
    return worst(one.error.exit_code for one in done if one.error is not None)
