"""The regular files that a tree has open or mapped, each with all its uses."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from ..proc.descriptors import Descriptor
from ..proc.mappings import Mapping as MappedRange
from ..proc.tree import mappings
from .shared_mappings import behind, writes


class OpenFile(Struct):
    """One file of the tree, gathered over all its descriptors and mappings."""

    path: str
    source: str  # a name under /proc through which it can be opened
    kind: str = "read"
    append: bool = True  # every writer appends
    holders: list[tuple[int, int]] = field(default_factory=list)
    mapped: bool = False
    executable: bool = False  # mapped as code
    shared: bool = False  # mapped so that the tree writes to it
    live: bool = False  # mapped shared: the tree sees what others write to it
    small: bool = False  # travels because it is small
    hashed: bool = False  # only read, and known by its contents
    role: str = ""  # of a file that is only read: see `read_only_files`
    # process and descriptor with a write lease (F_SETLEASE) on it
    leased: tuple[int, int] | None = None
    # further names, hard links, under which it is open or mapped
    others: dict[str, None] = field(default_factory=dict)

    def use(self, pid: int, d: Descriptor) -> None:
        """Add a descriptor of it."""
        self.holders.append((pid, d.fd))
        if d.leased:
            self.leased = (pid, d.fd)
        if d.writable:
            self.kind = "written"
            self.source = f"/proc/{pid}/fd/{d.fd}"
            self.append = self.append and bool(d.flags & os.O_APPEND)

    def also(self, path: str) -> None:
        """Add a name of it, if it is a new one."""
        if path != self.path:
            self.others[path] = None


def open_files(
    opened: Mapping[int, Sequence[Descriptor]],
    mapped: Mapping[int, Sequence[MappedRange]] | None = None,
) -> dict[tuple[int, int], OpenFile]:
    """Return (device, inode) -> every regular file with a name that the processes in `opened` have
    open or mapped.

    `mapped`: their mappings, if they are known.
    """
    found: dict[tuple[int, int], OpenFile] = {}
    # device and inode of a mapping -> those of the file
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    devices: set[tuple[int, int]] = set()  # of mappings of devices
    deleted: list[tuple[int, Descriptor]] = []  # under a name that is gone; perhaps it has others
    for pid, held in opened.items():
        for d in held:
            if (
                d.kind != "file"
                or not d.target.startswith("/")
                or d.target.startswith(("/proc/", "/sys/"))
            ):
                continue
            if d.deleted:
                deleted.append((pid, d))
                continue
            entry = found.setdefault(
                (d.device, d.inode), OpenFile(d.target, f"/proc/{pid}/fd/{d.fd}")
            )
            entry.use(pid, d)
            entry.also(d.target)
        for m in mappings(pid) if mapped is None else mapped.get(pid, ()):
            if not m.inode or m.deleted or not m.path.startswith("/"):
                continue
            key = (m.device, m.inode)
            if key in devices:
                continue
            if key not in seen:
                source = behind(pid, m)
                if not _is_regular(source):
                    devices.add(key)
                    continue
                seen[key] = _key(source, key)
                found.setdefault(seen[key], OpenFile(m.path, source, kind="mapped"))
            entry = found[seen[key]]
            # maps shows a newline as \\012
            if m.path != entry.path and _key(f"/proc/{pid}/root{m.path}", (0, 0)) == seen[key]:
                entry.also(m.path)
            entry.mapped = True
            entry.executable = entry.executable or "x" in m.perms
            entry.live = entry.live or m.shared
            if writes(pid, m):
                entry.kind, entry.append, entry.shared = "written", False, True
    for pid, d in deleted:
        if (d.device, d.inode) in found:
            found[d.device, d.inode].use(pid, d)
    return found


def _key(source: str, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return what ``stat`` shows for a mapped file.

    On overlays and btrfs maps shows another device than descriptors do.
    """
    try:
        status = os.stat(source)
    except OSError:
        return otherwise
    return (status.st_dev, status.st_ino)


def _is_regular(source: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(source).st_mode)
    except OSError:  # as far as can be known
        return True
