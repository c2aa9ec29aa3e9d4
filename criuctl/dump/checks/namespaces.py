"""Check namespaces and control groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from ...errors import NoSuchProcess
from ...host.target import ancestors
from ...proc.namespaces import for_children
from ...proc.procfs import all_pids, read_lines
from ...proc.sockets import Peer, TreeSocket
from ...proc.tree import Process
from ...quoting import quoted
from ...report import Finding
from ...session.sessions import all_states
from .connections import borrowed
from .scene import Scene

_WORDS = {
    "pid": "PID",
    "ipc": "IPC",
    "uts": "UTS",
    "user": "user",
    "cgroup": "cgroup",
    "time": "time",
    "net": "net",
    "mnt": "mount",
}

_NESTED = ("mnt", "net")  # a tree may have several of these kinds
_CHROOTED = (
    "{} is in another mount namespace than the root {}, and every process of the tree in that "
    "namespace is in a chroot, so a restore could not check which files they get there"
)
_KEEP_NETWORK = "Keep it, under a name by which a restore finds it: `ip netns attach NAME {}`."
_IFNAMSIZ = 16


def check_namespaces(scene: Scene) -> Iterator[Finding]:
    """Report namespaces that processes of the tree have and its root does not.

    CRIU does dump nested mount and net namespaces, but restores them only with a root whose own
    namespace of that kind is in the images, and not one that CRIU enters.  A restore checks the
    files of processes in a nested mount namespace as it checks those of the root's own
    (`criuctl.restore.mount_views`); for this it needs a process there that is not in a chroot.
    """
    of_root = scene.namespaces.get(scene.root.pid, {})
    if scene.foreign("user"):
        # CRIU saves it; but inside a new one it may neither mount the /proc of criuctl's PID
        # namespace nor copy criuctl's mounts.
        yield Finding(
            "error",
            "user-namespace",
            f"{scene.root} lives in a user namespace of its own, from which CRIU could not bring "
            "it back",
            "Start the program without one: as root, `unshare` and `bwrap` need none; a "
            "container without user namespace.",
            pid=scene.root.pid,
        )
    nested = frozenset(kind for kind in _NESTED if scene.saved(kind))
    # the first process of each tree inside such a namespace, and all processes below it
    inside: set[int] = set()
    for process in scene.tree:
        own = scene.namespaces.get(process.pid)
        if process.ppid in inside:
            inside.add(process.pid)  # a process of such a tree, which is reported once
        elif own is not None and (
            others := sorted(kind for kind in own.keys() - nested if own[kind] != of_root.get(kind))
        ):
            inside.add(process.pid)
            words = [_WORDS[kind] for kind in others]
            yield Finding(
                "error",
                "nested-namespace",
                f"{process} is in {_listed(words)} than the root {scene.root}; a tree can have "
                "only one of a kind",
                "Dump the tree that is inside by itself: name its first process, PID "
                f"{process.pid}.",
                pid=process.pid,
            )
        elif (
            own is not None
            and own["mnt"] != of_root.get("mnt")
            and not scene.knows_mounts_of(process.pid)
        ):
            inside.add(process.pid)
            hint = (
                "Have a process of the tree stay in that namespace outside the chroot, or use "
                "pivot_root."
            )
            yield Finding(
                "error",
                "nested-namespace",
                _CHROOTED.format(process, scene.root),
                hint,
                pid=process.pid,
            )
    for process in scene.tree:
        yield from _time_of_children(scene, process)


def _listed(words: list[str]) -> str:
    """Return ``another PID namespace``, or ``other IPC, PID and mount namespaces``."""
    if len(words) == 1:
        return f"another {words[0]} namespace"
    return f"other {', '.join(words[:-1])} and {words[-1]} namespaces"


def _time_of_children(scene: Scene, process: Process) -> Iterator[Finding]:
    """Report a process that has called unshare(CLONE_NEWTIME): it stays outside, and only its
    children are born inside.
    """
    own = scene.namespaces.get(process.pid, {}).get("time")
    if own is None:
        return
    try:
        later = for_children(process.pid, "time")
    except NoSuchProcess:
        return
    if later is None or later == own:
        return
    born = [
        p
        for p in scene.tree
        if p.ppid == process.pid and scene.namespaces.get(p.pid, {}).get("time") == later
    ]
    hint = (
        "Start the program that is to be dumped as its child (`unshare --time --fork PROGRAM`), "
        "and dump that one."
    )
    if born:
        hint = f"Dump its child, which is inside: {' or '.join(f'PID {p}' for p in born)}."
    yield Finding(
        "error",
        "nested-namespace",
        f"the children of {process} are born in another time namespace; CRIU cannot save that",
        hint,
        pid=process.pid,
    )


def at_top(scene: Scene) -> int:
    """Return a process that sees the root's mount namespace as CRIU will: one that is not in a
    chroot.
    """
    wanted = scene.namespaces[scene.root.pid]["mnt"]
    for pid in (scene.root.pid, *all_pids()):
        try:
            if (
                os.readlink(f"/proc/{pid}/root") == "/"
                and os.stat(f"/proc/{pid}/ns/mnt").st_ino == wanted
            ):
                return pid
        except OSError:
            continue
    return scene.root.pid


def check_proc_mount(scene: Scene) -> Iterator[Finding]:
    """Check that CRIU, inside the tree's PID and mount namespaces, finds the /proc of those."""
    if not scene.entered("pid"):
        return
    root = scene.root
    try:
        shown = os.stat(f"/proc/{at_top(scene)}/root/proc/1/ns/pid").st_ino
    except OSError:
        shown = 0
    if shown != scene.namespaces[root.pid].get("pid"):
        yield Finding(
            "error",
            "proc-mount",
            f"the /proc that {root} sees is not that of its own PID namespace; CRIU cannot work "
            "there",
            "Start the program with `unshare --pid --fork --mount-proc`, or: nsenter --target "
            f"{root.pid} --pid --mount mount -t proc proc /proc (if the mount namespace is its "
            "own too).",
            pid=root.pid,
        )


def check_network(scene: Scene) -> Iterator[Finding]:
    """Warn of a net namespace that ends with the tree if it holds what a restore does not make
    again.
    """
    own = scene.own_network
    if own is None or own.saved or not (lost := own.network.words()):
        return
    yield Finding(
        "warning",
        "own-network",
        f"the net namespace of {scene.root} ends with it, and a restore makes one that has only a "
        f"loopback interface; it would lack: {'; '.join(lost)} ({own.why_not})",
        _KEEP_NETWORK.format(scene.root.pid),
        pid=scene.root.pid,
    )


def check_bound(scene: Scene) -> Iterator[Finding]:
    """Report sockets that are bound to an interface of such a namespace: CRIU would find none of
    that name.

    A connection to outside that a restore gives up is restored without it.
    """
    own = scene.own_network
    if own is None or own.saved:
        return
    for s in scene.sockets:
        if s.socket.family not in ("inet", "inet6", "packet") or s.where is Peer.OUTSIDE:
            continue
        name = _interface_of(s)
        if name not in ("", "lo"):
            yield Finding(
                "warning" if scene.leave_running else "error",
                "interface-lost",
                f"a socket is bound to the network interface {name}, which ends with the tree; "
                "no restore could bind it again",
                _KEEP_NETWORK.format(scene.root.pid),
                pid=s.pid,
                fd=s.fd,
            )


def _interface_of(s: TreeSocket) -> str:
    """Return the interface that a socket is bound to; "" for none, or if it has just been
    closed.
    """
    try:
        with borrowed(s) as sock:
            if sock.family == socket.AF_PACKET:
                return str(sock.getsockname()[0])
            name = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _IFNAMSIZ)
    except (NoSuchProcess, OSError):
        return ""
    return os.fsdecode(name.rstrip(b"\0"))


def _lives_in(pid: int, inode: int, kind: str = "net") -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino == inode
    except OSError:
        return False


def check_ipc(scene: Scene) -> Iterator[Finding]:
    """Report an IPC namespace that other processes use, too.

    CRIU saves all that is in it, and a restore makes a second one with a copy.
    """
    inode = scene.namespaces.get(scene.root.pid, {}).get("ipc")
    if inode is None or not scene.foreign("ipc"):
        return
    above = ancestors(scene.root.pid)  # the process that made it (`unshare --fork`), and waits
    others = sorted(
        pid
        for pid in all_pids()
        if _lives_in(pid, inode, "ipc") and pid not in above and scene.outside(pid)
    )
    if others:
        yield Finding(
            "warning",
            "shared-ipc",
            f"{scene.command_of(others[0])}{' and others' if others[1:] else ''} outside the "
            f"tree lives in the IPC namespace of {scene.root}; after a restore the tree has one "
            "of its own, with a copy of the System V objects and message queues",
            "Dump what uses them as one tree.",
            pid=scene.root.pid,
        )


def check_freezer(scene: Scene) -> Iterator[Finding]:
    """Report frozen control groups: a tree in one never answers CRIU, except in the group of a
    paused session.
    """
    reported: set[str] = set()
    asked: set[str] = set()
    for process in scene.tree:
        try:
            lines = read_lines(process.pid, "cgroup")
        except NoSuchProcess:
            continue
        for line in lines:
            if line in asked:
                continue
            asked.add(line)
            _number, controllers, path = line.split(":", 2)
            if controllers and "freezer" not in controllers.split(","):
                continue
            state = _frozen(scene, path, unified=not controllers)
            if state and state not in reported:
                reported.add(state)
                if os.path.dirname(state) == _paused_group(scene):
                    continue
                yield Finding(
                    "error",
                    "frozen",
                    f"{process} is in a frozen control group, {state}; CRIU would wait for it in "
                    "vain",
                    f"Thaw it first: `echo {'0' if not controllers else 'THAWED'} > "
                    f"{quoted(state)}`.",
                    pid=process.pid,
                )


def _paused_group(scene: Scene) -> str | None:
    """Return the control group of the session whose root this is, if its holder has paused it."""
    root = scene.root.identity
    for state in all_states(scene.config):
        if state["holder_alive"] and (state["pid"], state["start_time"]) == (
            root.pid,
            root.start_time,
        ):
            group: str | None = state["cgroup"] if state["state"] == "paused" else None
            return group
    return None


def _frozen(scene: Scene, path: str, *, unified: bool) -> str:
    """Return the control file that shows that this group is frozen, or ""."""
    kind = "cgroup2" if unified else "cgroup"
    for mount in scene.mounts.values():
        if mount.kind != kind:
            continue
        file = os.path.join(
            f"{mount.point}{path}".rstrip("/"), "cgroup.events" if unified else "freezer.state"
        )
        try:
            with open(file, encoding="ascii") as state:
                text = state.read()
        except OSError:
            continue
        if unified and "frozen 1" in text:
            return os.path.join(os.path.dirname(file), "cgroup.freeze")
        if not unified and text.strip() != "THAWED":
            return file
    return ""
