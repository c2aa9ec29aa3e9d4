"""``criuctl pin`` and ``criuctl unpin``."""

from __future__ import annotations

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..text import printable

_REFS = (
    "NAME (its newest checkpoint only), NAME@N, or the begin of a checkpoint's id; several may be "
    "given."
)


@page(
    examples=[("Keep the state before the upgrade, whatever the rules say:", "criuctl pin web@7")],
    exits=[3, 7, 8],
    see_also=["unpin", "prune", "list"],
)
@click.argument(
    "refs",
    nargs=-1,
    required=True,
    metavar="REF...",
    shell_complete=complete.checkpoint_ref,
    help=_REFS,
)
@pass_app
def pin(app: App, refs: tuple[str, ...]) -> int:
    """Pin checkpoints: neither `criuctl rm` nor `criuctl prune` removes them until they are
    unpinned. Pinning twice is fine. A pin is in the store, so it holds for every host.
    """
    return _change(app, refs, pinned=True)


@page(
    examples=[("Let it go:", "criuctl unpin web@7")],
    exits=[3, 7, 8, 9],
    see_also=["pin", "prune", "rm"],
)
@click.argument(
    "refs",
    nargs=-1,
    required=True,
    metavar="REF...",
    shell_complete=complete.checkpoint_ref,
    help=_REFS,
)
@pass_app
def unpin(app: App, refs: tuple[str, ...]) -> int:
    """Unpin checkpoints, damaged ones too, so that they may be removed. Unpinning one that is not
    pinned is fine.
    """
    return _change(app, refs, pinned=False)


def _change(app: App, refs: tuple[str, ...], *, pinned: bool) -> int:
    from ...ops.prune import pin as change

    bodies = [p.to_dict() for p in change(app.config, refs, pinned=pinned)]
    word = "pinned" if pinned else "unpinned"
    app.emit(
        bodies,
        lambda: "\n".join(
            f"{printable(b['session'] or 'a damaged one')}@{b['number']} ({b['id'][:12]}): {word}"
            for b in bodies
        ),
        brief=lambda: "\n".join(b["id"] for b in bodies),
    )
    return 0
