"""Choose the memory that is written straight into the restored processes, without CRIU's images.

CRIU reads the memory of a process out of a file, in one thread, when all else of the process
exists. The file has to be filled first: all memory is touched twice, and a first touch is the
slowest part of a copy. So plain memory is left out of CRIU's page maps, and written from several
threads through ``/proc/PID/mem`` when the processes are in place and nothing of them has run, out
of the buffers in which chunks are opened.

This applies to

- pages that CRIU itself could load later (``PE_LAZY``: private, anonymous, not locked, not in use
  as the stack),
- in writable mappings: no right to write elsewhere is needed,
- that no parent or child of the same program has at the same place, or that shared no page with
  theirs at the dump; for the rest CRIU finds out what they share (see `criuctl.criu.unshared`),
- in runs of 256 KiB at least.

Memory that the kernel writes in a process before it runs must not be overwritten: the pages of
restartable sequences (rseq), where each thread finds its processor, are left to CRIU, which loads
them before it registers them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .images import read
from .pages import PAGE, PE_LAZY, PE_PRESENT, PagemapEntry

LEAST = 64  # pages per run

_PRIVATE_ANONYMOUS, _NORESERVE = 0x22, 0x4000  # MAP_
_WRITABLE = 2  # PROT_
_REGULAR, _HEAP, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 9  # CRIU's VMA_

Range = tuple[int, int]  # addresses: start, end


class Task(NamedTuple):
    """A process that has memory, from the images."""

    pid: int
    ppid: int
    threads: Sequence[int]
    memory: Any  # CRIU's mm_entry


def tasks(folder: int) -> list[Task]:
    """Return the tasks of the images in `folder`, parents before their children."""
    names = set(os.listdir(folder))
    found = []
    for task in read(folder, "pstree.img", "PSTREE"):
        name = f"mm-{task.pid}.img"
        if name in names:  # a zombie has none
            found.append(Task(task.pid, task.ppid, task.threads, read(folder, name, "MM")[0]))
    return found


def plain(vma: Any) -> bool:
    """Return whether the mapping is private, anonymous, writable memory and nothing special."""
    return (
        vma.flags & ~_NORESERVE == _PRIVATE_ANONYMOUS
        and vma.status & ~_HEAP == _REGULAR | _ANON_PRIVATE
        and bool(vma.prot & _WRITABLE)
    )


def divide(
    folder: int,
    tree: Sequence[Task],
    entries: Mapping[int, Sequence[PagemapEntry]],
    known: Mapping[int, Sequence[Range]],
) -> dict[int, list[tuple[PagemapEntry, bool]]]:
    """Return the runs of each task in order, cut where needed, and whether each is written
    directly.

    `known`: the ascending parts of a task's memory that are known to be unshared.
    """
    family = _family(tree)
    divided = {}
    for task in tree:
        if task.pid not in entries:
            continue
        areas: list[Range] = []
        for vma in task.memory.vmas:
            if plain(vma):
                area = vma.start, vma.end
                areas += (
                    _within(known.get(task.pid, ()), *area) if area in family[task.pid] else [area]
                )
        cut = list(_cut(entries[task.pid], _joined(areas)))
        if any(direct for _run, direct in cut):
            kept = _kernels(folder, task)
            cut = list(_cut(entries[task.pid], _joined(_without(areas, kept))))
        if cut and all(direct for _run, direct in cut):
            cut[0] = cut[0][0], False  # CRIU needs at least one
        divided[task.pid] = cut
    return divided


def _family(tree: Sequence[Task]) -> dict[int, set[Range]]:
    """Return for each task the mappings that its parent or a child of the same program has as
    well.
    """
    areas: dict[int, set[Range]] = {}
    family: dict[int, set[Range]] = {}
    programs: dict[int, int] = {}
    for task in tree:
        areas[task.pid] = {(vma.start, vma.end) for vma in task.memory.vmas}
        family[task.pid] = set()
        programs[task.pid] = task.memory.exe_file_id
        if programs.get(task.ppid) == task.memory.exe_file_id:
            both = areas[task.pid] & areas[task.ppid]
            family[task.pid] |= both
            family[task.ppid] |= both
    return family


def _kernels(folder: int, task: Task) -> set[int]:
    """Return the addresses of the pages that the kernel itself writes to."""
    pages = set()
    for thread in task.threads:
        core = read(folder, f"core-{thread}.img", "CORE")[0]
        if core.thread_core.HasField("rseq_entry"):
            area = core.thread_core.rseq_entry
            last = area.rseq_abi_pointer + max(area.rseq_abi_size, 1) - 1
            pages |= {area.rseq_abi_pointer // PAGE * PAGE, last // PAGE * PAGE}
    return pages


def _within(ranges: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """Yield the parts of these ascending ranges between two addresses."""
    for number in range(bisect_right(ranges, start, key=itemgetter(1)), len(ranges)):
        low, high = ranges[number]
        if low >= end:
            return
        yield max(low, start), min(high, end)


def _without(areas: Iterable[Range], pages: set[int]) -> Iterator[Range]:
    """Yield the areas in order, without these pages."""
    for start, end in areas:
        for page in sorted(page for page in pages if start <= page < end):
            if start < page:
                yield start, page
            start = page + PAGE
        if start < end:
            yield start, end


def _joined(areas: Iterable[Range]) -> list[Range]:
    """Return ascending areas, adjacent ones joined."""
    joined: list[Range] = []
    for start, end in areas:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _cut(
    entries: Iterable[PagemapEntry], areas: Sequence[Range]
) -> Iterator[tuple[PagemapEntry, bool]]:
    """Yield the runs, cut at the borders of `areas`.

    True for parts large enough to write directly.
    """
    at = 0
    for entry in entries:
        start, end = entry.vaddr, entry.vaddr + entry.pages * PAGE
        while at < len(areas) and areas[at][1] <= start:
            at += 1
        if entry.flags & (PE_LAZY | PE_PRESENT) == PE_LAZY | PE_PRESENT and entry.pages >= LEAST:
            number = at
            while number < len(areas) and areas[number][0] < end:
                low, high = max(areas[number][0], start), min(areas[number][1], end)
                if high - low >= LEAST * PAGE:
                    if start < low:
                        yield _run(start, low, entry.flags), False
                    yield _run(low, high, entry.flags), True
                    start = high
                number += 1
        if start < end:
            yield _run(start, end, entry.flags), False


def _run(start: int, end: int, flags: int) -> PagemapEntry:
    return PagemapEntry(start, (end - start) // PAGE, flags)
