"""Check memory that the tree shares with processes outside: through files, or since a fork."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from ...errors import CriuctlError
from ...files import shared_mappings
from ...files.copies import writers_to
from ...proc.procfs import all_pids
from ...proc.tree import Process, mappings
from ...report import Finding
from .scene import Scene


class _Shared(Struct):
    """A file with a name, mapped shared and writable."""

    process: Process
    path: str


def check_shared_mappings(scene: Scene) -> Iterator[Finding]:
    """Report memory of the tree to which processes outside write."""
    found = _files(scene)
    outside = writers_to({inode: [file.path] for inode, file in found.items()}, but=scene.by_pid)
    others = [(found[inode], pid) for inode, pid in outside.items() if scene.outside(pid)]
    if others:
        (file, pid), more = (
            others[0],
            f" (and {len(others) - 1} more such files)" if others[1:] else "",
        )
        yield Finding(
            "warning",
            "shared-outside",
            f"{file.process} shares memory through {file.path}, which {scene.command_of(pid)} "
            "outside the tree writes to as well: what it writes after the freeze cannot be "
            f"kept{more}",
            "Dump what shares it as one tree.",
            pid=file.process.pid,
        )
    yield from _nameless(scene)


def _nameless(scene: Scene) -> Iterator[Finding]:
    """Report memory that is shared with a process outside through no named file: after a restore
    the tree has a copy.
    """
    sought: dict[tuple[int, int], tuple[Process, str]] = {}
    for process, m in scene.mappings():
        if m.shared and m.deleted:
            sought.setdefault((m.device, m.inode), (process, m.path))
    found: dict[tuple[int, int], int] = {}
    for pid in (pid for pid in all_pids() if sought and pid not in scene.by_pid):
        with suppress(CriuctlError, OSError):
            shared = {(m.device, m.inode) for m in mappings(pid) if m.shared and m.deleted}
            found |= dict.fromkeys(shared & sought.keys(), pid)
    others = [(sought[key], pid) for key, pid in found.items() if scene.outside(pid)]
    if others:
        (process, path), pid = others[0]
        more = f" (and {len(others) - 1} more such mappings)" if others[1:] else ""
        what = "" if path == "/dev/zero" else f" of {path} (deleted)"
        yield Finding(
            "warning",
            "shared-outside",
            f"{process} shares memory{what} with {scene.command_of(pid)} outside the tree{more}:"
            " after a restore the tree has its own, as it was at the freeze",
            "Dump what shares it as one tree.",
            pid=process.pid,
        )


def _files(scene: Scene) -> dict[tuple[int, int], _Shared]:
    """Return each file once, by device and inode, with a process that has it mapped."""
    found: dict[tuple[int, int], _Shared] = {}
    seen: set[tuple[int, int, str]] = set()
    for process, m in scene.mappings():
        key = (m.device, m.inode, m.path)
        if key in seen or m.deleted or not m.path.startswith("/"):
            continue
        if not shared_mappings.writes(process.pid, m):
            continue
        seen.add(key)
        with suppress(OSError):
            fd = os.open(shared_mappings.behind(process.pid, m), os.O_PATH | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
            if stat.S_ISREG(status.st_mode):
                file = _Shared(process, m.path)
                found.setdefault((status.st_dev, status.st_ino), file)
    return found
