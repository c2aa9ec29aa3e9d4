"""``criuctl verify``."""

from __future__ import annotations

import click

from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..severity import worst
from ..text import plural, printable, size


@page(
    examples=[
        ("Is the newest checkpoint of web sound?", "criuctl verify web"),
        ("Check the whole store once a week, from cron:", "criuctl verify --all -q"),
    ],
    exits=[3, 7, 8],
    see_also=["list", "show"],
)
@click.argument(
    "ref", required=False, shell_complete=complete.checkpoint_ref, help="NAME, NAME@N, or the begin of a checkpoint's id."
)
@click.option("--all", "all_", is_flag=True, help="Check every checkpoint of the store, the sound after the damaged ones too.")
@pass_app
def verify(app: App, ref: str | None, all_: bool) -> int:
    """Reads everything that a restore of the checkpoint would need (manifest, images, memory, files), decrypts it and
    checks it against its checksums. Changes nothing.

    Ends with 8 when something is damaged, and names the object; with 7 when an object is missing or the store
    does not answer.
    """
    if (ref is None) == (not all_):
        raise click.UsageError("give either a REF or --all")
    from ...ops.inspect import verify as verify_checkpoints

    with app.reporting() as reporter:
        verdicts = verify_checkpoints(app.config, ref, reporter=reporter)
    if ref is not None and verdicts[0].error is not None:
        raise verdicts[0].error
    bodies = [v.to_dict() for v in verdicts]

    def human() -> str:
        lines = []
        for body in bodies:
            name = "unreadable" if body["id"] is None else f"{printable(body['session'])}@{body['number']}"
            if body["ok"]:
                lines.append(f"{name}: sound, {size(body['bytes'])} checked")
            else:
                lines.append(f"{name}: {printable(body['error']['message'])}")
        bad = sum(not body["ok"] for body in bodies)
        if all_:
            lines.append(f"{plural(len(bodies), 'checkpoint')}, {bad} not sound")
        return "\n".join(lines)

    def brief() -> str:
        return "\n".join(f"{b['id'] or 'unreadable'}  {printable(b['error']['message'])}" for b in bodies if not b["ok"])

    app.emit(bodies if all_ else bodies[0], human, brief)
    return worst(v.error.exit_code for v in verdicts if v.error is not None)
