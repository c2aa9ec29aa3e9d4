"""``criuctl rm``."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ...errors import CriuctlError
from ...host.journal.worst_exit_code import worst
from .. import complete
from ..app import App, pass_app
from ..descriptions import print_failure
from ..grouping import group_option, only_with_group
from ..pages import page
from ..streams import tell
from ..text import printable

if TYPE_CHECKING:
    from ...checkpoint.summary import CheckpointSummary


@page(
    examples=[
        ("Remove the oldest checkpoint of web:", "criuctl rm web@1"),
        ("Remove several:", "criuctl rm web@1 web@2 0f3a99"),
    ],
    exits=[3, 7, 8, 9],
    see_also=["list", "prune", "gc", "unpin"],
)
@click.argument(
    "refs",
    nargs=-1,
    metavar="REF...",
    shell_complete=complete.checkpoint_ref,
    help=(
        "NAME (its newest checkpoint only), NAME@N, or the begin of a checkpoint's id; several "
        "may be given."
    ),
)
@group_option(
    "Remove a checkpoint of a group (the newest one, or the N-th), and with it the checkpoints of "
    "its members.  [default: REF...]",
    "GROUP[@N]",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_app
def rm(app: App, refs: tuple[str, ...], group: str | None, yes: bool) -> int:
    """Remove checkpoints from the store. At a terminal it asks first where a NAME alone has several
    checkpoints: it means the newest. A script is not asked. All REFs are looked up first,
    so numbers that count from the end mean what `criuctl list` showed. One that does not exist does
    not prevent the others from being removed; with a single REF its error is the command's. Pinned
    checkpoints are refused; one that is damaged, so that its session is unknown, is removed, too.
    If the store fails in between, the error names those that were removed (removed in its JSON, by
    id).

    The checkpoint of a member of a group checkpoint is refused: remove the group's by --group.

    A removed checkpoint cannot be restored any more at once. `criuctl gc` frees its space, as other
    checkpoints may share it. With its last checkpoint a tree that does not run any more is
    forgotten: `criuctl ls` lists it no longer.
    """
    only_with_group(group, refs, "REF...")
    if group is not None:
        return _remove_group(app, group)
    if not (yes or app.json or _confirmed(app, refs)):
        tell("nothing was removed")
        return 0
    from ...ops.inspect import remove

    with app.reporting() as reporter:
        removals = remove(app.config, refs, reporter=reporter)
    if len(refs) == 1 and removals[0].error is not None:
        raise removals[0].error
    bodies = [r.to_dict() for r in removals]

    def human() -> str:
        return "\n".join(
            f"{printable(b['ref'])}: removed "
            f"{printable(b['session'] or 'a damaged one')}@{b['number']} ({b['id'][:12]})"
            for b in bodies
            if b["ok"]
        )

    app.emit(bodies, human, brief=lambda: "\n".join(b["id"] for b in bodies if b["ok"]))
    if not app.json:
        for removal in removals:
            if removal.error is not None:
                print_failure(removal.ref, removal.error)
    return worst(r.error.exit_code for r in removals if r.error is not None)


def _confirmed(app: App, refs: tuple[str, ...]) -> bool:
    """Ask, at a terminal, about each NAME that has more checkpoints than the one that goes."""
    from ...ops.inspect import list_checkpoints

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    for name in (ref for ref in refs if "@" not in ref):
        kept: list[CheckpointSummary] = []
        with suppress(CriuctlError):  # it is an id, or nothing: the removal reports it
            kept = list_checkpoints(app.config, name).checkpoints
        if len(kept) > 1:
            newest = f"{printable(name)}@{kept[-1].number} ({kept[-1].id[:12]})"
            asked = f"{printable(name)} has {len(kept)} checkpoints. Remove the newest, {newest}?"
            if not click.confirm(asked, err=True):
                return False
    return True


def _remove_group(app: App, ref: str) -> int:
    from ...ops.groups import remove_group

    with app.reporting() as reporter:
        removed = remove_group(app.config, ref, reporter=reporter)
    one = removed.checkpoint
    app.emit(
        removed.to_dict(),
        lambda: f"group {printable(one.ref)}: removed, with {len(one.members)} sessions' parts",
        brief=lambda: one.id,
    )
    if not app.json:
        for kept, error in removed.kept:
            print_failure(kept[:12], error)
    return worst(error.exit_code for _, error in removed.kept)
