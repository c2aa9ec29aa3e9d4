"""``criuctl cp``."""

from __future__ import annotations

from typing import Any

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..text import plural, printable, size


def _outcome(body: dict[str, Any]) -> str:
    left = f"; {plural(body['left_out'], 'FIFO')} left out" if body["left_out"] else ""
    return (
        f"{printable(body['source'])}: {plural(body['files'], 'file')}, {size(body['bytes'])}, "
        f"written to {printable(body['target'])}{left}"
    )


@page(
    examples=[
        ("A file of the workspace as it was three checkpoints ago:", "criuctl cp work@-3:notes ."),
        ("A whole folder:", "criuctl cp work@7:src /tmp/src-then"),
        ("A file that was taken along by its path:", "criuctl cp db:/srv/db/base.db /tmp/"),
    ],
    exits=[3, 7, 8, 9],
    see_also=["show", "restore", "snapshot"],
)
@click.argument(
    "source",
    metavar="REF:PATH",
    shell_complete=complete.checkpoint_ref,
    help="A checkpoint and a file or folder of it; a relative path is one of its workspace.",
)
@click.argument(
    "target",
    metavar="DEST",
    type=click.Path(),
    help="The new file or folder, or an existing folder to put it in.",
)
@pass_app
def cp(app: App, source: str, target: str) -> int:
    """Take a file or folder out of a checkpoint: of the workspace, if it was taken with snapshot
    --with-workspace, or of what was carried along (dump --with-files). `criuctl show REF --files`
    lists them.

    The copies belong to the caller. They have the permission bits and the time of change that the
    files had, and no set-user-ID bits, access lists or other attributes; FIFOs are left out.
    Nothing is overwritten, and an incomplete copy is removed. The session and the files of this
    host are not touched; `criuctl restore --rewind` puts them back.
    """
    with app.reporting() as reporter:
        from ...ops.copy_out import copy_out

        body = copy_out(app.config, source, target, reporter=reporter).to_dict()
    app.emit(body, lambda: _outcome(body), brief=lambda: str(body["target"]))
    return 0
