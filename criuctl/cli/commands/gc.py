"""``criuctl gc``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from ..app import DEGRADED, App, pass_app
from ..pages import page
from ..text import facts, plural, size


@page(
    examples=[
        ("Once a day, from cron:", "criuctl gc -q"),
        ("How much would be freed, by and by?", "criuctl gc --dry-run"),
        ("Free everything at once, while no host dumps or restores:", "criuctl gc --grace 0"),
    ],
    exits=[7, 8, 9, 11],
    see_also=["prune", "rm", "store"],
)
@click.option(
    "--grace",
    metavar="SPAN",
    help="Keep unneeded data for this long: 36h, 2d.  [default: gc_grace, 1d]",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would be freed; the store is left as it is."
)
@pass_app
def gc(app: App, grace: str | None, dry_run: bool) -> int:
    """Free what no checkpoint needs any more: content of removed checkpoints, and leftovers of
    failed dumps.

    It works in two runs: the first marks what is not needed, and a run after the grace time deletes
    it. Packs that are needed for less than half are copied to smaller ones; small packs, and small
    objects of the index, are put together once there are many. Any number of hosts may dump,
    restore and collect meanwhile, and it may be killed at any time: the next run continues.

    Objects younger than the grace time are not marked yet, because a dump may be about to need
    them. So the grace time should be longer than any dump or restore takes: a dump that relies on
    deleted objects fails, and its tree runs on. If the store refuses to delete (object lock), that
    is reported, the exit status is 11, and the next run tries again. In a bucket that keeps
    versions, its own lifecycle rules decide when the space is free.

    A checkpoint that cannot be read ends the run with 8 before anything is deleted, because it is
    unknown what it needs. A write-only host, which cannot read others' checkpoints, is refused with
    9.
    """
    from ...files import memory_files
    from ...ops.prune import collect

    with app.reporting() as reporter:
        done = collect(app.config, grace=grace, dry_run=dry_run, reporter=reporter)
    if not dry_run:
        with suppress(OSError):  # a read-only run folder
            memory_files.sweep(app.config)
    body = done.to_dict()
    app.emit(body, lambda: _human(body), brief=lambda: "")
    return DEGRADED if done.refused or done.refused_others or done.lost else 0


def _human(body: dict[str, Any]) -> str:
    rows = [
        ("checkpoints", f"{body['checkpoints']}, with {plural(body['chunks'], 'chunk')}"),
        ("packs", f"{body['packs']}, {size(body['bytes'])}"),
        (
            "not needed",
            f"{plural(body['unneeded'], 'pack')}, {size(body['unneeded_bytes'])}; "
            f"{body['waiting']} in their grace time",
        ),
    ]
    if body["young"]:
        young = (
            f"{plural(body['young'], 'pack')}, {size(body['young_bytes'])}: not needed, but "
            "younger than the grace time"
        )
        rows.append(("too new", young))
    if body["dry_run"]:
        return facts(
            [*rows, ("to copy", f"{plural(body['repacked'], 'pack')}, half empty or small")]
        )
    rows.append(
        ("copied", f"the rest of {plural(body['repacked'], 'pack')}, {size(body['copied_bytes'])}")
    )
    rows.append(("deleted", f"{plural(body['deleted'], 'pack')}, {size(body['freed_bytes'])}"))
    if body["segments"]:
        rows.append(("index", f"{plural(body['segments'], 'object')} replaced"))
    if body["spared"] or body["refused"]:
        rows.append(
            (
                "left",
                (
                    f"{body['spared']} for the next run, {body['refused']} that the store refuses "
                    "to delete"
                ),
            )
        )
    return facts(rows)
