"""``criuctl list``."""

from __future__ import annotations

import click

from ...errors import UsageError
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..grouping import group_option
from ..pages import page
from ..streams import tell
from ..tables import Column
from ..text import age, labels, plural, printable, size

_COLUMNS = (
    Column("checkpoint"),
    Column("id"),
    Column("created", right=True, rank=1),
    Column("memory", right=True, rank=3),
    Column("stored", right=True, rank=2),
    Column("host", rank=5),
    Column("labels", rank=4, prose=True),
)

_GROUP_COLUMNS = (
    Column("group"),
    Column("id"),
    Column("created", right=True, rank=1),
    Column("host", rank=2),
    Column("members", prose=True),
)


@page(
    examples=[
        ("Everything in the default store:", "criuctl list"),
        (
            "The ids of web's checkpoints in a bucket:",
            "criuctl list web -q --store s3://backups/trees",
        ),
        (
            "Sizes, for a script:",
            "criuctl list --json | jq '.[] | [.session, .number, .bytes.stored]'",
        ),
    ],
    exits=[3, 7, 8, 11],
    see_also=["show", "rm", "verify"],
)
@click.argument(
    "name",
    required=False,
    shell_complete=complete.session_name,
    help="List this session's checkpoints only.",
)
@group_option(
    "List the checkpoints of this group: those of all its members at once.  [default: sessions']"
)
@pass_app
def list_(app: App, name: str | None, group: str | None) -> int:
    """List the checkpoints of the store, by session and number (criuctl checkpoints does the same).
    Every listed checkpoint is complete and can be restored.

    MEMORY is the memory of the tree at the dump, STORED what this dump added to the store after
    deduplication and compression.

    A checkpoint whose manifest cannot be read is reported on standard error, and the exit status is
    11. A write-only host lists its own checkpoints, and reports on standard error how many there
    are of others, which it may not read.
    """
    if group is not None:
        if name is not None:
            raise UsageError("give either NAME or --group")
        return _groups(app, group)
    from ...ops.inspect import list_checkpoints

    listing = list_checkpoints(app.config, name)
    found = [summary.to_dict() for summary in listing.checkpoints]
    rows = (  # made only for a table
        (
            f"{printable(s['session'])}@{s['number']}" + (" (pinned)" if s.get("pinned") else ""),
            s["id"][:12],
            age(s["created"]),
            size(s["bytes"].get("memory", 0)),
            size(s["bytes"].get("stored", 0)),
            printable(s["host"]),
            labels(s["labels"]),
        )
        for s in found
    )
    app.emit_table(
        found,
        _COLUMNS,
        rows,
        empty="no checkpoints",
        brief=lambda: "\n".join(s["id"] for s in found),
    )
    for error in listing.unreadable:
        tell(f"criuctl: warning: {printable(error.message)}")
    if listing.hidden:
        tell(
            f"criuctl: {plural(listing.hidden, 'checkpoint')} of other hosts, which this "
            "write-only host may not read"
        )
    return DEGRADED if listing.unreadable else 0


def _groups(app: App, group: str) -> int:
    from ...ops.groups import described, list_groups

    listing = list_groups(app.config, group)
    found = [described(one) for one in listing.checkpoints]
    rows = [
        (
            f"{printable(one['group'])}@{one['number']}",
            one["checkpoint"][:12],
            age(one["created"]),
            printable(one["host"]),
            ", ".join(f"{printable(m['session'])}@{m['number']}" for m in one["members"]),
        )
        for one in found
    ]
    app.emit_table(
        found,
        _GROUP_COLUMNS,
        rows,
        empty="no checkpoints",
        brief=lambda: "\n".join(one["checkpoint"] for one in found),
    )
    for error in listing.unreadable:
        tell(f"criuctl: warning: {printable(error.message)}")
    return DEGRADED if listing.unreadable else 0
