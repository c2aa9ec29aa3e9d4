"""Which memory is put straight into the restored processes, past CRIU and its images.

CRIU reads the memory of a process out of a file, in one thread, when all else of the process is
there.  The file has to be filled first: all memory is touched twice, and a first touch is the
slowest part of a copy.  So plain memory is left out of CRIU's page maps, and written from several
threads through ``/proc/PID/mem`` when the processes are in place and nothing of them has run, out
of the buffers in which chunks are opened.

What goes that way:

- pages that CRIU itself would let follow later (``PE_LAZY``: private, anonymous, not locked, not in
  use as the stack),
- in writable mappings: no right to write elsewhere is needed,
- that no parent or child of the same program has at the same place, or of which no page was theirs
  as well when they were dumped; of the rest CRIU finds out what they share (see
  `criuctl.criu.unshared`),
- in runs of 256 KiB at least.

What the kernel writes into a process before it runs must not be overwritten: the pages of
restartable sequences (rseq), in which it tells each thread its processor, are left to CRIU, which
loads them before it registers them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .images import read
from .pages import PAGE, PE_LAZY, PE_PRESENT, PagemapEntry

LEAST = 64  # pages of a run

_PRIVATE_ANONYMOUS, _NORESERVE = 0x22, 0x4000  # MAP_
_WRITABLE = 2  # PROT_
_REGULAR, _HEAP, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 9  # CRIU's VMA_

Range = tuple[int, int]  # addresses: first, behind the last


class Task(NamedTuple):
    """A process that has memory, as the images tell of it."""

    pid: int
    ppid: int
    threads: Sequence[int]
    memory: Any  # CRIU's mm_entry


def tasks(folder: int) -> list[Task]:
    """Those of the images in `folder`, parents before their children."""
    names = set(os.listdir(folder))
    found = []
    for task in read(folder, "pstree.img", "PSTREE"):
        name = f"mm-{task.pid}.img"
        if name in names:  # a zombie has none
            found.append(Task(task.pid, task.ppid, task.threads, read(folder, name, "MM")[0]))
    return found


def plain(vma: Any) -> bool:
    """Whether the mapping is private, anonymous, writable memory and nothing special."""
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
    """The runs of each task in order, cut where that is needed, and whether each is put into the
    process directly.

    `known` are the ascending parts of its memory that a task is known to share with nobody.
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
            cut[0] = cut[0][0], False  # CRIU relies on there being one
        divided[task.pid] = cut
    return divided


def _family(tree: Sequence[Task]) -> dict[int, set[Range]]:
    """Of each task the mappings that its parent or a child of the same program has as well."""
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
    """The pages that the kernel writes to on its own, by their addresses."""
    pages = set()
    for thread in task.threads:
        core = read(folder, f"core-{thread}.img", "CORE")[0]
        if core.thread_core.HasField("rseq_entry"):
            area = core.thread_core.rseq_entry
            last = area.rseq_abi_pointer + max(area.rseq_abi_size, 1) - 1
            pages |= {area.rseq_abi_pointer // PAGE * PAGE, last // PAGE * PAGE}
    return pages


def _within(ranges: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """What of these ascending ranges lies between two addresses."""
    for number in range(bisect_right(ranges, start, key=itemgetter(1)), len(ranges)):
        low, high = ranges[number]
        if low >= end:
            return
        yield max(low, start), min(high, end)


def _without(areas: Iterable[Range], pages: set[int]) -> Iterator[Range]:
    """The areas in order, less these pages."""
    for start, end in areas:
        for page in sorted(page for page in pages if start <= page < end):
            if start < page:
                yield start, page
            start = page + PAGE
        if start < end:
            yield start, end


def _joined(areas: Iterable[Range]) -> list[Range]:
    """Ascending areas with those made one that touch."""
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
    """The runs cut at the borders of `areas`, where what lies in one is large enough to be put in
    directly.
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
