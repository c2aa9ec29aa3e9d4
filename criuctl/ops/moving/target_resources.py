"""Checks of what an arriving tree uses up on this host: terminals, memory, and disk space.

They compare what the source has measured with what is free now. Both may change before the tree
arrives, so a check saves the source a freeze in vain, and does not replace the errors of the
restore.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...proc.procfs import memory_info, read_raw
from ...proc.scratch import Scratch
from ...report import Finding
from .arrival import Arrival

_MIB = 1 << 20


def terminals(coming: Arrival) -> Iterator[Finding]:
    """Check that its terminals exist, and that enough pseudo-terminals are free."""
    pts = [t for t in coming.needs.terminals if t.kind == "pts"]
    for terminal in coming.needs.terminals:
        if terminal.kind != "pts" and terminal.path and not os.path.exists(terminal.path):
            pid, fd = terminal.holders[0] if terminal.holders else (None, None)
            text = f"{terminal.path}: a terminal of the tree does not exist here"
            yield Finding(
                "error",
                "terminal",
                text,
                "Have the program run on a pseudo-terminal (`criuctl run`).",
                pid,
                fd,
            )
    with suppress(FileNotFoundError):
        used, most = (int(read_raw(f"/proc/sys/kernel/pty/{name}")) for name in ("nr", "max"))
        if most - used < len(pts):
            text = f"the tree needs {len(pts)} pseudo-terminals, {most - used} are free here"
            yield Finding("error", "terminals", text, "`sysctl kernel.pty.max` is the limit.")


def memory(coming: Arrival) -> Iterator[Finding]:
    """Check that its memory fits, also while the plain images lie in memory."""
    wanted = coming.needs.memory
    info = memory_info()
    free = sum(
        int(info[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree") if key in info
    )
    if wanted > free:
        text = (
            f"the tree has {wanted // _MIB} MiB in memory, {free // _MIB} MiB of memory and swap "
            "are free here"
        )
        yield Finding(
            "error", "memory", text, "End something here, or give the host more memory or swap."
        )
        return
    with Scratch() as scratch:
        free = scratch.free_bytes()
    if wanted > free:
        text = (
            f"the tree has {wanted // _MIB} MiB in memory; plain images lie in memory too, where "
            f"{free // _MIB} MiB fit"
        )
        yield Finding("error", "memory", text, "Give the host more memory.")


def room(coming: Arrival) -> Iterator[Finding]:
    """Check the disk space for arriving files, and for the checkpoint in the inbox, which is
    compressed.
    """
    wanted: dict[int, tuple[str, int]] = {}

    def add(path: str, size: int) -> None:
        nearest = next(str(p) for p in (Path(path), *Path(path).parents) if p.exists())
        device = os.stat(nearest).st_dev
        wanted[device] = (
            wanted.get(device, (nearest, 0))[0],
            wanted.get(device, ("", 0))[1] + size,
        )

    coming_bytes = coming.needs.more_bytes
    for needed in coming.needs.files:
        if needed.travels and needed.use != "mapped":
            coming_bytes += needed.blocks
            add(os.path.dirname(needed.path), needed.blocks)
    for place, size in wanted.values():
        free = _free(place)
        if size > free:
            text = (
                f"files of {size // _MIB} MiB come to the file system of {place}, where "
                f"{free // _MIB} MiB are free"
            )
            yield Finding("error", "space", text, "Make room there, or carry fewer files.")
    inbox = next(
        str(p)
        for p in (Path(coming.config.state_dir), *Path(coming.config.state_dir).parents)
        if p.exists()
    )
    most, free = coming.needs.memory + coming_bytes, _free(inbox)
    if most > free:
        text = (
            f"the checkpoint may take {most // _MIB} MiB before compression; {inbox} has "
            f"{free // _MIB} MiB left"
        )
        yield Finding(
            "warning",
            "space",
            text,
            "If it gets full, the tree stays on the source. state_dir may be elsewhere.",
        )


def _free(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
