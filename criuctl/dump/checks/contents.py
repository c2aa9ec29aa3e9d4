"""Check files that the tree writes to and whose contents are not taken along."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from ...errors import NoSuchProcess
from ...files import databases, shared_mappings
from ...files.recording import mark_small
from ...files.used_files import open_files
from ...namespaces.plan import saved_devices
from ...quoting import quoted
from ...report import Finding
from .scene import Scene

_NAMED = 3  # files


class _Left(Struct):
    """Files of one kind whose contents stay behind."""

    paths: list[tuple[int, str]] = []  # size, path

    def __str__(self) -> str:
        largest = sorted(self.paths, reverse=True)
        names = ", ".join(path for _size, path in largest[:_NAMED])
        return f"{self.mib} MiB: {names}{', ...' if largest[_NAMED:] else ''}"

    @property
    def count(self) -> str:
        """Return the number of files, as a phrase."""
        return f"{len(self.paths)} files" if self.paths[1:] else "a file"

    @property
    def mib(self) -> int:
        """Return their size."""
        return -(-sum(size for size, _path in self.paths) >> 20)

    @property
    def option(self) -> str:
        """Return the option that takes them along."""
        return (
            "--with-files "
            f"{quoted(max(self.paths)[1])}{' (and the others)' if self.paths[1:] else ''}"
        )


def check_contents(scene: Scene) -> Iterator[Finding]:
    """Report which restores will be refused once such a file has changed or is gone."""
    disk, memory, stay = _left_behind(scene)
    if memory.paths:
        yield Finding(
            "warning",
            "shared-memory-large",
            f"the tree shares memory through {memory.count} on a file system in memory whose "
            f"contents are not taken along ({memory}), as shared_memory_max_mib is "
            f"{scene.config.shared_memory_max_mib}: a restore is refused once one of them has "
            "changed or is gone, as when the host starts again",
            f"Take them along with {memory.option}, or raise shared_memory_max_mib.",
            pid=scene.root.pid,
        )
    if disk.paths:
        yield Finding(
            "info",
            "contents-stay",
            f"the tree has {disk.count} open for writing whose contents are not taken along "
            f"({disk}): a restore is refused once one of them is gone, or has changed otherwise "
            "than by being appended to",
            f"Take them along with {disk.option}, or with `files: carry`.",
            pid=scene.root.pid,
        )
    yield from _databases(scene, stay)


def _databases(scene: Scene, stay: dict[str, list[str]]) -> Iterator[Finding]:
    """Report databases with files that are not taken along; a tree that is left running changes
    them itself.
    """
    for database, paths in sorted(stay.items()):
        yield Finding(
            "warning" if scene.leave_running else "info",
            "database-stays",
            f"the tree is the server of the database in {database}, whose files are not all "
            "taken along: a restore is refused once it, or another server, has changed one of "
            "them",
            f"Take all of them along with {databases.option(database, paths)} if the database "
            "goes on before the restore.",
            pid=scene.root.pid,
        )


def _left_behind(scene: Scene) -> tuple[_Left, _Left, dict[str, list[str]]]:
    """Return the files left behind on disks and in memory, by the rules of
    `criuctl.files.recording.collect`; and databases.
    """
    saved: frozenset[int] = frozenset()
    with suppress(NoSuchProcess):  # its first thread has ended
        saved = saved_devices(scene.root.pid)
    found = [
        entry
        for key, entry in open_files(scene.opened, scene.mapped).items()
        if key[0] not in saved
    ]
    written = [entry for entry in found if entry.kind == "written"]
    entries = [entry for entry in written if not scene.named(entry.path)]
    mark_small(scene.config, entries)
    disk, memory = _Left(), _Left()
    whose = databases.databases(scene.root.pid, [entry.path for entry in written])
    unnamed = {database for database in whose.values() if not scene.named(database)}
    folders = {
        database for database in unnamed if databases.has_closed_files(scene.root.pid, database)
    }
    for entry in entries:
        with suppress(OSError):
            fd = os.open(entry.source, os.O_PATH | os.O_CLOEXEC)
            try:
                size, in_memory = (
                    os.fstat(fd).st_size,
                    entry.shared and shared_mappings.in_memory(fd),
                )
            finally:
                os.close(fd)
            travels = in_memory and shared_mappings.travels(scene.config, size)
            travels = travels or (
                scene.config.files == "carry" and size <= scene.config.files_max_mib << 20
            )
            if not (entry.small or travels):
                (memory if in_memory else disk).paths.append((size, entry.path))
    left = {path for _size, path in disk.paths}
    # Some servers need more files than those that they have open.
    lost = {database for path, database in whose.items() if path in left} | folders
    return (
        disk,
        memory,
        {one: sorted(path for path, database in whose.items() if database == one) for one in lost},
    )
