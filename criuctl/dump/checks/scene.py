"""Everything the checks look at, read once.

The tree runs on meanwhile.  A process that vanishes between two looks is left out from then on;
only the root's end matters, and that is told by `collect` raising `NoSuchProcess`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property

from msgspec import Struct

from ...config import Config
from ...errors import NoSuchProcess
from ...host.target import ancestors
from ...namespaces.network_contents import OwnNetwork
from ...namespaces.plan import entered_kinds, network_of
from ...proc.descriptors import Descriptor, descriptors
from ...proc.limits import effective_capabilities
from ...proc.mappings import Mapping, mappings
from ...proc.mounts import Mount, read_mounts
from ...proc.namespaces import namespaces
from ...proc.procfs import read_link, read_text
from ...proc.sockets import TreeSocket, tree_sockets
from ...proc.tree import Process, read_tree
from ...proc.tty import Terminal, terminals


class Scene(Struct, dict=True):
    """One tree, as it was found."""

    config: Config
    leave_running: bool
    tree: list[Process]
    opened: dict[int, list[Descriptor]]
    mapped: dict[int, list[Mapping]]
    namespaces: dict[int, dict[str, int]]
    own_namespaces: dict[str, int]
    own_capabilities: int
    own_ids: tuple[int, int]  # real user and group
    with_files: tuple[str, ...] = ()  # files and folders that are taken along

    @property
    def root(self) -> Process:
        """The root process."""
        return self.tree[0]

    @property
    def living(self) -> list[Process]:
        """The processes that were there long enough to be looked at, without zombies."""
        return [process for process in self.tree if process.pid in self.opened]

    @cached_property
    def by_pid(self) -> dict[int, Process]:
        """PID -> process."""
        return {process.pid: process for process in self.tree}

    @cached_property
    def sockets(self) -> list[TreeSocket]:
        """The sockets of the tree."""
        return tree_sockets(self.opened)

    @cached_property
    def terminals(self) -> list[Terminal]:
        """The terminals of the tree."""
        return terminals(self.tree, self.opened)

    def named(self, path: str) -> bool:
        """Whether a file is taken along because it is named, or is in a folder that is."""
        return any(
            path == place or path.startswith(f"{place.rstrip('/')}/") for place in self.with_files
        )

    def descriptors(self) -> Iterator[tuple[Process, Descriptor]]:
        """Every descriptor of every process."""
        for process in self.tree:
            for descriptor in self.opened.get(process.pid, ()):
                yield process, descriptor

    def mappings(self) -> Iterator[tuple[Process, Mapping]]:
        """Every mapping of every process."""
        for process in self.tree:
            for mapping in self.mapped.get(process.pid, ()):
                yield process, mapping

    def entered(self, kind: str) -> bool:
        """Whether CRIU is put into the root's namespace of this kind, it being another than
        ours.
        """
        if kind == "net" and (own := self.own_network) is not None and own.saved:
            return False
        return kind in self._entered

    def saved(self, kind: str) -> bool:
        """Whether CRIU saves the root's namespace of this kind, it being another than ours."""
        return self.foreign(kind) and not self.entered(kind)

    @cached_property
    def _entered(self) -> frozenset[str]:
        return entered_kinds(self.root.pid) if self.root.pid in self.namespaces else frozenset()

    @cached_property
    def own_network(self) -> OwnNetwork | None:
        """The root's net namespace, if it is another than ours and ends with the tree."""
        return network_of(self.root.pid, self.by_pid) if self.foreign("net") else None

    def foreign(self, kind: str) -> bool:
        """Whether the root's namespace of this kind is not ours."""
        mine = self.namespaces.get(self.root.pid)
        return mine is not None and mine.get(kind) != self.own_namespaces.get(kind)

    def at_home(self, pid: int, kind: str) -> bool:
        """Whether this process is in the root's namespace of this kind."""
        home = self.namespaces.get(self.root.pid, {})
        return self.namespaces.get(pid, {}).get(kind) == home.get(kind)

    @property
    def mounts(self) -> dict[int, Mount]:
        """Mount id -> mount, of all mount namespaces that processes of the tree live in."""
        return self._all_mounts[0]

    @property
    def known_mount_namespaces(self) -> set[int]:
        """The mount namespaces whose mounts are all in `mounts`."""
        return self._all_mounts[1]

    def root_of(self, mnt_id: int) -> str | None:
        """What leads from here to the root folder of the mount namespace with this mount, as
        `mounts` knows it; None: nothing.
        """
        return self._all_mounts[2].get(mnt_id)

    @cached_property
    def _all_mounts(self) -> tuple[dict[int, Mount], set[int], dict[int, str]]:
        found: dict[int, Mount] = {}
        seen: set[int] = set()
        roots: dict[int, str] = {}
        for process in self.tree:
            namespace = self.namespaces.get(process.pid, {}).get("mnt")
            if namespace is None or namespace in seen:
                continue
            try:
                inside = self._mounts_of(process.pid, namespace)
            except NoSuchProcess:
                continue
            if inside is not None:
                seen.add(namespace)
                found.update((mount.id, mount) for mount in inside)
                root = (
                    ""
                    if namespace == self.own_namespaces.get("mnt")
                    else f"/proc/{process.pid}/root"
                )
                roots.update((mount.id, root) for mount in inside)
        return found, seen, roots

    def _mounts_of(self, pid: int, namespace: int) -> list[Mount] | None:
        """The mounts of a whole namespace; None from inside a chroot, which sees only a part of
        them.
        """
        if namespace == self.own_namespaces.get("mnt"):
            return read_mounts()
        return read_mounts(pid) if read_link(pid, "root") == "/" else None

    def knows_mounts_of(self, pid: int) -> bool:
        """Whether `mounts` has all mounts that the namespace of this process has."""
        return self.namespaces.get(pid, {}).get("mnt") in self.known_mount_namespaces

    def hides(self, mount: Mount) -> Mount | None:
        """What was mounted over all of this mount, or over what it is on (criu/mount.c,
        mnt_is_overmounted).
        """
        at = mount
        while (parent := self.mounts.get(at.parent)) is not None and parent.id != at.id:
            for other in self._mounted_on.get(parent.id, ()):
                if other.id != at.id and (f"{at.point}/").startswith(f"{other.point.rstrip('/')}/"):
                    return other
            at = parent
        return next(
            (other for other in self._mounted_on.get(mount.id, ()) if other.point == mount.point),
            None,
        )

    @cached_property
    def _mounted_on(self) -> dict[int, list[Mount]]:
        found: dict[int, list[Mount]] = {}
        for mount in self.mounts.values():
            found.setdefault(mount.parent, []).append(mount)
        return found

    def outside(self, pid: int) -> bool:
        """Whether a process (0: one unseen) lives and is not of the tree, which may have started it
        since the look.
        """
        try:
            return pid not in self.by_pid and self.by_pid.keys().isdisjoint(ancestors(pid))
        except NoSuchProcess:
            return False

    def command_of(self, pid: int) -> str:
        """``PID (command)`` of any process, as far as it can be told."""
        try:
            return f"{pid} ({read_text(pid, 'comm').strip()})"
        except NoSuchProcess:
            return str(pid)


def collect(
    root: int, config: Config, *, leave_running: bool = False, with_files: Sequence[str] = ()
) -> Scene:
    """Look at the tree of `root`.  `NoSuchProcess` if there is none, `PreflightRefused` if we may
    not look.
    """
    tree = read_tree(root)
    opened: dict[int, list[Descriptor]] = {}
    mapped: dict[int, list[Mapping]] = {}
    spaces: dict[int, dict[str, int]] = {}
    for process in tree:
        if process.zombie:
            continue
        try:
            found = namespaces(process.pid), descriptors(process.pid), mappings(process.pid)
        except NoSuchProcess:
            if process.pid == root:
                raise
            continue
        spaces[process.pid], opened[process.pid], mapped[process.pid] = found
    return Scene(
        config=config,
        leave_running=leave_running,
        tree=tree,
        opened=opened,
        mapped=mapped,
        namespaces=spaces,
        own_namespaces=namespaces("self"),
        own_capabilities=effective_capabilities(),
        own_ids=(os.getuid(), os.getgid()),
        with_files=tuple(os.path.abspath(path) for path in with_files),
    )
