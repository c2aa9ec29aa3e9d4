"""``criuctl recover``: started at boot."""

from __future__ import annotations

import click

from ...host.journal.worst_exit_code import worst
from ..app import App, pass_app
from ..descriptions import print_each
from ..pages import page
from ..streams import tell
from ..text import printable
from .maintenance import AGAIN, RETRY, printer
from .snapshot import JOBS
from .unit import lasting


@page(
    examples=[
        ("Restore at each boot what maintenance has ended:", "criuctl recover --install"),
        (
            "Also sessions that were lost with the host, from their newest checkpoints:",
            "criuctl recover --install --all",
        ),
        ("Remove the boot unit:", "criuctl recover --remove"),
    ],
    exits=[3, 4, 5, 6, 7, 8, 9, 10, 11, 13],
    see_also=["maintenance", "restore", "schedule", "unit"],
)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help=(
        "Also restore every session that ran here when the host went down and did not end by "
        "itself, from its newest checkpoint."
    ),
)
@JOBS
@RETRY
@AGAIN
@click.option(
    "--install",
    "installs",
    is_flag=True,
    help="Restore nothing now; write the unit, or the crontab, that restores at each boot.",
)
@click.option("--remove", "removes", is_flag=True, help="Restore nothing now; remove that unit.")
@pass_app
def recover(
    app: App, all_: bool, jobs: int, retry_after: str, again: bool, installs: bool, removes: bool
) -> int:
    """Restore what criuctl maintenance has recorded, the lowest order first, as criuctl maintenance
    end does, with the same three tries; without a record, do nothing.

    With --all also the sessions whose state is lost: they ran here in an earlier boot, have a
    checkpoint, and did not end by themselves while a holder could see it. A tree that never had a
    terminal of criuctl's has no holder. A session that another host has taken over meanwhile is not
    restored (9).

    With --install it writes criuctl-recover.service into /etc/systemd/system and enables it, or
    /etc/cron.d/criuctl-recover where systemd does not run; --all, --store and --config are kept in
    it. Variables of this shell are not, except CRIUCTL_STATE_DIR.

    Exit with 0 if all came back, otherwise with the worst exit code of all, as criuctl snapshot.
    """
    if installs and removes:
        raise click.UsageError("--install and --remove contradict each other")
    if installs or removes:
        return _boot(app, all_, installs)
    from ...host.retention import patience
    from ...ops.recovery import recover as bring_back

    with app.reporting(bars=False) as reporter:
        items = bring_back(
            app.config,
            every=all_,
            jobs=jobs,
            pause=patience(retry_after),
            again=again,
            reporter=reporter,
        )
        codes = print_each(
            app, items, printer(app, "back"), lambda item: item.to_dict(), to_the_end=True
        )
    if not codes and not app.quiet and not app.json:
        tell("there is nothing to bring back")
    return worst(codes)


def _boot(app: App, all_: bool, installs: bool) -> int:
    from ...ops.scheduling import boot_unit

    if not installs:
        removed = [str(path) for path in boot_unit.remove()]
        app.emit(
            {"installed": False, "removed": removed},
            lambda: f"{', '.join(removed)} removed",
            brief=lambda: "",
        )
        return 0
    program, variables = lasting(app)
    options = ["--all"] if all_ else []
    written = [str(path) for path in boot_unit.install(program, options, variables)]
    app.emit(
        {"installed": True, "files": written},
        lambda: f"{printable(', '.join(written))} written",
        brief=lambda: "",
    )
    return 0
