"""``criuctl migrate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from .. import complete
from ..app import DEGRADED, App, pass_app
from ..outcomes import connection_lines
from ..pages import page
from ..streams import unheard
from ..text import duration, printable, size
from .check import EXIT_REFUSED, findings_lines
from .dump import MAX_FREEZE, POLICIES

if TYPE_CHECKING:
    from ...ops.moving.delivery import MoveOptions

EXIT_IN_DOUBT = 12


def _outcome(result: Mapping[str, Any]) -> str:
    amounts = result["bytes"]
    lines = [
        f"{printable(result['session'])}: runs on {printable(result['host'])} as PID "
        f"{result['pid']}, incarnation {result['incarnation']}; frozen "
        f"{duration(result['frozen_ms'])}, total {duration(result['total_ms'])}, "
        f"{size(amounts['memory'])} memory, {size(amounts['stored'])} sent"
    ]
    lines += [f"  {line}" for line in connection_lines(result["connections"], "outcome")]
    lines += [
        f"  {printable(f['path'])} was put there, the newer copy is {printable(f['newer_copy'])}"
        for f in result["files"]
    ]
    return "\n".join(lines)


def _resolved(answer: Mapping[str, Any]) -> str:
    name, host = printable(answer["session"]), printable(answer["host"])
    outcome = {
        "stays": f"{name} goes on here; {host} keeps nothing of it",
        "moved": f"{name} runs on {host} now",
        "in-doubt": f"{name} was ended here, and {host} still cannot be reached",
        "busy": f"another command works on {name} here, and {host} was not contacted",
    }[answer["outcome"]]
    return f"{outcome}: {printable(answer['error'])}" if answer["error"] else outcome


@page(
    examples=[
        ("Move a session to another host:", "criuctl migrate work ssh://root@gamma"),
        ("See first whether it could go there:", "criuctl migrate work ssh://root@gamma --dry-run"),
        (
            "With the folder that it works in:",
            "criuctl migrate build ssh://root@gamma --with-files /srv/build",
        ),
        (
            "To a host with other versions of Python and libc:",
            "criuctl migrate work ssh://root@gamma --carry-binaries",
        ),
        ("After a link broke at the worst moment:", "criuctl migrate --resolve work"),
    ],
    exits=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    see_also=["dump", "restore", "attach", "connections"],
)
@click.argument(
    "target",
    required=False,
    shell_complete=complete.target,
    help="A PID, a session's name, unit:NAME or cgroup:PATH.",
)
@click.argument(
    "host",
    required=False,
    help="ssh://[USER@]HOST[:PORT], or a name from `hosts` in the configuration.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the session.  [default: its own, else made from the command and the PID]",
)
@click.option(
    "--with-files",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help=(
        "Take this file or folder along; may be given several times. Files that the tree has open "
        "for writing travel anyway."
    ),
)
@click.option(
    "--carry-binaries",
    is_flag=True,
    help="Take programs and libraries along, all that the tree has mapped; where that host lacks "
    "them, or has others, the tree alone sees its own.",
)
@click.option(
    "--files",
    type=click.Choice(["refuse", "restore", "keep"]),
    help="When a file that travels is there already and differs: refuse; restore: put it there "
    "and keep the newer copy next to it; keep: leave the one that is there.  [default: the "
    "configuration's there, else restore]",
)
@click.option(
    "--connections",
    type=POLICIES,
    help="What happens to connections to outside the tree, as for dump and restore.  [default: the "
    "configuration's rules, else hangup]",
)
@click.option(
    "--keep-address",
    metavar="IP",
    multiple=True,
    help="Move this address along, with its established connections; may be given several times. "
    "IP@DEVICE names the interface there.",
)
@click.option(
    "--pids",
    type=click.Choice(["auto", "same", "private"]),
    help="As for `criuctl restore`.  [default: auto]",
)
@click.option(
    "--pre-copy/--no-pre-copy",
    default=True,
    show_default=True,
    help=(
        "Send memory ahead while the tree runs, so that only what changed is sent while it is "
        "frozen."
    ),
)
@click.option(
    "--lazy/--no-lazy",
    default=None,
    help="Let it run there at once; memory is fetched, from that host's disk, as it is touched. "
    "If criuctl there is killed before all of it is, the session begins there again with what was "
    "sent.  [default: for trees of 256 MiB and more]",
)
@MAX_FREEZE
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only examine the other host and report all obstacles.",
)
@click.option(
    "--resolve",
    is_flag=True,
    help="Finish interrupted migrations: of TARGET, or of all sessions.",
)
@pass_app
def migrate(
    app: App,
    target: str | None,
    host: str | None,
    name: str | None,
    with_files: tuple[str, ...],
    carry_binaries: bool,
    files: str | None,
    connections: str | None,
    keep_address: tuple[str, ...],
    pids: str | None,
    pre_copy: bool,
    lazy: bool | None,
    max_freeze: float | None,
    dry_run: bool,
    resolve: bool,
) -> int:
    """Move a running tree to another host: its processes, memory, terminal, the files that it has
    open for writing, and its connections by policy. criuctl must be installed there; it is started
    over ssh, and nothing listens on a port.

    The other host is examined first, and every obstacle is reported at once. The tree is frozen,
    restored there and held. Only when all is in place there, it is ended here, and then runs there.
    If anything fails before that, the tree continues here, and nothing is left there. It never runs
    on both hosts.

    When the link breaks exactly between the two, the session is in doubt: ended here, complete
    there, and without the word to run. Then the exit code is 12, the word is sent again for a
    minute, and --resolve finishes the move.
    """
    from ...ops.moving.delivery import MoveOptions

    if resolve:
        if host is not None:
            raise click.UsageError("--resolve takes no HOST: where the session went is known")
        if dry_run:
            raise click.UsageError("--resolve and --dry-run contradict each other")
        return _resolve(app, target)
    if target is None or host is None:
        raise click.UsageError("TARGET and HOST are needed")
    options = MoveOptions(
        name=name,
        pids=pids,
        connections=connections,
        files=files,
        with_files=with_files,
        carry_binaries=carry_binaries,
        keep_addresses=keep_address,
        precopy=pre_copy,
        lazy=lazy,
        max_freeze=max_freeze,
    )
    return _examine(app, target, host, options) if dry_run else _migrate(app, target, host, options)


def _migrate(app: App, target: str, host: str, options: MoveOptions) -> int:
    from ...ops.migrate import migrate as move

    with app.reporting() as reporter:
        result = move(app.config, target, host, options, reporter=reporter)
    body = result.to_dict()
    lost = unheard(lambda: app.emit(body, lambda: _outcome(body), brief=lambda: str(body["pid"])))
    return DEGRADED if result.degraded or lost else 0


def _examine(app: App, target: str, host: str, options: MoveOptions) -> int:
    from ...ops.migrate import examine

    with app.reporting() as reporter:
        findings = [
            finding.to_dict()
            for finding in examine(app.config, target, host, options, reporter=reporter)
        ]
    ok = not any(f["level"] == "error" for f in findings)
    lines = findings_lines(findings)
    lines.append(
        f"{printable(host)} can take it" if ok else f"{printable(host)} cannot take it as it is"
    )
    app.emit({"ok": ok, "findings": findings}, lambda: "\n".join(lines), brief=lambda: "")
    return 0 if ok else EXIT_REFUSED


def _resolve(app: App, session: str | None) -> int:
    from ...ops.migrate_resolve import resolve

    with app.reporting() as reporter:
        answers = resolve(app.config, session, reporter=reporter)
    app.emit(
        answers,
        lambda: "\n".join(map(_resolved, answers)) or "no migration was interrupted here",
        brief=lambda: "",
    )
    return EXIT_IN_DOUBT if any(answer["error"] for answer in answers) else 0
