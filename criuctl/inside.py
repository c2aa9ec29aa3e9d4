"""For programs that were restored: who am I now, and what became of my connections?  Standard
library only.

    from criuctl import inside

    inside.identity()  # {"session": "web", "incarnation": 3, "checkpoint": "...", "restored":
    "2025-..."}, or None inside.report()    # the same, with "connections": what `criuctl restore
    --json` said of each

A restore leaves one small file for the tree before any of it runs, named after the PID namespace
and the PID of the tree's root, and a process finds it by walking up its ancestors.  It is readable
by everybody and holds no secret.  None means: no ancestor was restored by criuctl, or the file
cannot be seen from here (another root folder).

This module may be copied: it imports nothing of criuctl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["identity", "report"]

_RUN_DIR = "/run/criuctl"  # in which nobody but root can leave anything
_IDENTITY = ("session", "incarnation", "checkpoint", "restored")


def report() -> dict[str, Any] | None:
    """All that the last restore of this tree has to tell; None for a process that was never
    restored.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        times = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return None
    configured = os.environ.get("CRIUCTL_RUN_DIR")
    folders = (configured, _RUN_DIR) if configured else (_RUN_DIR,)
    for pid, started in _ancestors():
        for folder in folders:
            told = _read(os.path.join(folder, "inside", f"{namespace}-{pid}.json"))
            # Elsewhere than in criuctl's time namespace, start times are counted from another
            # moment.
            if told is not None and (
                told.get("start_time") == started or told.get("time_namespace") != times
            ):
                return told
    return None


def identity() -> dict[str, Any] | None:
    """Which session, incarnation and checkpoint this process is of, and when it was restored."""
    told = report()
    return None if told is None else {key: told.get(key) for key in _IDENTITY}


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            told = json.load(file)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _ancestors() -> Iterator[tuple[int, int]]:
    """PID and start time of this process, its parent and so on, as far as they can be seen."""
    pid = os.getpid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            return
        yield pid, int(words[19])
        pid = int(words[1])
