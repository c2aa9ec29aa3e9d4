"""The processors that each thread may run on (`taskset`): CRIU does not save them, and its restored
threads have criuctl's.

Noted at the dump for every thread that may run on fewer processors than init; set again in
post-restore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ..checkpoint.manifest import ProcessRecord
from ..proc.procfs import inner_thread
from ..report import Reporter
from .base import Repair, RestoredTree

_INIT = 1


def everywhere() -> set[int]:
    """Return the processors that a process without such a setting may run on."""
    try:
        return os.sched_getaffinity(_INIT)
    except OSError:
        return set(range(os.cpu_count() or 1))


def bound(pid: int, threads: int, default: set[int]) -> dict[str, str]:
    """Return the threads of this process that may not run everywhere: ID in their namespace ->
    processors, as in ``2,5``.
    """
    found: dict[str, str] = {}
    with suppress(OSError):  # it has ended
        for tid in [pid] if threads == 1 else map(int, os.listdir(f"/proc/{pid}/task")):
            allowed = os.sched_getaffinity(tid)
            if allowed != default:
                found[inner_thread(pid, tid)] = ",".join(map(str, sorted(allowed)))
    return found


class ProcessorAffinity(Repair):
    """sched_setaffinity(2) of each thread."""

    loses = "CRIU 4.2 does not save on which processors a thread may run."

    def mend(self, tree: RestoredTree) -> None:
        """Bind each thread as it was; a warning for processors that this host does not have."""
        _bind(tree.manifest.processes, tree.pids, tree.reporter)


def _bind(records: Iterable[ProcessRecord], pids: Mapping[int, int], reporter: Reporter) -> None:
    default = everywhere()
    inherited = os.sched_getaffinity(0) != default
    for record in records:
        pid = pids.get(record.ns_pid)
        if pid is None or not (record.processors or inherited):
            continue
        lost: set[int] = set()
        with suppress(OSError):
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                text = record.processors.get(inner_thread(pid, tid), "")
                wanted = {int(number) for number in text.split(",") if number.isdecimal()}
                lost |= wanted - default
                os.sched_setaffinity(tid, wanted & default or default)
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            reporter.warning(
                f"PID {record.ns_pid} was bound to processors that this host does not have: {names}"
            )
