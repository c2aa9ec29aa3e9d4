"""The namespaces that CRIU is started in for a dump, and those that a restore must make.

CRIU does not save a namespace that it is in itself.  For PID and mount namespaces that is the
better way: a mount namespace can rarely be rebuilt from images.  So CRIU enters those of the tree;
a restore first puts CRIU into fresh ones (or into the same, if they still exist).  The same is done
with a net namespace that other processes use, that has a name, or that has links which CRIU cannot
make again (`network_contents`).  One that only the tree uses, and the others (UTS, IPC, time), CRIU
saves and restores as part of the tree.

A root that is PID 1 of its PID namespace is different: from inside, CRIU cannot stop it, and no
process could take its place at a restore.  CRIU then stays outside and saves the PID and mount
namespaces itself, with all mounts marked as coming from outside; a restore gives it a bind mount of
the root folder to build them on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import CriuctlError
from ..proc import command
from ..proc.mounts import read_mounts
from ..proc.namespace_sockets import net_cookie
from ..proc.namespaces import entry_prefix, foreign, is_namespace_init, named_netns, namespaces
from ..proc.namespaces import ns_pids as pids_of
from ..proc.procfs import reading
from ..proc.tree import read_tree
from .network_contents import Network, OwnNetwork, own_network

ENTERED = ("mnt", "pid", "net")
_KERNELS = frozenset({"proc", "sysfs"})  # kinds of file systems that the kernel fills
_LAST_PID, _TIMEOUT = "/proc/sys/kernel/ns_last_pid", 5.0
DUMPED = ("ipc", "uts", "time", "cgroup", "user")


class NamespacePlan(Struct, frozen=True):
    """How CRIU reaches a tree: the argv prefix that enters, and the root's PID as seen from
    there.
    """

    prefix: tuple[str, ...]
    root: int  # the root's PID as CRIU sees it
    entered: frozenset[str]
    dumped: frozenset[str]
    is_init: bool  # the root is PID 1 of its PID namespace
    netns_name: str | None
    netns_inode: int
    last_pid: int  # the last PID given in the root's PID namespace; 0: not known
    # of a namespace that is not criuctl's, by which a restore recognises it; 0: not known
    netns_cookie: int = 0
    # contents of the net namespaces that CRIU saves, by the PID in the tree of a process in it
    networks: Mapping[int, Network] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return per kind ``mode``: host (criuctl's), entered, or dumped (in CRIU's images); for
        net also its identifiers.
        """
        modes: dict[str, Any] = {}
        for kind in (*ENTERED, *DUMPED):
            mode = (
                "entered" if kind in self.entered else "dumped" if kind in self.dumped else "host"
            )
            modes[kind] = {"mode": mode, "name": None}
        modes["net"].update(name=self.netns_name, inode=self.netns_inode)
        if self.netns_cookie:
            modes["net"]["cookie"] = self.netns_cookie
        if self.networks:
            modes["net"]["networks"] = [
                {"pid": pid, **network.to_dict()} for pid, network in self.networks.items()
            ]
        modes["pid"].update(init=self.is_init, last=self.last_pid)
        return modes


def entered_kinds(root: int) -> frozenset[str]:
    """Return the kinds of namespaces that CRIU has to enter for the tree of `root`, except a net
    namespace that it can save.
    """
    strange = foreign(root)
    init = "pid" in strange and is_namespace_init(root)
    return frozenset(strange & ({"net"} if init else set(ENTERED)))


def network_of(root: int, tree: Collection[int]) -> OwnNetwork | None:
    """Return the net namespace of the tree of `root`, if it is not criuctl's and ends with it.

    CRIU runs its helper programs in the mount namespace that it is in.
    """
    return own_network(
        root, tree, tools_in=f"/proc/{root}/root" if "mnt" in entered_kinds(root) else "/"
    )


def plan_entry(root: int) -> NamespacePlan:
    """Return how to dump the tree of `root`."""
    strange = foreign(root)
    init = "pid" in strange and is_namespace_init(root)
    own = network_of(root, {p.pid for p in read_tree(root)}) if "net" in strange else None
    saved = own.networks if own is not None and own.saved else {}
    entered = entered_kinds(root) - ({"net"} if saved else set())
    inodes = namespaces(root)
    return NamespacePlan(
        prefix=tuple(entry_prefix(root, entered)),
        root=pids_of(root)[-1] if "pid" in entered else root,
        entered=frozenset(entered),
        dumped=frozenset(strange - entered),
        is_init=init,
        netns_name=named_netns(inodes["net"]) if "net" in entered else None,
        netns_inode=inodes["net"],
        last_pid=0 if init else _last_pid(root if "pid" in entered else 0),
        netns_cookie=_cookie(root) if "net" in strange else 0,
        networks={pids_of(pid)[-1]: network for pid, network in saved.items()},
    )


def _cookie(root: int) -> int:
    with reading(root):
        namespace = os.open(f"/proc/{root}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return net_cookie(namespace)
    finally:
        os.close(namespace)


def _last_pid(inside: int) -> int:
    """Return the PID that was given last in that process's PID namespace (0: criuctl's).

    A restore continues after it; otherwise programs would soon meet PIDs of children they had.
    """
    try:
        if not inside:
            return int(Path(_LAST_PID).read_text())
        return int(
            command.run(
                [*entry_prefix(inside, ("pid",)), "cat", _LAST_PID], timeout=_TIMEOUT
            ).stdout
        )
    except (CriuctlError, OSError, ValueError):
        return 0  # a kernel without it


def last_pid(modes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the PID after which a tree that was dumped so continues; 1: not known."""
    last = modes.get("pid", {}).get("last")
    return last if isinstance(last, int) and last > 1 else 1


def saved_devices(root: int) -> frozenset[int]:
    """Return the file systems, by device, that CRIU saves with all that is in them, or that the
    kernel fills again.

    Only for a root that is PID 1, in any mount namespace of its tree: a tmpfs that this host has
    not mounted, and /proc, wherever it is mounted.
    """
    strange = foreign(root)
    if "mnt" not in strange or "pid" not in strange or not is_namespace_init(root):
        return frozenset()
    mounts = [mount for pid in mount_tops(root).values() for mount in read_mounts(pid)]
    kept = {m.device for m in mounts if m.kind == "tmpfs"} - {m.device for m in read_mounts()}
    return frozenset(kept | {m.device for m in mounts if m.kind in _KERNELS})


def mount_tops(root: int) -> dict[int, int]:
    """Return mount namespace -> a process of the tree of `root` that sees all of it; if there is
    none, one in a chroot.

    For the root's own namespace it is the root.
    """
    with reading(root):
        found = {os.stat(f"/proc/{root}/ns/mnt").st_ino: root}
    chrooted: dict[int, int] = {}
    for process in read_tree(root):
        with suppress(OSError):  # it has ended
            namespace = os.stat(f"/proc/{process.pid}/ns/mnt").st_ino
            if namespace not in found:
                at_top = os.readlink(f"/proc/{process.pid}/root") == "/"
                (found if at_top else chrooted).setdefault(namespace, process.pid)
    return chrooted | found
