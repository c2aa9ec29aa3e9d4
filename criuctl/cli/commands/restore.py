"""``criuctl restore``."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import click

from ...errors import NoSuchProcess, SessionGone
from ...quoting import quoted
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..grouping import group_option, only_with_group, print_restored
from ..outcomes import connection_lines
from ..pages import Seconds, page
from ..text import duration, facts, plural, printable, span
from .check import EXIT_REFUSED, findings_lines
from .dump import POLICIES

if TYPE_CHECKING:
    from ...files.judgement import Policy


_FILES = 20  # that are named


def _outcome(result: Mapping[str, Any]) -> str:
    inner = result.get("inner_pid")
    pid = f"PID {result['pid']}"
    if inner is not None and inner != result["pid"]:
        pid += f" (PID {inner} to itself, in a PID namespace of its own)"
    lines = [
        f"{printable(result['session'])}: restored as {pid}, incarnation {result['incarnation']},"
        f" in {duration(result['elapsed_ms'])}"
        f"{', memory follows on demand' if result.get('lazy') else ''}"
    ]
    lines.append(f"  from {_source(result)}")
    if result["state"] == "paused":
        lines.append(
            f"  it is paused, as it was at the dump: criuctl resume {quoted(result['session'])}"
        )
    if newer := result["newer"]:
        lines.append(
            f"  a newer one is {newer['number']} ({newer['id'][:12]}) in "
            f"{printable(newer['store'])}"
        )
    lines += [f"  {line}" for line in connection_lines(result["connections"], "outcome")]
    lines += [f"  {_file(f)}" for f in result["files"][:_FILES]]
    if (more := len(result["files"]) - _FILES) > 0:
        lines.append(f"  and {plural(more, 'more file')} (see --json)")
    return "\n".join(lines)


def _source(result: Mapping[str, Any]) -> str:
    """Return a line about the checkpoint: which one, how old, and where."""
    old = f", {span(result['age_s'])} old" if result["age_s"] is not None else ""
    return (
        f"checkpoint {result['number']} ({result['checkpoint'][:12]}{old}) in "
        f"{printable(result['store'])}"
    )


def _file(entry: Mapping[str, Any]) -> str:
    if entry.get("new"):
        return (
            f"{printable(entry['path'])} is new since the checkpoint, and is "
            f"{printable(entry['newer_copy'])} now"
        )
    if "own_copy" in entry:
        return (
            f"{printable(entry['path'])} was left to its other users, the tree's own copy is "
            f"{printable(entry['own_copy'])}"
        )
    return (
        f"{printable(entry['path'])} was put back, the newer copy is "
        f"{printable(entry['newer_copy'])}"
    )


def _stay(pid: int) -> None:
    """Wait until the process has ended; a signal interrupts the wait and leaves the process
    alone.
    """
    from ...proc.tree import ProcessIdentity

    try:
        pidfd = ProcessIdentity.of(pid).open_pidfd()
    except NoSuchProcess:
        return  # ended already
    with os.fdopen(pidfd, "rb", buffering=0):
        select.select([pidfd], [], [])


def _stay_with(app: App, name: str, pid: int) -> int | None:
    """Stay until the session has ended, attached if both have a terminal; return its exit code,
    None if it is unknown.
    """
    from ...ops.sessions import connect

    try:
        session = connect(app.config, name)
    except SessionGone:
        _stay(pid)
        return None
    if os.isatty(0) and os.isatty(1) and not app.json:
        from ..attaching import attach_to

        return attach_to(
            app, name, lambda resume: connect(app.config, name, resume=resume), session=session
        )
    with session:
        code: int | None = session.wait_exit()["exit_code"]
        return code


def _plan(plan: Mapping[str, Any]) -> str:
    """Return a restore's plan as lines: the actions, then the obstacles."""
    rows = [
        (
            "PIDs",
            {"same": "the old ones", "private": "a PID namespace of its own"}.get(
                plan["pids"], plan["pids"]
            ),
        )
    ]
    rows.append(("network", printable(plan["net"])))
    rows += [("connection", line) for line in connection_lines(plan["connections"], "policy")]
    rows += [
        ("file", f"{printable(f['path'])}: {printable(f['verdict'])}; {printable(f['why'])}")
        for f in plan["files"]
    ]
    lines = [facts(rows), *findings_lines(plan["findings"])]
    return "\n".join([*lines, "can be restored" if plan["ok"] else "cannot be restored here now"])


@page(
    examples=[
        ("Bring the newest checkpoint of web back:", "criuctl restore web"),
        ("Show the plan first:", "criuctl restore web@3 --dry-run"),
        ("Memory and workspace as they were then:", "criuctl restore work@3 --rewind"),
        ("A copy next to the live original:", "criuctl restore web --as web-copy"),
        ("Under a supervisor that wants to see it end:", "criuctl restore web --attach"),
    ],
    exits=[3, 4, 6, 7, 8, 9, 10, 11, 12, 13],
    see_also=["dump", "list", "show"],
)
@click.argument(
    "ref",
    required=False,
    shell_complete=complete.checkpoint_ref,
    help=(
        "NAME (its newest checkpoint), NAME@N (its N-th; negative counts from the end), or the "
        "begin of an id."
    ),
)
@group_option(
    "Restore all members of a group checkpoint: the group's newest, or its N-th (negative counts "
    "from the end).  [default: REF]",
    "GROUP[@N]",
)
@click.option(
    "--detach/--attach",
    default=True,
    show_default=True,
    help="Leave at once, or stay until the restored tree has ended: attached to its terminal if "
    "criuctl holds that, and then with its exit status. Leaving, by ^C or the detach key, never "
    "ends the tree.",
)
@click.option(
    "--older",
    is_flag=True,
    help="With a NAME alone: restore the newest checkpoint found, although this host knows of a "
    "newer one, which is gone or in another store.  [default: refuse, and name both]",
)
@click.option(
    "--as",
    "new_name",
    metavar="NAME",
    help="Restore a copy, as a session of this new name.  [default: its own name]",
)
@click.option(
    "--lazy",
    is_flag=True,
    help="Run at once; memory is fetched as it is touched.  [default: memory first]",
)
@click.option(
    "--pids",
    type=click.Choice(["auto", "same", "private"]),
    default="auto",
    show_default=True,
    help=(
        "same: the old PIDs or none; private: a PID namespace of its own; auto: the old PIDs if "
        "they are free, else private."
    ),
)
@click.option(
    "--connections",
    type=POLICIES,
    help="What happens to connections to outside the tree.  [default: the configuration's rules, "
    "else as recorded in the checkpoint]",
)
@click.option(
    "--connections-deadline",
    type=Seconds(min=0, max=86400),
    metavar="SECONDS",
    help="Time for connections to be back; what is not is hung up.  [default: the rules', else 30]",
)
@click.option(
    "--files",
    type=click.Choice(["refuse", "restore", "keep"]),
    help="When a file that the tree has open for writing is not as it was: refuse to restore; "
    "restore: put it back as it was and keep the newer copy next to it; keep: leave it as it is "
    "now.  Of a script or mapped data that the tree only reads, restore gives the tree the old "
    "contents and leaves the file.  [default: the configuration's, else restore]",
)
@click.option(
    "--share-files",
    is_flag=True,
    help="With --as: let the copy write to the files of its original, as far as they are as they "
    "were; not to a server's database.  [default: the copy gets its own of what it writes to]",
)
@click.option(
    "--rewind",
    is_flag=True,
    help="Also put the session's workspace back as it was, from a checkpoint that was taken with "
    "snapshot --with-workspace. What is newer is moved to a folder next to the workspace.  "
    "[default: leave the workspace as it is]",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help=(
        "Check everything and print the plan; restore nothing. Ends with 4 if a restore would be "
        "refused."
    ),
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Restore the session here although another host holds its lease, or it has left for one "
    "and no lease can tell. Only when it has ended there, or that host is lost for good: else the "
    "session runs twice.",
)
@click.option(
    "--force",
    is_flag=True,
    help=(
        "Restore a checkpoint that is stale: what it requires (dump --require) is not so any "
        "more. It is reported as warnings."
    ),
)
@pass_app
def restore(
    app: App,
    ref: str | None,
    group: str | None,
    detach: bool,
    older: bool,
    new_name: str | None,
    lazy: bool,
    pids: str,
    connections: str | None,
    connections_deadline: float | None,
    files: str | None,
    share_files: bool,
    rewind: bool,
    dry_run: bool,
    take_over: bool,
    force: bool,
) -> int:
    """Restore the process tree of a checkpoint on this host: memory, descriptors and their offsets,
    pipes and their contents, sockets, process groups, locks. Every byte is checked before it is
    used.

    Before anything is started the checkpoint and this host are compared: kernel, CPU, files, users,
    ports, PIDs. Changed files are never overwritten silently: a newer copy is kept under another
    name and reported. A copy (--as) gets its own of each file that it has open for writing, next to
    that of its original, with the contents of the freeze; a database, which is more than its open
    files, is refused (`criuctl fork --fork-workspace` separates it). A restore that fails leaves
    nothing behind, no process and no file.

    A NAME alone means the last state of that session. So it is refused (9) where the newest
    checkpoint found is of another session than the one that this host knows by the name, or is
    older than the last that this host stored or restored: one was removed, or is in another store.
    --older continues, and so does an explicit NAME@N or id; the result shows which checkpoint it
    was, how old it is, from which store, and whether there is a newer one.

    With --rewind memory and files are of the same moment. Changed files of the workspace are put
    back, with owner and mode; their newer copies, and files that are new since, are moved to
    WORKSPACE.newer-ID-TIME, where they keep their paths. Nothing is deleted. It is refused (4)
    while a process has one of these files open for writing, while another session works in the
    workspace, and where a changed file belongs to another user now. A copy (--as) shares the
    workspace of its original, so --as excludes it.

    With --group all members come back, with the connections among them as they were, and run again
    together; or none does. See `criuctl help linked-sessions`.

    The tree runs on by itself when criuctl ends. The result shows the outcome of each connection to
    the outside.
    """
    if rewind and new_name is not None:
        raise click.UsageError(
            "--rewind and --as exclude each other: a copy shares the workspace of its original"
        )
    if share_files and new_name is None:
        raise click.UsageError("--share-files is for a copy (--as NAME)")
    only_with_group(
        group,
        ref,
        "REF",
        attach=not detach,
        older=older,
        rewind=rewind,
        **{"as": new_name, "lazy": lazy, "dry-run": dry_run},
    )
    with app.store_coming() if group is None else nullcontext(), app.reporting() as reporter:
        from ...restore.plan import RestorePlan
        from ...restore.request import RestoreRequest
        from ...restore.story import restore as restore_tree

        request = RestoreRequest(
            new_name=new_name,
            pids=pids,
            connections=connections,
            connections_deadline=connections_deadline,
            files=cast("Policy | None", files),
            share_files=share_files,
            rewind=rewind,
            lazy=lazy,
            dry_run=dry_run,
            take_over=take_over,
            force=force,
            older=older,
        )
        if group is not None:
            from ...ops.group_restore import restore_group

            restored = restore_group(app.config, group, request=request, reporter=reporter)
            return print_restored(app, restored, _outcome)
        assert ref is not None
        result = restore_tree(app.config, ref, request=request, reporter=reporter)
    body = result.to_dict()
    if isinstance(result, RestorePlan):
        app.emit(body, lambda: _plan(body), brief=lambda: "")
        return 0 if body["ok"] else EXIT_REFUSED
    app.emit(body, lambda: _outcome(body), brief=lambda: str(body["pid"]))
    if not detach:
        code = _stay_with(app, body["session"], body["pid"])
        if code is not None:
            return code
    return DEGRADED if result.degraded else 0
