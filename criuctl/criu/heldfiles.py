"""The files of the images that CRIU will open by path, and how each process holds them.

Every file that a restored process has by a path is a ``reg`` entry of files.img: regular files,
folders, devices, and the path of a FIFO (its ``fifo`` entry names it). Processes refer to these
entries by descriptor (fdinfo), as mappings and program (mm) and as working and root folder (fs). An
entry that nothing refers to is being sent over a unix socket (SCM_RIGHTS).

Left out are terminals, which are made again, and deleted files, which CRIU makes again or links to
(`DELETED`: kept apart, because their paths only say where they are made).

CRIU can be given a descriptor for an entry (``ext``): it opens the inherited descriptor whose key
is the entry's name through ``/proc/self/fd``, with the entry's own flags and position, so that each
entry is a separate open file and no name is looked up. `hand_over` requests that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ..proc.credentials import Credentials
from .images import ImageSet, path_of, read
from .ttyimages import own_nodes

Role = Literal["descriptor", "mapping", "program", "working folder", "root folder"]
_OF_FILE = 1 << 6 | 1 << 7  # VMA_FILE_PRIVATE, VMA_FILE_SHARED: a vma's status


class Use(Struct, frozen=True):
    """One way in which a process holds a file."""

    pid: int  # the tree's own number
    role: Role
    number: int = 0  # number of a descriptor; first address of a mapping
    flags: int = 0  # as of open(2)

    def __str__(self) -> str:
        number = {"descriptor": f" {self.number}", "mapping": f" at {self.number:x}"}
        return f"{self.role}{number.get(self.role, '')}"


class HeldFile(Struct, frozen=True):
    """An entry of files.img that CRIU opens by its path, and how it is held."""

    id: int
    path: str
    mode: int  # 0: not recorded
    flags: int  # as of open(2)
    uses: tuple[Use, ...]  # none: it is being sent over a socket
    external: bool = False  # a descriptor is inherited for it already
    deleted: bool = False
    mount: int = -1  # the id, at the dump, of the mount that it is on; -1: not recorded


def held_files(images: ImageSet) -> list[HeldFile]:
    """Return every file that CRIU opens by a path."""
    entries = images.files()
    flags = {e.id: e.reg.flags for e in entries if e.HasField("reg")}
    uses = _uses(images, flags)
    gone = images.remapped() | {number for found in images.linked().values() for number, _ in found}
    nodes = own_nodes(images)
    for entry in entries:
        for kind in (entry.fifo, entry.tty):
            if kind.HasField("regf_id") and kind.regf_id not in nodes:
                opened = uses.setdefault(kind.regf_id, [])
                mode = flags.get(kind.regf_id, 0)
                opened += [replace(use, flags=mode) for use in uses.get(entry.id, ())]
    return [
        HeldFile(
            id=entry.id,
            path=path_of(entry.reg),
            mode=entry.reg.mode if entry.reg.HasField("mode") else 0,
            flags=entry.reg.flags,
            uses=tuple(uses.get(entry.id, ())),
            external=entry.reg.ext,
            deleted=entry.id in gone,
            mount=entry.reg.mnt_id if entry.reg.HasField("mnt_id") else -1,
        )
        for entry in entries
        if entry.HasField("reg") and (entry.id not in nodes or uses.get(entry.id))
    ]


def _uses(images: ImageSet, flags: Mapping[int, int]) -> dict[int, list[Use]]:
    found: dict[int, list[Use]] = {}
    for number, held in images.holders().items():
        found[number] = [Use(pid, "descriptor", fd, flags.get(number, 0)) for pid, fd in held]
    names = set(images.names())
    for pid in images.pids():
        if f"mm-{pid}.img" in names:
            for memory in read(images.folder, f"mm-{pid}.img", "MM"):
                found.setdefault(memory.exe_file_id, []).append(Use(pid, "program"))
                for area in memory.vmas:
                    if area.status & _OF_FILE:
                        use = Use(pid, "mapping", area.start, area.fdflags)
                        found.setdefault(area.shmid, []).append(use)
        if f"fs-{pid}.img" in names:
            for place in read(images.folder, f"fs-{pid}.img", "FS"):
                found.setdefault(place.cwd_id, []).append(Use(pid, "working folder", 0, os.O_PATH))
                found.setdefault(place.root_id, []).append(Use(pid, "root folder", 0, os.O_PATH))
    return found


class OwnIds(Struct, frozen=True):
    """The user and groups by which the kernel judges a process's file access.

    As its own user namespace numbers them.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]


def own_ids(images: ImageSet) -> dict[int, OwnIds]:
    """Return the ids of each process that has not ended, by the tree's own PIDs."""
    found = {}
    for pid, creds in _creds(images):
        found[pid] = OwnIds(creds.fsuid, creds.fsgid, tuple(creds.groups))
    return found


def credentials(images: ImageSet) -> dict[int, Credentials]:
    """Return the credentials that each process that has not ended will have, as we number users.

    By the tree's own PIDs. CRIU sets them last: in post-restore the processes still have root's.
    """
    within = next((n for n in images.names() if re.fullmatch(r"userns-\d+\.img", n)), None)
    uids, gids = _id_maps(images, within) if within is not None else ((), ())
    found = {}
    for pid, creds in _creds(images):
        effective = sum(word << 32 * n for n, word in enumerate(creds.cap_eff))
        found[pid] = Credentials(
            uid=_outer(creds.fsuid, uids),
            gid=_outer(creds.fsgid, gids),
            groups=frozenset(_outer(group, gids) for group in creds.groups),
            capabilities=0 if within is not None else effective,
        )
    return found


def _creds(images: ImageSet) -> Iterator[tuple[int, Any]]:
    names = set(images.names())
    for pid in images.pids():
        if f"mm-{pid}.img" in names:
            yield pid, read(images.folder, f"core-{pid}.img", "CORE")[0].thread_core.creds


_Map = tuple[tuple[int, int, int], ...]  # first id inside, first id here, count


def _id_maps(images: ImageSet, name: str) -> tuple[_Map, _Map]:
    entry = read(images.folder, name, "USERNS")[0]

    def ranges(extents: Any) -> _Map:
        return tuple((one.first, one.lower_first, one.count) for one in extents)

    return ranges(entry.uid_map), ranges(entry.gid_map)


def _outer(number: int, extents: _Map) -> int:
    for first, low, count in extents:
        if first <= number < first + count:
            return low + number - first
    return number


def is_bad_flag(flags: int) -> bool:
    """Return whether open(2) with these flags makes or truncates files.

    The kernel never shows such flags for an open file.
    """
    return bool(flags & (os.O_CREAT | os.O_TRUNC | os.O_EXCL))


def hand_over(images: ImageSet, descriptors: Mapping[int, int]) -> dict[str, int]:
    """Make CRIU open these descriptors, by the ids of files, instead of paths.

    Returns key -> descriptor, to be inherited.
    """
    if not descriptors:
        return {}
    keys: dict[str, int] = {}

    def edit(entry: Any) -> None:
        if entry.id not in descriptors or not entry.HasField("reg"):
            return
        # Only a key here, the same for the same descriptor: CRIU closes each that it has taken.
        entry.reg.name = f"/{descriptors[entry.id]:x}.criuctl"
        entry.reg.ext = True
        entry.reg.flags &= ~os.O_NOFOLLOW  # the path is a link of /proc now
        keys[entry.reg.name] = descriptors[entry.id]

    images.edit_files(edit)
    return keys
