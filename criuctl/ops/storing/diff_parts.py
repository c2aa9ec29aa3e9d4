"""The differences between the processes, descriptors, connections and files of two checkpoints.

All functions are pure and read only the manifests. Processes are paired first, because everything
else depends on the pairs. They are paired by identity (PID and start time, within one boot), then
by their own PID and command line, then by their place in the tree (the same parent, the same
command line, in order of PIDs), then by their own PID and command. A restore keeps the PIDs that a
tree itself sees, so these are compared.

Facts that every restore changes (inode numbers, start times, PIDs as the host sees them) do not
count as differences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ...checkpoint.connection_record import ConnectionRecord
from ...checkpoint.file_records import FileRecord
from ...checkpoint.manifest import Manifest, ProcessRecord
from ...criu.image_records import OpenFile

Pair = tuple[ProcessRecord, ProcessRecord]
Facts = dict[str, Any]

_PROCESS_FIELDS = ("ns_pid", "command", "argv", "exe", "cwd", "uid", "gid", "zombie", "threads")
_DESCRIPTOR_FIELDS = ("kind", "what", "mode", "offset")
_CONNECTION_FIELDS = ("state", "policy", "rqueue", "wqueue")
_FILE_FIELDS = ("kind", "size", "mode", "uid", "gid", "mtime_ns")


class Change(Struct, frozen=True):
    """An item that both checkpoints have, and the fields that differ.

    `more` holds facts that are in neither of the two records.
    """

    before: Facts
    after: Facts
    fields: list[str]
    more: Facts = field(default_factory=dict)

    def to_dict(self) -> Facts:
        """Return the change as JSON."""
        return {"before": self.before, "after": self.after, "fields": self.fields, **self.more}


class Part(Struct):
    """The differences of one kind: processes, descriptors, connections or files."""

    added: list[Facts] = field(default_factory=list)
    removed: list[Facts] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    same: int = 0

    @property
    def differs(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.added or self.removed or self.changed)

    def to_dict(self) -> Facts:
        """Return the differences as JSON."""
        return {
            "added": self.added,
            "removed": self.removed,
            "changed": [c.to_dict() for c in self.changed],
            "same": self.same,
        }

    def compare(
        self,
        before: Facts,
        after: Facts,
        names: Iterable[str],
        also: Iterable[str] = (),
        **more: Any,
    ) -> None:
        """Count an item that both have. It differs in the fields of `names` whose values differ,
        and in those of `also`.
        """
        differing = [*(name for name in names if before[name] != after[name]), *also]
        if differing:
            self.changed.append(Change(before, after, differing, more))
        else:
            self.same += 1


# -- processes


class Pairing(Struct, frozen=True):
    """The processes that both checkpoints have, in pairs, and the others."""

    pairs: list[Pair]
    removed: list[ProcessRecord]
    added: list[ProcessRecord]

    def after(self) -> dict[int, int]:
        """Return the tree's own PID before -> after."""
        return {old.ns_pid: new.ns_pid for old, new in self.pairs}


def pair(before: Manifest, after: Manifest) -> Pairing:
    """Pair the processes of two checkpoints, as described at the top of this module."""
    old, new = _Unpaired(before.processes), _Unpaired(after.processes)
    pairs: list[Pair] = []

    def match(
        key: Callable[[ProcessRecord], Hashable],
        left: Iterable[ProcessRecord],
        right: Iterable[ProcessRecord],
    ) -> None:
        waiting: dict[Hashable, list[ProcessRecord]] = {}
        for process in reversed(list(right)):
            waiting.setdefault(key(process), []).append(process)
        for process in list(left):
            if found := waiting.get(key(process)):
                partner = new.take(found.pop())
                pairs.append((old.take(process), partner))

    if before.host.boot_id and before.host.boot_id == after.host.boot_id:
        match(
            lambda p: (p.pid, p.start_time),
            old.those(lambda p: p.start_time > 0),
            new.those(lambda p: p.start_time > 0),
        )
    match(lambda p: (p.ns_pid, p.argv), old, new)
    match(
        lambda _p: "root",
        old.those(lambda p: _is_root(p, before)),
        new.those(lambda p: _is_root(p, after)),
    )
    looked_at = 0
    # once two parents are paired their children can be, and so on down the tree
    while looked_at < len(pairs) and old and new:
        parents = pairs[looked_at][0].pid, pairs[looked_at][1].pid
        looked_at += 1
        match(lambda p: p.argv, old.children(parents[0]), new.children(parents[1]))
    match(lambda p: (p.ns_pid, p.command), old, new)
    return Pairing(sorted(pairs, key=lambda p: p[1].pid), list(old), list(new))


class _Unpaired:
    """The processes that have no partner yet, in their order."""

    def __init__(self, processes: Iterable[ProcessRecord]) -> None:
        self._left = {id(process): process for process in processes}
        self._children: dict[int, list[ProcessRecord]] = {}
        for process in self:
            self._children.setdefault(process.ppid, []).append(process)

    def __iter__(self) -> Iterator[ProcessRecord]:
        return iter(self._left.values())

    def __len__(self) -> int:
        return len(self._left)

    def those(self, wanted: Callable[[ProcessRecord], bool]) -> list[ProcessRecord]:
        """Return the processes for which `wanted` is true."""
        return [process for process in self if wanted(process)]

    def children(self, pid: int) -> list[ProcessRecord]:
        """Return the processes whose parent has this PID."""
        return [process for process in self._children.get(pid, ()) if id(process) in self._left]

    def take(self, process: ProcessRecord) -> ProcessRecord:
        """Remove and return this process: it has a partner now."""
        return self._left.pop(id(process))


def _is_root(process: ProcessRecord, manifest: Manifest) -> bool:
    return manifest.root is not None and process.pid == manifest.root.pid


def processes(found: Pairing) -> Part:
    """Return the differences between the processes."""
    part = Part([_process(p) for p in found.added], [_process(p) for p in found.removed])
    for old, new in found.pairs:
        part.compare(_process(old), _process(new), _PROCESS_FIELDS)
    return part


def _process(p: ProcessRecord) -> Facts:
    names = ("pid", "ns_pid", "ppid", "command", "exe", "cwd", "uid", "gid", "threads")
    return {
        **{name: getattr(p, name) for name in names},
        "argv": list(p.argv),
        "zombie": p.state == "Z",
    }


# -- descriptors and connections

Descriptors = Mapping[int, Mapping[int, OpenFile]]  # PID -> descriptor -> what it is


def descriptors(before: Descriptors, after: Descriptors, found: Pairing) -> Part:
    """Return the differences between the descriptors of processes that both checkpoints have."""
    part = Part()
    for pid, other in found.after().items():
        old, new = before.get(pid, {}), after.get(other, {})
        for fd in sorted(old.keys() | new.keys()):
            if fd not in new:
                part.removed.append(_descriptor(pid, fd, old[fd]))
            elif fd not in old:
                part.added.append(_descriptor(other, fd, new[fd]))
            else:
                part.compare(
                    _descriptor(pid, fd, old[fd]),
                    _descriptor(other, fd, new[fd]),
                    _DESCRIPTOR_FIELDS,
                )
    return part


def _descriptor(pid: int, fd: int, file: OpenFile) -> Facts:
    return {
        "pid": pid,
        "fd": fd,
        "kind": file.kind,
        "what": file.what,
        "mode": file.mode,
        "offset": file.offset,
    }


def connections(
    before: Sequence[ConnectionRecord], after: Sequence[ConnectionRecord], found: Pairing
) -> Part:
    """Return the differences between the connections.

    Two connections are the same if they have the same ends. Those with the same descriptor are
    paired first.
    """
    part = Part()
    old, new = {id(c): c for c in before}, {id(c): c for c in after}
    others = found.after()

    def match(
        one: Callable[[ConnectionRecord], Hashable], other: Callable[[ConnectionRecord], Hashable]
    ) -> None:
        waiting: dict[Hashable, list[ConnectionRecord]] = {}
        for connection in reversed(new.values()):
            waiting.setdefault(other(connection), []).append(connection)
        for connection in list(old.values()):
            if there := waiting.get(one(connection)):
                partner = there.pop()
                del old[id(connection)], new[id(partner)]
                part.compare(_connection(connection), _connection(partner), _CONNECTION_FIELDS)

    match(lambda c: (others.get(c.pid), c.fd, *_ends(c)), lambda c: (c.pid, c.fd, *_ends(c)))
    match(_ends, _ends)
    part.removed += [_connection(c) for c in old.values()]
    part.added += [_connection(c) for c in new.values()]
    return part


def _ends(c: ConnectionRecord) -> tuple[str, ...]:
    return c.family, c.type, c.protocol, c.local, c.peer


def _connection(c: ConnectionRecord) -> Facts:
    names = (
        "pid",
        "fd",
        "protocol",
        "local",
        "peer",
        "external",
        "direction",
        "state",
        "policy",
        "rqueue",
        "wqueue",
    )
    return {name: getattr(c, name) for name in names}


# -- files


def files(
    before: Sequence[FileRecord],
    after: Sequence[FileRecord],
    changed_bytes: Callable[[FileRecord, FileRecord], int],
) -> Part:
    """Return the differences between the files, by path.

    `changed_bytes` counts the bytes that differ where both checkpoints carry the content.
    """
    part = Part()
    old, new = {f.path: f for f in before}, {f.path: f for f in after}
    part.removed = [_file(old[path]) for path in sorted(old.keys() - new.keys())]
    part.added = [_file(new[path]) for path in sorted(new.keys() - old.keys())]
    for path in sorted(old.keys() & new.keys()):
        one, other = old[path], new[path]
        contents, count = _contents(one, other), None
        if contents != "same" and one.data is not None and other.data is not None:
            count = changed_bytes(one, other)
        also = () if contents == "same" else ("contents",)
        part.compare(
            _file(one), _file(other), _FILE_FIELDS, also, contents=contents, changed_bytes=count
        )
    return part


def _contents(one: FileRecord, other: FileRecord) -> str:
    """Return ``same``, ``changed``, or ``unknown`` where neither digest nor content was taken."""
    if one.digest and other.digest:
        return "same" if one.digest == other.digest else "changed"
    if one.data is not None and other.data is not None:
        return "same" if one.data == other.data else "changed"
    if one.size != other.size:
        return "changed"
    return "same" if one.mtime_ns == other.mtime_ns else "unknown"


def _file(f: FileRecord) -> Facts:
    names = ("path", "kind", "size", "mode", "uid", "gid", "mtime_ns")
    return {**{name: getattr(f, name) for name in names}, "carried": f.data is not None}
