"""``criuctl recover``: started at boot."""

from __future__ import annotations

import re

import click

from ...host.journal.worst_exit_code import worst
from ..app import App, pass_app
from ..descriptions import print_each
from ..pages import page
from ..streams import tell
from ..text import printable
from .dump import parse_labels
from .maintenance import AGAIN, RETRY, printer
from .snapshot import JOBS
from .unit import lasting

_PLAIN = re.compile(r"[\w.,:/@+=-]+", re.ASCII)


@page(
    examples=[
        ("Restore at each boot what maintenance has ended:", "criuctl recover --install"),
        (
            "Also sessions that were lost with the host, from their newest checkpoints:",
            "criuctl recover --install --all",
        ),
        (
            "On a machine that takes the place of another one:",
            "criuctl recover --from-store --label pool=web",
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
@click.option(
    "--from-store",
    is_flag=True,
    help="Also restore the sessions of the store that live nowhere and have all labels of --label: "
    "another host has dumped and ended them.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="K=V",
    callback=parse_labels,
    help="A label, of the session or of its newest checkpoint, for --from-store.",
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
    app: App,
    all_: bool,
    from_store: bool,
    labels: dict[str, str],
    jobs: int,
    retry_after: str,
    again: bool,
    installs: bool,
    removes: bool,
) -> int:
    """Restore what criuctl maintenance has recorded, the lowest order first, as criuctl maintenance
    end does, with the same three tries; without a record, do nothing.

    With --all also the sessions whose state is lost: they ran here in an earlier boot, have a
    checkpoint, and did not end by themselves while a holder could see it. A tree that never had a
    terminal of criuctl's has no holder. A session that another host has taken over meanwhile is not
    restored (9).

    With --from-store also sessions that this host may not know: a machine that was taken away has
    dumped them (see criuctl maintenance watch). It needs a --label, so that each machine, or group
    of machines, takes what is meant for it. Several may do so at the same time: the lease in the
    store decides which one gets a session. Left alone are sessions that a host holds, also one that
    died without a dump (criuctl restore --take-over), and those that were killed or ended.

    With --install it writes criuctl-recover.service into /etc/systemd/system and enables it, or
    /etc/cron.d/criuctl-recover where systemd does not run; --all, --from-store with its labels,
    --store and --config are kept in it. Variables of this shell are not, except CRIUCTL_STATE_DIR.

    Exit with 0 if all came back, otherwise with the worst exit code of all, as criuctl snapshot.
    """
    if installs and removes:
        raise click.UsageError("--install and --remove contradict each other")
    if from_store != bool(labels):
        raise click.UsageError("--from-store and --label need each other")
    if installs or removes:
        return _boot(app, all_, labels, installs)
    from ...host.retention import patience
    from ...ops.recovery import recover as bring_back

    with app.reporting(bars=False) as reporter:
        items = bring_back(
            app.config,
            every=all_,
            jobs=jobs,
            pause=patience(retry_after),
            again=again,
            from_store=labels,
            reporter=reporter,
        )
        codes = print_each(
            app, items, printer(app, "back"), lambda item: item.to_dict(), to_the_end=True
        )
    if not codes and not app.quiet and not app.json:
        tell("there is nothing to bring back")
    return worst(codes)


def _boot(app: App, all_: bool, labels: dict[str, str], installs: bool) -> int:
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
    options += ["--from-store"] if labels else []
    for label in (f"{key}={value}" for key, value in labels.items()):
        if not _PLAIN.fullmatch(label):
            raise click.UsageError(
                f"the label {label!r} has characters that cannot stand in the options of a unit"
            )
        options += ["--label", label]
    written = [str(path) for path in boot_unit.install(program, options, variables)]
    app.emit(
        {"installed": True, "files": written},
        lambda: f"{printable(', '.join(written))} written",
        brief=lambda: "",
    )
    return 0
