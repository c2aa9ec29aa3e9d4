"""Namespaces of processes: which ones a process is in, and how to run a command in them.

A namespace is identified by its kind and inode. Two PIDs matter for a tree in another PID
namespace: the one that criuctl sees and the one that the tree sees itself; the kernel shows both
(NSpid in ``/proc/PID/status``).

Commands enter by util-linux's ``nsenter``: the kernel refuses a program that has threads, as
criuctl has, to join a user namespace. nsenter changes the working directory and, for the mount
namespace, what every path means: the command is looked up *inside*. A thread can run a few system
calls in a mount namespace (`in_mount_namespace`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import NoSuchProcess, PreflightRefused
from .child import InterruptsDeferred
from .procfs import all_pids, open_entry, read_text, reading
from .syscalls import CLONE_FS, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, setns, unshare
from .threads import Later

R = TypeVar("R")

# kind -> nsenter's option.  The kinds are the names under /proc/PID/ns.
KINDS: dict[str, str] = {
    "user": "--user",
    "cgroup": "--cgroup",
    "ipc": "--ipc",
    "uts": "--uts",
    "net": "--net",
    "pid": "--pid",
    "mnt": "--mount",
    "time": "--time",
}
_NETNS_FOLDERS = ("/run/netns", "/var/run/netns")
_LINK = re.compile(r"^[a-z_]+:\[(\d+)\]$")


def namespaces(pid: int | str) -> dict[str, int]:
    """Return kind -> inode of each namespace of `pid` (``"self"`` is criuctl).

    `NoSuchProcess` (also for zombies, which have left their namespaces), `PreflightRefused`.
    """
    found = {}
    with reading(pid if isinstance(pid, int) else os.getpid()):
        for kind in os.listdir(f"/proc/{pid}/ns"):
            match = _LINK.match(os.readlink(f"/proc/{pid}/ns/{kind}"))
            if match and kind in KINDS:
                found[kind] = int(match[1])
    return found


def for_children(pid: int, kind: str) -> int | None:
    """Return the inode of the PID or time namespace of the next child of `pid`.

    None if that is not set up yet.
    """
    with reading(pid):
        match = _LINK.match(os.readlink(f"/proc/{pid}/ns/{kind}_for_children"))
    return int(match[1]) if match else None


def foreign(pid: int) -> set[str]:
    """Return the kinds of namespaces that `pid` does not share with us."""
    ours = namespaces("self")
    return {kind for kind, inode in namespaces(pid).items() if ours.get(kind) != inode}


def entry_prefix(pid: int, kinds: Iterable[str]) -> list[str]:
    """Return the argv prefix that runs a command in these namespaces of `pid`; [] for no kinds.

    With ``pid`` among the kinds nsenter forks and passes the command's exit code on. With ``mnt``
    the command, a path, is looked up in the target's mount namespace and starts in its root
    directory.
    """
    wanted = set(kinds)
    unknown = wanted - KINDS.keys()
    if unknown:
        raise ValueError(f"unknown kinds of namespaces: {', '.join(sorted(unknown))}")
    if not wanted:
        return []
    return [
        "nsenter",
        f"--target={pid}",
        *(option for kind, option in KINDS.items() if kind in wanted),
        "--",
    ]


def in_mount_namespace(pid: int, work: Callable[[], R]) -> R:
    """Return the result of `work`, run in the mount namespace of `pid`, at its root folder.

    `NoSuchProcess`, `OSError`, and what `work` raises.
    """

    def alone() -> None:
        unshare(CLONE_FS)  # a root and a current folder of this thread alone, which setns sets

    return _within(pid, "mnt", CLONE_NEWNS, work, alone)


def in_ipc_namespace(pid: int, work: Callable[[], R]) -> R:
    """Return the result of `work`, run in the IPC namespace of `pid`.

    `NoSuchProcess`, `OSError`, and what `work` raises.
    """
    return _within(pid, "ipc", CLONE_NEWIPC, work)


def in_net_namespace(namespace: int, work: Callable[[], R]) -> R:
    """Return the result of `work`, run in the net namespace of this descriptor.

    There, /proc/sys/net shows the settings of that namespace. `OSError`, and what `work` raises.
    """

    def enter() -> R:
        setns(namespace, CLONE_NEWNET)
        return work()

    return _in_thread("net", enter)


def new_net_namespace() -> int:
    """Return a descriptor of a new net namespace, which ends when it is closed; `OSError`."""

    def make() -> int:
        unshare(CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread("net", make)


def _within(
    pid: int, kind: str, flag: int, work: Callable[[], R], first: Callable[[], None] = lambda: None
) -> R:
    namespace = open_entry(pid, f"ns/{kind}", os.O_RDONLY)

    def enter() -> R:
        first()
        setns(namespace, flag)
        return work()

    try:
        return _in_thread(kind, enter)
    finally:
        os.close(namespace)


def _in_thread(kind: str, work: Callable[[], R]) -> R:
    later = Later(work)
    with InterruptsDeferred():  # what the thread uses is needed as long as it runs
        # when the thread ends, all other threads are still in their namespaces
        thread = threading.Thread(target=later.run, name=f"enter-{kind}")
        thread.start()
        thread.join()
    return later.result()


def ns_pids(pid: int) -> tuple[int, ...]:
    """Return the PIDs of `pid` in each PID namespace from ours down to its own."""
    for line in read_text(pid, "status").split("\n"):
        if line.startswith("NSpid:"):
            return tuple(int(word) for word in line.split()[1:])
    return (pid,)


def pid_level(pid: int) -> int:
    """Return how many PID namespaces below ours `pid` is in; 0 is our own."""
    return len(ns_pids(pid)) - 1


def is_namespace_init(pid: int) -> bool:
    """Return whether `pid` is PID 1 of its PID namespace, whose end kills all processes in it."""
    return ns_pids(pid)[-1] == 1


def nested_pid_namespaces(root: int, pids: Iterable[int]) -> dict[int, int]:
    """Return PID -> inode of its PID namespace, for those of `pids` in another one than `root`."""
    home = namespaces(root).get("pid")
    nested = {}
    for pid in pids:
        try:
            inode = namespaces(pid).get("pid")
        except NoSuchProcess:
            continue
        if inode is not None and inode != home:
            nested[pid] = inode
    return nested


def named_netns(inode: int) -> str | None:
    """Return the name of the net namespace with this inode in ``ip netns``, or None."""
    for folder in _NETNS_FOLDERS:
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            try:
                if os.stat(os.path.join(folder, name)).st_ino == inode:
                    return name
            except FileNotFoundError:
                continue
    return None


def pid_in(inode: int, inner: int) -> int | None:
    """Return our PID of the process that has PID `inner` in the PID namespace with this inode.

    None if there is no such process (yet).
    """
    for pid in all_pids():
        try:
            if namespaces(pid).get("pid") == inode and ns_pids(pid)[-1] == inner:
                return pid
        except (NoSuchProcess, PreflightRefused):
            continue
    return None
