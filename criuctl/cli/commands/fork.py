"""``criuctl fork``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .. import complete
from ..app import DEGRADED, App, pass_app
from ..descriptions import print_failure
from ..grouping import group_option, only_with_group, print_forked
from ..pages import page
from ..text import duration, plural, printable

if TYPE_CHECKING:
    from ...ops.fork import ForkResult


def _text(result: ForkResult) -> str:
    made = [one for one in result.forks if one.error is None]
    still = "" if result.frozen_ms is None else f", frozen {duration(result.frozen_ms)}"
    lines = [
        f"{printable(result.origin)}: {plural(len(made), 'copy', 'copies')} of checkpoint "
        f"{result.checkpoint[:12]} in {duration(result.elapsed_ms)}{still}"
    ]
    for one in made:
        folder = f", in {printable(one.workspace)}" if one.workspace else ""
        lines.append(f"  {printable(one.session)}: PID {one.pid}{folder}")
    return "\n".join(lines)


def _span(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    from ...host.retention import seconds

    return None if value is None else seconds(value)


@page(
    examples=[
        ("Three copies of a live session, work-1 to work-3:", "criuctl fork work -n 3"),
        ("Of a checkpoint, under other names:", "criuctl fork work@2 -n 20 --prefix try"),
        ("End all of them:", "criuctl kill --forks-of work"),
        ("Three copies of a whole group, team-1 to team-3:", "criuctl fork --group team -n 3"),
    ],
    exits=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    see_also=["restore", "snapshot", "kill"],
)
@click.argument(
    "ref",
    required=False,
    shell_complete=complete.checkpoint_ref,
    help=(
        "The name of a session that runs here; else a checkpoint: NAME (its newest one), NAME@N "
        "or the begin of an id."
    ),
)
@group_option(
    "Copy all members of a group, with the connections among them: as they are now, or, if none "
    "runs, of the group's newest checkpoint; or of its N-th (negative counts from the end).  "
    "[default: REF]",
    "GROUP[@N]",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 1000),
    metavar="COUNT",
    default=1,
    show_default=True,
    help="So many copies, or sets of copies.",
)
@click.option(
    "--prefix",
    metavar="NAME",
    help="Name them NAME-1, NAME-2 and so on, without names that are taken; of a group, the sets "
    "NAME-1 and so on, and their sessions NAME-SESSION-1 and so on.  [default: the own name of the "
    "session or group; SESSION-1 and so on]",
)
@click.option(
    "--as",
    "new_name",
    metavar="NAME",
    help="The name of the one copy.  [default: as --prefix says]",
)
@click.option(
    "--fork-workspace",
    is_flag=True,
    help="Give each copy a copy of the session's workspace (run --workspace), WORKSPACE.NAME next "
    "to it; what the copy has open there, and its working folders, are in that.  [default: all "
    "work in the same folder]",
)
@click.option(
    "--share-files",
    is_flag=True,
    help="Let each copy write to the files of its original, as far as they are as they were; not "
    "to a server's database.  [default: each copy gets its own of what it writes to]",
)
@click.option(
    "--ttl",
    metavar="SPAN",
    callback=_span,
    help="End each copy after so long: 30s, 10m, 1h.  [default: it ends by itself]",
)
@pass_app
def fork(
    app: App,
    ref: str | None,
    group: str | None,
    count: int,
    prefix: str | None,
    new_name: str | None,
    fork_workspace: bool,
    share_files: bool,
    ttl: float | None,
) -> int:
    """Make running copies of a session, each a session of its own with its own name. A live session
    goes on; it stands still as long as for a snapshot, which stays in the store.

    The memory is read once and kept in memory for all copies. A copy has only those pages for
    itself that it has touched; a process of criuctl serves the others for as long as it lives. If
    that process is killed, the copies that need it are ended.

    Each copy is like one of `criuctl restore --as`: it gets a network of its own where an address
    is taken, and its own copy of each file that it has open for writing, with the contents of the
    freeze. A database is refused, unless --fork-workspace separates it as a whole.

    Copies do not go on with the same random numbers of the kernel or of OpenSSL. What they still
    share, and how a program learns that it is a copy, is in `criuctl help forks`.

    With --group each set of copies is a group of its own: all of it runs, or none does. See
    `criuctl help linked-sessions`.

    If some copies fail, the others run, and the exit status is 11. If all fail, or the command is
    interrupted, nothing is left.
    """
    only_with_group(group, ref, "REF", **{"as": new_name, "fork-workspace": fork_workspace})
    if group is not None:
        with app.reporting(bars=False) as reporter:
            from ...ops.group_fork import GroupForkRequest, fork_group

            asked = GroupForkRequest(count=count, prefix=prefix, ttl=ttl, share_files=share_files)
            sets = fork_group(app.config, group, request=asked, reporter=reporter)
        return print_forked(app, sets)
    assert ref is not None
    with app.store_coming(), app.reporting(bars=False) as reporter:
        from ...ops.fork import ForkRequest
        from ...ops.fork import fork as make

        request = ForkRequest(
            count=count,
            prefix=prefix,
            new_name=new_name,
            ttl=ttl,
            share_files=share_files,
            workspace=fork_workspace,
        )
        result = make(app.config, ref, request=request, reporter=reporter)
    running = [one.session for one in result.forks if one.error is None]
    app.emit(result.to_dict(), lambda: _text(result), brief=lambda: "\n".join(running))
    if not app.json:
        for one in result.forks:
            if one.error is not None:
                print_failure(one.session, one.error)
    return DEGRADED if result.degraded else 0
