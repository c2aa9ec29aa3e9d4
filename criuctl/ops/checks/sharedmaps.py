"""Memory that the tree shares through a file, with others outside or too large to be taken along."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from ...errors import CriuctlError
from ...proc.procfs import all_pids
from ...proc.tree import Process, mappings
from ...quoting import quoted
from ...report import Finding
from ..openfiles import sharedmaps
from ..openfiles.besides import writers_to
from .scene import Scene

_NAMED = 8  # findings of one kind


class _Shared(Struct):
    """A file with a name, mapped shared and writable."""

    process: Process
    path: str
    size: int
    in_memory: bool


def check_shared_mappings(scene: Scene) -> Iterator[Finding]:
    """Files that are memory of the tree: what others write to them, and what does not travel."""
    found = _files(scene)
    outside = writers_to({inode: [file.path] for inode, file in found.items()}, but=scene.by_pid)
    others = [(found[inode], pid) for inode, pid in outside.items() if scene.outside(pid)]
    for file, pid in others[:_NAMED]:
        more = f" (and {len(others) - _NAMED} more such files)" if len(others) > _NAMED else ""
        yield Finding(
            "warning",
            "shared-outside",
            f"{file.process} shares memory through {file.path}, which {scene.command_of(pid)} outside the tree"
            f" writes to as well: what it writes after the freeze cannot be kept{more}",
            "Dump what shares it as one tree.",
            pid=file.process.pid,
        )
    yield from _nameless(scene)
    limit = scene.config.shared_memory_max_mib
    large = [file for file in found.values() if file.in_memory and not _taken_along(scene, file)]
    for file in large[:_NAMED]:
        more = f" (and {len(large) - _NAMED} more such files)" if len(large) > _NAMED else ""
        yield Finding(
            "warning",
            "shared-memory-large",
            f"{file.process} shares memory through {file.path} ({file.size >> 20} MiB, on a file system in memory):"
            f" its contents are not taken along, as shared_memory_max_mib is {limit}, and a restore is refused"
            f" once it has changed or is gone, as when the host starts again{more}",
            f"Take it along with --with-files {quoted(file.path)}, or raise shared_memory_max_mib.",
            pid=file.process.pid,
        )


def _nameless(scene: Scene) -> Iterator[Finding]:
    """Memory shared with a process outside without a file that has a name: the tree has its own after a restore."""
    sought: dict[tuple[int, int], tuple[Process, str]] = {}
    for process, m in scene.mappings():
        if m.shared and m.deleted:
            sought.setdefault((m.device, m.inode), (process, m.path))
    found: dict[tuple[int, int], int] = {}
    for pid in (pid for pid in all_pids() if sought and pid not in scene.by_pid):
        with suppress(CriuctlError, OSError):
            theirs = {(m.device, m.inode) for m in mappings(pid) if m.shared and m.deleted}
            found |= dict.fromkeys(theirs & sought.keys(), pid)
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
    """Device and inode -> each of them once, with a process that has it mapped."""
    found: dict[tuple[int, int], _Shared] = {}
    seen: set[tuple[int, int, str]] = set()
    for process, m in scene.mappings():
        key = (m.device, m.inode, m.path)
        if key in seen or m.deleted or not m.path.startswith("/"):
            continue
        if not sharedmaps.writes(process.pid, m):
            continue
        seen.add(key)
        with suppress(OSError):
            fd = os.open(sharedmaps.behind(process.pid, m), os.O_PATH | os.O_CLOEXEC)
            try:
                status, memory = os.fstat(fd), sharedmaps.in_memory(fd)
            finally:
                os.close(fd)
            if stat.S_ISREG(status.st_mode):
                file = _Shared(process, m.path, status.st_size, memory)
                found.setdefault((status.st_dev, status.st_ino), file)
    return found


def _taken_along(scene: Scene, file: _Shared) -> bool:
    """By itself, by ``files: carry`` or by --with-files."""
    if sharedmaps.travels(scene.config, file.size):
        return True
    if scene.config.files == "carry" and file.size <= scene.config.files_max_mib << 20:
        return True
    return any(file.path == f or file.path.startswith(f"{f.rstrip('/')}/") for f in scene.with_files)
