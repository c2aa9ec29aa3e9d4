"""The memory that the tasks of a frozen tree do not share with another task, although a fork may
have left it shared.

A private mapping that a task has at the same place as its parent may hold pages of both, until one
of them writes there.  A restore must know the difference: what is shared has to be made before the
fork, as CRIU does it, and all else can be put in place afterwards, by several threads (see
`criuctl.criu.direct`).  The kernel reports for each page whether only this process maps it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..criu.direct import LEAST, Range
from ..criu.pages import PAGE
from ..proc.mappings import each_mapping
from ..proc.memory import TaskMemory
from ..proc.tree import Process


def own_memory(tree: Sequence[Process]) -> dict[int, list[Range]]:
    """Return the large parts of such mappings that no other task maps, ascending, for each task by
    its PID in its namespace.
    """
    areas = {process.pid: _areas(process.pid) for process in tree if not process.zombie}
    family: dict[int, set[Range]] = {pid: set() for pid in areas}
    for process in tree:
        both = areas.get(process.pid, set()) & areas.get(process.ppid, set())
        for pid in (process.pid, process.ppid) if both else ():
            family[pid] |= both
    found = {}
    for process in tree:
        if family.get(process.pid):
            with TaskMemory(process.pid) as memory:
                parts = [part for area in sorted(family[process.pid]) for part in memory.own(*area)]
            found[process.ns_pid] = [
                (start, end) for start, end in parts if end - start >= LEAST * PAGE
            ]
    return found


def _areas(pid: int) -> set[Range]:
    """Return the large mappings that may be private, anonymous and writable."""
    return {
        (m.start, m.end)
        for m in each_mapping(pid)
        if m.perms == "rw-p" and not m.inode and m.size >= LEAST * PAGE
    }
