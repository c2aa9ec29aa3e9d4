"""``criuctl snapshot``: what cron calls."""

from __future__ import annotations

import click

from .. import complete
from ..app import DEGRADED, App, pass_app
from ..pages import page
from ..severity import worst
from ..streams import tell, write_result
from ..text import printable
from .dump import outcome_line


@page(
    examples=[
        ("Every quarter of an hour, from cron:", "*/15 * * * * criuctl snapshot web db -q --store s3://backups/trees"),
        ("Every session of this host:", "criuctl snapshot --all"),
    ],
    exits=[3, 4, 5, 7, 8, 9, 10, 11, 12, 13],
    see_also=["dump", "list"],
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete.target, help="Sessions' names or PIDs.")
@click.option("--all", "all_", is_flag=True, help="Every session that runs on this host.")
@pass_app
def snapshot(app: App, targets: tuple[str, ...], all_: bool) -> int:
    """Dumps several trees one after the other and leaves them running: criuctl dump --leave-running of each, one line
    each. A failure of one does not keep the others from being dumped.

    Ends with 0 if all were dumped, else with the exit code of the first failure. With -q only failures are told.
    """
    if bool(targets) == all_:
        raise click.UsageError("give either TARGETs or --all")
    from ...ops.snapshot import snapshot as take

    bodies = []
    codes = []
    with app.reporting() as reporter:
        for outcome in take(app.config, list(targets), all_, reporter=reporter):
            body = outcome.to_dict()
            bodies.append(body)
            if outcome.error is not None:
                codes.append(outcome.error.exit_code)
                if not app.json:
                    tell(f"criuctl: {printable(outcome.target)}: {printable(outcome.error.message)}")
                    if outcome.error.hint:
                        tell(f"  hint: {printable(outcome.error.hint)}")
            else:
                codes.append(DEGRADED if outcome.degraded else 0)
                if not app.json and not app.quiet:
                    write_result(outcome_line(body))
    if app.json:
        app.emit(bodies, lambda: "")
    elif not bodies and not app.quiet:
        tell("no session runs on this host")
    return worst(codes)
