"""Check that the programs and libraries that are to travel can be shown on a host without them.

There a restore lays them over their folder, which is read-only then (`files.carried_binaries`).  A
host that has the same file would not need that; the dump cannot know which hosts have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...files import carried_binaries
from ...quoting import quoted
from ...report import Finding
from .scene import Scene


def check_carried(scene: Scene) -> Iterator[Finding]:
    """Check the folders of all mapped files; those of `with_files` are put back instead."""
    files = [d.target for _, d in scene.descriptors() if d.kind == "file" and d.writable]
    files += [path for path in scene.with_files if os.path.isfile(path)]
    written = {os.path.dirname(path): path for path in files}
    paths = {
        m.path: process.pid
        for process, m in scene.mappings()
        if m.inode and not m.deleted and m.path.startswith("/") and not m.path.startswith("/dev/")
    }
    for path, pid in sorted(paths.items()):
        folder = os.path.dirname(path)
        if path in files or scene.named(path) or not os.path.isdir(folder):
            continue
        if folder in written:
            reason = f"{written[folder]} in that folder is written to"
            problem = reason, f"Take it along with --with-files {quoted(path)}."
        elif (obstacle := carried_binaries.obstacle(path)) is not None:
            problem = obstacle
        else:
            continue
        text = f"{path} could not be shown on a host that lacks it (--carry-binaries): {problem[0]}"
        yield Finding("error", "carried-binary", text, problem[1], pid=pid)
