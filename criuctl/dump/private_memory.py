"""Which memory the tasks of a frozen tree share with nobody, where a fork may have left them
sharing it.

A private mapping that a task has where its parent has one may hold pages of both, until one of them
writes there.  A restore must know: what is shared has to be made before the fork, as CRIU does it,
and all else can be put in place afterwards, by several threads (see `criuctl.criu.direct`).  The
kernel tells of each page whether this process alone maps it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..criu.direct import LEAST, Range
from ..criu.pages import PAGE
from ..proc.mappings import each_mapping
from ..proc.memory import TaskMemory
from ..proc.tree import Process


def own_memory(tree: Sequence[Process]) -> dict[int, list[Range]]:
    """Of each task, by its own PID, the large parts of such mappings in which no page is another's
    as well, ascending.
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
    """The large mappings that may be private, anonymous and writable."""
    return {
        (m.start, m.end)
        for m in each_mapping(pid)
        if m.perms == "rw-p" and not m.inode and m.size >= LEAST * PAGE
    }
