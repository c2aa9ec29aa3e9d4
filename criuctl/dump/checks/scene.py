"""The scene: everything that the checks look at, read once.

The tree runs on meanwhile.  A process that vanishes between two looks is left out from then on.
Only the root's end matters: then `collect` raises `NoSuchProcess`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from msgspec import Struct

from ...config import Config
from ...errors import CriuctlError, NoSuchProcess
from ...host.target import ancestors
from ...namespaces.network_contents import OwnNetwork
from ...namespaces.plan import entered_kinds, network_of
from ...proc.descriptors import Descriptor, descriptors
from ...proc.limits import effective_capabilities, is_filtered
from ...proc.mappings import Mapping, mappings
from ...proc.mounts import Mount, read_mounts
from ...proc.namespaces import namespaces
from ...proc.procfs import anonymous_memory, read_link, read_text
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
    filtered: bool = False  # criuctl, and so CRIU, has a seccomp filter
    with_files: tuple[str, ...] = ()  # files and folders that are taken along
    streams: frozenset[str] = frozenset()  # pipes whose other end a restore is given again

    @property
    def root(self) -> Process:
        """Return the root process."""
        return self.tree[0]

    @property
    def living(self) -> list[Process]:
        """Return the processes that existed long enough to be read, without zombies."""
        return [process for process in self.tree if process.pid in self.opened]

    @property
    def memory(self) -> int:
        """Return the bytes of memory that a dump would read now, about."""
        amount = 0
        for process in self.living:
            with suppress(CriuctlError):  # it has ended meanwhile
                amount += anonymous_memory(process.pid)
        return amount

    @cached_property
    def by_pid(self) -> dict[int, Process]:
        """Return the processes by PID."""
        return {process.pid: process for process in self.tree}

    @cached_property
    def sockets(self) -> list[TreeSocket]:
        """Return the sockets of the tree."""
        return tree_sockets(self.opened)

    @cached_property
    def terminals(self) -> list[Terminal]:
        """Return the terminals of the tree."""
        return terminals(self.tree, self.opened)

    def named(self, path: str) -> bool:
        """Return whether a file is taken along because it, or a folder above it, is named."""
        return any(
            path == place or path.startswith(f"{place.rstrip('/')}/") for place in self.with_files
        )

    def descriptors(self) -> Iterator[tuple[Process, Descriptor]]:
        """Yield every descriptor of every process."""
        for process in self.tree:
            for descriptor in self.opened.get(process.pid, ()):
                yield process, descriptor

    def mappings(self) -> Iterator[tuple[Process, Mapping]]:
        """Yield every mapping of every process."""
        for process in self.tree:
            for mapping in self.mapped.get(process.pid, ()):
                yield process, mapping

    def entered(self, kind: str) -> bool:
        """Return whether CRIU is put into the root's namespace of this kind, which is not
        criuctl's.
        """
        if kind == "net" and (own := self.own_network) is not None and own.saved:
            return False
        return kind in self._entered

    def saved(self, kind: str) -> bool:
        """Return whether CRIU saves the root's namespace of this kind, which is not criuctl's."""
        return self.foreign(kind) and not self.entered(kind)

    @cached_property
    def _entered(self) -> frozenset[str]:
        return entered_kinds(self.root.pid) if self.root.pid in self.namespaces else frozenset()

    @cached_property
    def own_network(self) -> OwnNetwork | None:
        """Return the root's net namespace, if it is not criuctl's and ends with the tree."""
        return network_of(self.root.pid, self.by_pid) if self.foreign("net") else None

    def foreign(self, kind: str) -> bool:
        """Return whether the root's namespace of this kind is not criuctl's."""
        own = self.namespaces.get(self.root.pid)
        return own is not None and own.get(kind) != self.own_namespaces.get(kind)

    def at_home(self, pid: int, kind: str) -> bool:
        """Return whether this process is in the root's namespace of this kind."""
        home = self.namespaces.get(self.root.pid, {})
        return self.namespaces.get(pid, {}).get(kind) == home.get(kind)

    @property
    def mounts(self) -> dict[int, Mount]:
        """Return the mounts by mount id, of all mount namespaces that processes of the tree are
        in.
        """
        return self._all_mounts[0]

    @property
    def known_mount_namespaces(self) -> set[int]:
        """Return the mount namespaces whose mounts are all in `mounts`."""
        return self._all_mounts[1]

    def root_of(self, mnt_id: int) -> str | None:
        """Return the path to the root folder of the mount namespace with this mount, or None."""
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
        """Return the mounts of a whole namespace; None from inside a chroot, which sees only a part
        of them.
        """
        if namespace == self.own_namespaces.get("mnt"):
            return read_mounts()
        return read_mounts(pid) if read_link(pid, "root") == "/" else None

    def knows_mounts_of(self, pid: int) -> bool:
        """Return whether `mounts` has all mounts of this process's namespace."""
        return self.namespaces.get(pid, {}).get("mnt") in self.known_mount_namespaces

    def hides(self, mount: Mount) -> Mount | None:
        """Return the mount that covers all of this mount, or of one below it (criu/mount.c,
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
        """Return whether a process lives and is not of the tree, which may have started it
        meanwhile.

        PID 0 stands for a process that cannot be seen.
        """
        try:
            return pid not in self.by_pid and self.by_pid.keys().isdisjoint(ancestors(pid))
        except NoSuchProcess:
            return False

    def command_of(self, pid: int) -> str:
        """Return ``PID (command)`` of any process, or what is known of it."""
        try:
            return f"{pid} ({read_text(pid, 'comm').strip()})"
        except NoSuchProcess:
            return str(pid)


def collect(
    root: int,
    config: Config,
    *,
    leave_running: bool = False,
    with_files: Sequence[str] = (),
    streams: Sequence[str] = (),
) -> Scene:
    """Read the tree of `root`.

    Raises `NoSuchProcess` if there is none, `PreflightRefused` if criuctl may not look at it.
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
        filtered=is_filtered(),
        own_ids=(os.getuid(), os.getgid()),
        with_files=tuple(os.path.abspath(path) for path in with_files),
        streams=frozenset(streams),
    )
