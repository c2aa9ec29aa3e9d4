"""``criuctl unit install|list|remove``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ..app import App, pass_app
from ..pages import Entry, LazyGroup, page
from ..streams import tell
from ..tables import Column
from ..text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...ops.scheduling.units import Unit

_SELF = "criuctl.cli.commands.unit"
_STATE = "CRIUCTL_STATE_DIR"  # the one variable that is passed on

unit = LazyGroup(
    "unit",
    entries={
        "install": Entry(f"{_SELF}:install", "Install systemd units of criuctl's."),
        "list": Entry(f"{_SELF}:list_", "List the units, and which are installed and running."),
        "remove": Entry(f"{_SELF}:remove", "Stop units and remove them."),
    },
    summary="Install and remove criuctl's systemd units.",
    help="""\
    criuctl brings units for systemd: recover restores sessions at a boot, slurm serves the jobs of
    a node of Slurm, spot stores sessions before a cloud takes this machine away,
    supervise@SESSION keeps a session alive, ui serves the page for the browser, and ui-read-only
    serves it in a sandbox, to look at. They are written for the criuctl that is called here.

    What supervise, recover, slurm and ui start is restored by them, and would live in their sandbox
    if they had one; so they have none.""",
    examples=[
        (
            "Keep a session alive, from now on and after each boot:",
            "criuctl unit install supervise@web --now",
        ),
        ("What is installed?", "criuctl unit list"),
    ],
    exits=[3, 9, 13],
    see_also=["recover", "supervise", "ui", "schedule"],
)


def _units(names: Sequence[str]) -> list[Unit]:
    from ...ops.scheduling.units import NAMES, Unit

    return [Unit.parse(name) for name in names or NAMES]


def lasting(app: App) -> tuple[list[str], dict[str, str]]:
    """Return this criuctl as units start it, from any folder: the command with its global options,
    and the variables that are kept.
    """
    from ...ops.scheduling.timers import own_program
    from ...store import from_anywhere

    program = [
        *own_program(sys.argv[0], sys.executable),
        *(["--config", os.path.abspath(app.config_file)] if app.config_file else []),
        *(["--store", from_anywhere(app.store)] if app.store else []),
    ]
    state = os.environ.get(_STATE)
    return program, {_STATE: os.path.abspath(state)} if state else {}


@page(
    examples=[
        ("Restore at each boot what maintenance has ended:", "criuctl unit install recover --now"),
        ("The page, always:", "criuctl unit install ui --now\ncat /run/criuctl-ui/url"),
    ],
    exits=[2, 9, 13],
    see_also=["unit list", "recover", "supervise", "ui"],
)
@click.argument(
    "names",
    nargs=-1,
    metavar="[NAME]...",
    help="recover, slurm, spot, supervise, supervise@SESSION, ui, ui-read-only; without one, all "
    "of them.",
)
@click.option("--now", is_flag=True, help="Also enable them, for each boot, and start them.")
@click.option("--replace", is_flag=True, help="Replace a file that has other contents.")
@pass_app
def install(app: App, names: tuple[str, ...], now: bool, replace: bool) -> int:
    """Write units into /etc/systemd/system and have systemd read them. Without --now nothing is
    enabled or started: systemctl enable --now UNIT does it.

    --store and --config are kept in the units. Of the variables of this shell, only
    CRIUCTL_STATE_DIR is: put the credentials of a store into root's ~/.aws, other settings into the
    configuration. Options of the commands are read from /etc/default: RECOVER_OPTIONS in
    criuctl-recover, SLURM_OPTIONS in criuctl-slurm, SPOT_OPTIONS in criuctl-spot, SUPERVISE_OPTIONS
    in criuctl-supervise and
    criuctl-supervise-SESSION, UI_OPTIONS in criuctl-ui.

    A unit that is there already stays as it is; if it differs from what would be written, nothing
    is written (9), unless --replace is given.
    """
    from ...ops.scheduling import units

    wanted = _units(names)
    program, variables = lasting(app)
    written = units.install(wanted, program, variables, replace=replace, now=now)
    paths = [str(path) for path in written]
    started = [one.started for one in wanted] if now else []
    if not app.json and not app.quiet and not now:
        for one in wanted:
            name = one.started if one.instance or not one.template else f"{one.file} of a session"
            tell(f"{printable(name)} is not started: systemctl enable --now does it")
    app.emit(
        {"written": paths, "started": started},
        lambda: (
            "\n".join(
                [*(f"{printable(p)} written" for p in paths), *(f"{s} started" for s in started)]
            )
            or "all of them are there already"
        ),
        brief=lambda: "",
    )
    return 0


@page(
    examples=[("All of them:", "criuctl unit list")],
    exits=[13],
    see_also=["unit install", "schedule list"],
)
@pass_app
def list_(app: App) -> int:
    """List criuctl's units: whether each is installed, whether its file is what criuctl unit
    install would write now, and which are enabled and running.

    In JSON, file and current are null where it is not installed, and enabled and active are lists
    of names, because supervise has one for each session.
    """
    from ...ops.scheduling.units import listed

    found = listed(*lasting(app))
    rows = [
        [
            one["name"],
            "-" if one["file"] is None else "installed" if one["current"] else "differs",
            printable(", ".join(one["enabled"]) or "-"),
            printable(", ".join(one["active"]) or "-"),
        ]
        for one in found
    ]
    columns = [Column("name"), Column("file"), Column("enabled"), Column("running")]
    app.emit_table(found, columns, rows, empty="there are no units")
    return 0


@page(
    examples=[
        ("The page is not wanted any more:", "criuctl unit remove ui"),
        ("Let this session go:", "criuctl unit remove supervise@web"),
    ],
    exits=[3, 13],
    see_also=["unit install", "unit list"],
)
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="NAME...",
    help="As for install. supervise@SESSION stops and disables that one alone.",
)
@pass_app
def remove(app: App, names: tuple[str, ...]) -> int:
    """Stop and disable units, and remove their files from /etc/systemd/system. Sessions run on.
    Files in /etc/default, drop-ins, and the units of criuctl's Debian package stay.
    """
    from ...ops.scheduling import units

    removed = [str(path) for path in units.remove(_units(names))]
    app.emit(
        {"removed": removed},
        lambda: "\n".join(f"{printable(path)} removed" for path in removed) or "stopped, disabled",
        brief=lambda: "",
    )
    return 0
