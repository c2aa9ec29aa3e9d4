"""CPU time and memory of process trees, of any number of them from one look at /proc.

The CPU time of a tree is that of its processes and of those children of theirs that have ended and
were waited for, so it does not fall when a process of the tree ends.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from ..errors import NoSuchProcess
from .procfs import all_pids, read_bytes


class Usage(NamedTuple):
    """What the processes of a tree use."""

    cpu: float  # seconds since the processes began
    memory: int  # bytes resident, shared pages counted for each process
    processes: int


class _Used(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    ppid: int
    ticks: int
    pages: int


def of_trees(roots: Collection[int]) -> dict[int, Usage]:
    """Return the usage of the tree below each of these PIDs; those that do not exist are left
    out.
    """
    found: dict[int, _Used] = {}
    below: dict[int, list[int]] = {}
    for pid in all_pids() if roots else ():
        try:
            data = read_bytes(pid, "stat")
        except NoSuchProcess:
            continue
        fields = data[data.rindex(b")") + 2 :].split()
        used = _Used(int(fields[1]), sum(map(int, fields[11:15])), int(fields[21]))
        found[pid] = used
        below.setdefault(used.ppid, []).append(pid)
    return {root: _sum(root, found, below) for root in roots if root in found}


def _sum(root: int, found: dict[int, _Used], below: dict[int, list[int]]) -> Usage:
    tree = [root]
    for pid in tree:  # grows meanwhile
        tree += below.pop(pid, ())
    return Usage(
        cpu=sum(found[pid].ticks for pid in tree) / os.sysconf("SC_CLK_TCK"),
        memory=sum(found[pid].pages for pid in tree) * os.sysconf("SC_PAGE_SIZE"),
        processes=len(tree),
    )
