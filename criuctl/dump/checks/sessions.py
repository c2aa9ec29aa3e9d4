"""Check sessions and process groups: leaders outside the tree, and sessions that CRIU cannot build
again.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import NoSuchProcess
from ...host.target import ancestors
from ...proc.procfs import read_lines
from ...proc.tree import Process, ProcessIdentity, members
from ...report import Finding
from .scene import Scene


def check_sessions(scene: Scene) -> Iterator[Finding]:
    """Check the sessions and process groups of the tree."""
    yield from _outside_leaders(scene)
    yield from _lost_sessions(scene)


def _outside_leaders(scene: Scene) -> Iterator[Finding]:
    """Report sessions and process groups whose leader is outside the tree."""
    root = scene.root
    if root.sid not in scene.by_pid or root.pgid not in scene.by_pid:
        leader = (
            f"its session is led by {scene.command_of(root.sid)}"
            if root.sid not in scene.by_pid
            else "its process group is led"
        )
        yield Finding(
            "info",
            "session-outside",
            f"{root} does not lead its session: {leader} from outside the tree; a restore gives "
            "it a session of its own",
            "Start programs that are to be dumped with `setsid`, or dump the leader.",
            pid=root.pid,
        )
    behind = {pid for pids in members(scene.by_pid.keys()).values() for pid in pids}.difference(
        scene.by_pid
    )
    for pid in sorted(behind):
        if not _left_behind(pid, root):
            continue
        yield Finding(
            "warning",
            "left-behind",
            f"{scene.command_of(pid)} is in a session or process group of the tree, but not "
            "below its root: it is not dumped; while it lives, the tree can be restored only in "
            "a PID namespace of its own",
            "End it, or dump a root that has it below (a session of `criuctl run` keeps its "
            "orphans).",
            pid=pid,
        )
    for process in scene.tree:
        if (
            scene.at_home(process.pid, "pid")
            and len(process.ns_pids) > 1
            and _inner_session(process.pid) == 0
        ):
            yield Finding(
                "error",
                "session-outside-pid-namespace",
                f"the session of {process} is led from outside its PID namespace; it has no "
                "number there that CRIU could save",
                "Start the program in the PID namespace with a session of its own: `unshare "
                "--pid --fork setsid ...`.",
                pid=process.pid,
            )


def _lost_sessions(scene: Scene) -> Iterator[Finding]:
    """Report sessions that CRIU dumps and cannot build again (criu/pstree.c, prepare_pstree_ids).

    A process in another session than its parent must have been forked before its parent, or an
    ancestor of that, left the session.  Only for children of the root does CRIU make helpers: in
    the place of a leader that has ended, or below one that lives.
    """
    root = scene.root
    parents = {process.pid: process.ppid for process in scene.tree[1:]}
    # A session whose leader is outside becomes the root's at a restore.
    sids = {
        process.pid: root.pid if process.sid == root.sid else process.sid for process in scene.tree
    }
    for process in scene.tree[1:]:
        sid = sids[process.pid]
        if process.ppid == root.pid and sid not in (root.pid, process.pid):
            helper = -sid if sid in scene.by_pid else sid
            parents[process.pid], parents[helper] = helper, sid if helper < 0 else root.pid
            sids[helper] = sid
    born: dict[int, int] = {}
    for process in scene.tree[1:]:
        above, sid = parents[process.pid], sids[process.pid]
        if sid in (process.pid, sids.get(above)):
            continue
        while above in sids and above != sid and born.setdefault(above, sid) == sid:
            above = parents.get(above, 0)
        if above == sid:
            continue
        parent = scene.command_of(process.ppid)
        yield Finding(
            "error",
            "session-lost",
            f"{process} is in session {process.sid}, but was adopted by {parent}, which never was "
            "in it: CRIU would dump that, and can restore it only for children of the root",
            f"Dump the tree below {parent} by itself, with {parent} as the root, or end "
            f"{process.pid} first.",
            pid=process.pid,
        )


def _left_behind(pid: int, root: Process) -> bool:
    """Return whether it lives, and not below the root: it may have been forked since the tree was
    read.
    """
    try:
        return ProcessIdentity.of(pid).alive() and root.pid not in ancestors(pid)
    except NoSuchProcess:
        return False


def _inner_session(pid: int) -> int | None:
    try:
        for line in read_lines(pid, "status"):
            if line.startswith("NSsid:"):
                return int(line.split()[-1])
    except NoSuchProcess:
        pass
    return None
