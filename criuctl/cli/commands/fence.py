"""``criuctl fence``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ...host.journal.worst_exit_code import worst
from .. import complete
from ..app import App, pass_app
from ..descriptions import print_each
from ..pages import page
from ..streams import tell, write_result
from ..text import plural, printable

if TYPE_CHECKING:
    from ...host.lost_homes import StandDown


def _line(body: Mapping[str, Any]) -> str:
    name, lease = printable(body["session"]), body["lease"]
    if body["verdict"] == "fenced":
        ours = f"epoch {lease['epoch']}, here {body['epoch']}"
        count = plural(body["processes"], "process", "processes")
        return f"{name}: {printable(body['reason'])} ({ours}); {count} {body['done']}"
    if body["verdict"] == "home":
        return f"{name}: lives here, by epoch {body['epoch']}"
    if body["verdict"] == "unclaimed":
        return f"{name}: has no lease, so no host can have taken it over"
    return f"{name}: {printable(body['reason'])}; nothing was done"


@page(
    examples=[
        ("When the network is back, or at boot:", "criuctl fence --all"),
        ("From cron, printing only what was stopped:", "* * * * * criuctl fence --all -q"),
        (
            "Have a look at the stale copy before it is ended:",
            "criuctl fence web --freeze-only\ncriuctl capture web",
        ),
    ],
    exits=[3, 7, 8, 9, 10, 12],
    see_also=["restore", "snapshot", "status", "kill"],
)
@click.argument(
    "names",
    nargs=-1,
    metavar="[NAME]...",
    shell_complete=complete.session,
    help="Sessions of this host.",
)
@click.option("--all", "all_", is_flag=True, help="Every session that runs on this host.")
@click.option(
    "--freeze-only", is_flag=True, help="Freeze the stale copy and leave it so.  [default: end it]"
)
@pass_app
def fence(app: App, names: tuple[str, ...], all_: bool, freeze_only: bool) -> int:
    """Check whether another host has taken over (criuctl restore --take-over) a session that runs
    here, and if so stop what runs here: a session has one home. Every process is frozen, attached
    clients are notified, then every process is killed without a chance to clean up. The session is
    lost here, and criuctl status shows why. A dump or a snapshot that finds its session taken over
    does the same.

    A session has a lease, in the store, from its first snapshot or restore on; each take-over
    raises the lease's epoch. Only a higher epoch than that of this host's own claim stops anything:
    a store that does not answer (exit 7), or that has no lease to show, stops nothing. Stores
    without conditional writes give no leases.

    Exit with 0 when all leases could be read, whether or not something was stopped; --json shows
    what.
    """
    if bool(names) == all_:
        raise click.UsageError("give either NAMEs or --all")
    from ...host.lost_homes import stand_down

    def print_outcome(found: StandDown) -> int:
        if found.error is None:
            if not app.json and (found.done != "nothing" or not app.quiet):
                write_result(_line(found.to_dict()))
            return 0
        if not app.json:
            tell(
                f"criuctl: {printable(found.session)}: {printable(found.error.message)}; nothing "
                "was ended"
            )
            if found.error.hint:
                tell(f"  hint: {printable(found.error.hint)}")
        return found.error.exit_code

    with app.reporting() as reporter:
        looked = stand_down(
            app.config, names, every=all_, freeze_only=freeze_only, reporter=reporter
        )
        codes = print_each(
            app, looked, print_outcome, lambda found: found.to_dict(), to_the_end=True
        )
    if not codes and not app.json and not app.quiet:
        tell("no session runs on this host")
    return worst(codes)
