"""For restored programs: the identity of this process and the state of its connections. Standard
library only.

    from criuctl import inside

    inside.identity()  # {"session": "web", "incarnation": 3, "checkpoint": "...",
                       #  "restored": "2025-..."}, or None
    inside.report()    # the same, with "connections": the outcome of each connection, as in
                       # `criuctl restore --json`

A restore leaves one small file for the tree before any process of it runs, named after the PID
namespace and the PID of the tree's root. A process finds it by walking up its ancestors. The file
is readable by all users and holds no secret. None means that no ancestor was restored by criuctl,
or that the file is not visible from here (another root folder).

This module may be copied: it imports nothing of criuctl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["identity", "report"]

_RUN_DIR = "/run/criuctl"  # only root can create files in it
_IDENTITY = ("session", "incarnation", "checkpoint", "restored")


def report() -> dict[str, Any] | None:
    """Return the report of this tree's last restore; None for a process that was never restored."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        times = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return None
    configured = os.environ.get("CRIUCTL_RUN_DIR")
    folders = (configured, _RUN_DIR) if configured else (_RUN_DIR,)
    for pid, started in _ancestors():
        for folder in folders:
            found = _read(os.path.join(folder, "inside", f"{namespace}-{pid}.json"))
            # Outside criuctl's time namespace, start times are counted from another moment.
            if found is not None and (
                found.get("start_time") == started or found.get("time_namespace") != times
            ):
                return found
    return None


def identity() -> dict[str, Any] | None:
    """Return session, incarnation and checkpoint of this process, and when it was restored; None if
    it was not.
    """
    found = report()
    return None if found is None else {key: found.get(key) for key in _IDENTITY}


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _ancestors() -> Iterator[tuple[int, int]]:
    """Return PID and start time of this process, its parent and so on, as far as they are
    visible.
    """
    pid = os.getpid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            return
        yield pid, int(words[19])
        pid = int(words[1])
