"""``criuctl prune``."""

from __future__ import annotations

import click

from ...errors import UsageError
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..pages import page
from ..streams import tell
from ..tables import Column
from ..text import age, plural, printable

_COLUMNS = (
    Column("checkpoint"),
    Column("id", rank=1),
    Column("created", right=True, rank=3),
    Column("fate"),
    Column("rules", rank=2, prose=True),
)
_COUNT = click.IntRange(min=1)


@page(
    examples=[
        (
            "Show what would be removed:",
            "criuctl prune --keep-last 3 --keep-daily 7 --keep-weekly 4 --dry-run",
        ),
        (
            "Once a night, from cron:",
            "criuctl prune -q --keep-within 2d --keep-daily 14 && criuctl gc -q",
        ),
        ("By the policies of the configuration:", "criuctl prune"),
    ],
    exits=[3, 7, 8, 9, 11],
    see_also=["gc", "pin", "list", "rm"],
)
@click.argument(
    "names",
    nargs=-1,
    metavar="[NAME]...",
    shell_complete=complete.session_name,
    help="Only these sessions; all if none is given.",
)
@click.option(
    "--keep-last",
    type=_COUNT,
    default=None,
    metavar="N",
    help="Keep the N newest.  [default: no rule]",
)
@click.option(
    "--keep-hourly",
    type=_COUNT,
    metavar="N",
    help="Keep the newest of each of the last N hours that have one.  [default: no rule]",
)
@click.option(
    "--keep-daily", type=_COUNT, metavar="N", help="The same by days (of UTC).  [default: no rule]"
)
@click.option(
    "--keep-weekly",
    type=_COUNT,
    metavar="N",
    help="The same by weeks, which begin on Monday.  [default: no rule]",
)
@click.option(
    "--keep-monthly", type=_COUNT, metavar="N", help="The same by months.  [default: no rule]"
)
@click.option(
    "--keep-within",
    metavar="SPAN",
    help="Keep all that are younger: 36h, 7d, 4w.  [default: no rule]",
)
@click.option(
    "--keep-label",
    multiple=True,
    metavar="K=V",
    help="Keep all that bear the label; may be repeated.",
)
@click.option(
    "--newest-too",
    is_flag=True,
    help="Remove even the newest checkpoint of a living session, if no rule keeps it.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@pass_app
def prune(
    app: App,
    /,
    names: tuple[str, ...],
    keep_within: str | None,
    keep_label: tuple[str, ...],
    newest_too: bool,
    dry_run: bool,
    **counts: int | None,
) -> int:
    """Remove the checkpoints that no rule keeps. Each session is considered by itself; a checkpoint
    stays if any rule keeps it, and is listed with those rules.

    Pinned checkpoints always stay, and so does the newest one of a session that lives, or that
    would be brought back from it. Without any --keep option the policies under `retention` in the
    configuration apply, by the first pattern that fits the session's name; sessions without a
    policy are left alone.

    Removing is quick; `criuctl gc` frees the space. If the store fails in between, the error names
    those that were removed (removed in its JSON, by id).
    """
    from ...host.retention import Rules, label, seconds
    from ...ops.prune import prune as prune_checkpoints

    within = seconds(keep_within) if keep_within is not None else 0.0
    if keep_within is not None and not within:
        raise UsageError("--keep-within 0 keeps nothing", hint="Write a span such as 7d.")
    kept = {
        name.removeprefix("keep_"): count for name, count in counts.items() if count is not None
    }
    rules = Rules(**kept, within=within, labels=tuple(label(text) for text in keep_label))
    with app.reporting() as reporter:
        done = prune_checkpoints(
            app.config, names, rules, newest_too=newest_too, dry_run=dry_run, reporter=reporter
        )
    body = done.to_dict()
    rows = []
    for one in body["checkpoints"]:
        gone = "would be removed" if dry_run else "removed"
        fate = "kept" if one["keep"] else "failed" if one["error"] else gone
        why = ", ".join(one["rules"]) or (
            one["error"]["message"] if one["error"] else "no rule keeps it"
        )
        name = f"{printable(one['session'])}@{one['number']}"
        rows.append((name, one["id"][:12], age(one["created"]), fate, printable(why)))
    gone_ids = [one["id"] for one in body["checkpoints"] if not one["keep"] and not one["error"]]
    if app.json:
        app.emit(body, lambda: "")
    else:
        app.emit_table(
            body, _COLUMNS, rows, empty="no checkpoints", brief=lambda: "\n".join(gone_ids)
        )
        if not app.quiet:
            tell(
                f"{plural(body['kept'], 'checkpoint')} kept, {body['removed']} "
                f"{'would be ' if dry_run else ''}removed"
            )
        if done.passed and not app.quiet:
            tell(f"no policy for {', '.join(printable(name) for name in done.passed)}: left alone")
        for error in [*done.unreadable, *done.errors.values()]:
            tell(f"criuctl: warning: {printable(error.message)}")
    return DEGRADED if done.unreadable or done.errors else 0
