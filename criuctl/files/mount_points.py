"""The disks on which files were, so that none is put back below the mount point of a disk that is
not mounted.

A missing folder is made when a file in it is put back.  If the disk is not mounted, that folder
would be made on the file system below, and be hidden as soon as the disk is mounted again.  So a
record names the mount point of its file, and on the host of the dump such a file is refused while
nothing is mounted there (`judged`).  File systems in memory are left out: they are empty after a
reboot, and their files are to be made again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..checkpoint.file_records import FileRecord
from ..errors import NoSuchProcess, PreflightRefused
from ..proc.mounts import read_mounts
from ..quoting import quoted

if TYPE_CHECKING:
    from .judgement import Judgement

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def named(root_pid: int, records: Iterable[FileRecord]) -> list[FileRecord]:
    """Return the records, with the mount points of those that may be put back."""
    points: dict[str, str] = {}
    with suppress(NoSuchProcess, PreflightRefused, OSError):
        # the last mount at a place is the visible one
        points = {mount.point: mount.kind for mount in read_mounts(root_pid)}
    return [
        record.with_use(mount=point)
        if record.kind in ("written", "carried") and (point := _point(record.path, points))
        else record
        for record in records
    ]


def _point(path: str, points: dict[str, str]) -> str:
    """Return the mount point of the disk that a path is on; "" for the root's and for one in
    memory.
    """
    folder = path
    while (folder := os.path.dirname(folder)) != "/":
        if folder in points:
            return folder if points[folder] not in _IN_MEMORY else ""
    return ""


def judged(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Return the judgements on the host of the dump, with those refused that would be put back
    below a missing mount.
    """
    judgements = list(judgements)
    if not any(j.verdict == "put-back" and j.record.mount for j in judgements):
        return judgements
    here = {mount.point for mount in read_mounts()}
    away = [j for j in judgements if j.verdict == "put-back" and _is_away(j.record, here)]
    first = {j.record.mount: j for j in reversed(away)}  # one finding reports all of it
    counts = Counter(j.record.mount for j in away)
    settled = {id(j): _refused(j, counts[j.record.mount] - 1) for j in first.values()}
    settled |= {id(j): replace(j, verdict="moved-on", why="") for j in away if id(j) not in settled}
    return [settled.get(id(j), j) for j in judgements]


def _is_away(record: FileRecord, here: Collection[str]) -> bool:
    """Return whether the disk is not mounted and nothing has taken its place."""
    if not record.mount or record.mount in here:
        return False
    if not os.path.isdir(os.path.dirname(record.path)):
        return True
    try:
        return not os.listdir(record.mount)  # an empty mount point
    except OSError:
        return True


def _refused(judgement: Judgement, others: int) -> Judgement:
    point = judgement.record.mount
    more = f" (and {others} more files)" if others else ""
    why = (
        f"was on the file system mounted at {point}{more}, and nothing is mounted there: put "
        "back, it would lie below it"
    )
    return replace(judgement, verdict="refuse", why=why, hint=f"Mount it: `mount {quoted(point)}`.")
