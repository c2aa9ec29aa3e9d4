"""What the sessions that run here use at the moment: CPU, memory, processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ..proc import usage


class SessionUsage(Struct, frozen=True):
    """What one session uses."""

    cpu: float  # processors in use since the last look: 1.0 is one of them
    memory: int  # bytes resident
    processes: int


class Meter:
    """Measures again and again; the use of processors is that between two looks."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], tuple[float, float]] = {}

    def look(self, bodies: Iterable[Mapping[str, Any]]) -> dict[str, SessionUsage]:
        """Return the usage of each session among `bodies` (as `sessions.sessions` returns them)
        that has a process. At the first look at a session its ``cpu`` is 0.
        """
        pids = {body["session"]: body["pid"] for body in bodies if body["pid"]}
        found, now = usage.of_trees(pids.values()), time.monotonic()
        looks: dict[tuple[str, int], tuple[float, float]] = {}
        used = {}
        for name, pid in pids.items():
            if pid not in found:
                continue
            tree = found[pid]
            moment, cpu = self._before.get((name, pid), (now, tree.cpu))
            looks[name, pid] = (now, tree.cpu)
            used[name] = SessionUsage(
                cpu=max(0.0, tree.cpu - cpu) / (now - moment) if now > moment else 0.0,
                memory=tree.memory,
                processes=tree.processes,
            )
        self._before = looks
        return used
