"""Restore memory in one go if a process has it at the same place as its parent but shares none.

A private mapping that a child has where its parent has one may be left from fork(2): pages that
both still share. CRIU finds out at the restore. It gives the child the parent's pages, reads the
child's own one by one, and compares each pair; those that differ are copied, at a page fault each
(criu/mem.c, ``restore_priv_vma_content``), and counted in its log. Where nothing is shared, as with
memory that each process of a pool has filled for itself, that takes three times as long as reading
it.

So before a restore the pages of such mappings are compared here, one of each 256 KiB. Where no pair
is equal, the child's mapping is cut in two in its image: CRIU takes a mapping for inherited only
where both ends are the parent's. The kernel merges the two when they are mapped, since they differ
in nothing else.

Only the way in which the memory is restored depends on it, and whether pages are shared: pages that
a sample misses, a few in a hundred at most, are not shared any more.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .direct import Task, plain
from .images import write
from .pages import PAGE, PagemapEntry

WORTHWHILE = 256  # pages of a mapping, from which on it is compared
_STRIDE = 64  # one page in so many is compared
_FEWEST, _MOST = 16, 256  # pages compared per mapping
_SCATTER = 2654435761  # spreads the compared pages over their strides


class TaskPages:
    """The pages of one task: its runs, whose pages lie in the file `fd` in this order."""

    def __init__(self, fd: int, entries: Sequence[PagemapEntry]) -> None:
        self._fd = fd
        self._entries = entries
        self._starts = [entry.vaddr for entry in entries]
        self._offsets: list[int] = []
        offset = 0
        for entry in entries:
            self._offsets.append(offset)
            offset += entry.pages * PAGE

    def page(self, vaddr: int) -> bytes | None:
        """Return the page at this address; None if there is none."""
        number = bisect_right(self._starts, vaddr) - 1
        if number < 0 or vaddr >= self._starts[number] + self._entries[number].pages * PAGE:
            return None
        return os.pread(self._fd, PAGE, self._offsets[number] + vaddr - self._starts[number])

    def sample(self, start: int, end: int) -> Iterator[int]:
        """Yield addresses of some pages between these two, spread over all existing ones."""
        runs = [
            (max(entry.vaddr, start), min(entry.vaddr + entry.pages * PAGE, end))
            for entry in self._entries
            if entry.vaddr < end and start < entry.vaddr + entry.pages * PAGE
        ]
        total = sum(stop - begin for begin, stop in runs) // PAGE
        wanted = min(max(total // _STRIDE, _FEWEST), _MOST, total)
        before = 0  # pages of the previous runs
        runs.reverse()
        for number in range(wanted):
            first, last = total * number // wanted, total * (number + 1) // wanted
            place = first + number * _SCATTER % (last - first)
            while place >= before + (runs[-1][1] - runs[-1][0]) // PAGE:
                begin, stop = runs.pop()
                before += (stop - begin) // PAGE
            yield runs[-1][0] + (place - before) * PAGE


def part(folder: int, tree: Sequence[Task], tasks: Mapping[int, TaskPages]) -> int:
    """Cut the mappings in the images in `folder` that are not shared with a parent.

    `tasks`: by CRIU's PID. Returns how many were cut.
    """
    parts = 0
    # for each process: its mappings, and whether they are cut
    cuts: dict[int, dict[tuple[int, int], bool]] = {}
    programs: dict[int, int] = {}
    for task in tree:
        if task.pid not in tasks:
            continue
        memory = task.memory
        programs[task.pid] = memory.exe_file_id
        # else CRIU does not compare them
        related = programs.get(task.ppid) == memory.exe_file_id
        above = cuts.get(task.ppid, {}) if related else {}
        own = cuts[task.pid] = {}
        for vma in memory.vmas:
            if plain(vma) and vma.end - vma.start >= WORTHWHILE * PAGE:
                own[vma.start, vma.end] = False
                cut = above.get((vma.start, vma.end))
                if cut is not None:
                    # A shared mapping must have the ends of the parent's, and an unshared one must
                    # not.
                    own[vma.start, vma.end] = cut is _share(
                        tasks[task.pid], tasks[task.ppid], vma.start, vma.end
                    )
        if any(own.values()):
            parts += sum(own.values())
            _cut(memory, own)
            write(folder, f"mm-{task.pid}.img", "MM", [memory])
    return parts


def _share(child: TaskPages, parent: TaskPages, start: int, end: int) -> bool:
    """Return whether any of the compared pages is equal in both."""
    return any(child.page(vaddr) == parent.page(vaddr) for vaddr in child.sample(start, end))


def _cut(memory: Any, cuts: Mapping[tuple[int, int], bool]) -> None:
    vmas = []
    for vma in memory.vmas:
        first = type(vma)()
        first.CopyFrom(vma)
        vmas.append(first)
        if cuts.get((vma.start, vma.end)):
            rest = type(vma)()
            rest.CopyFrom(vma)
            first.end = rest.start = vma.start + PAGE
            vmas.append(rest)
    del memory.vmas[:]
    memory.vmas.extend(vmas)
