"""What of a process is tracked, and the protection of its pages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ..criu.pages import WINDOW
from ..errors import CriuctlError
from ..proc import kernel_writers, written_pages
from ..proc.mappings import Mapping, each_mapping
from ..proc.memory import Run
from .task import Range, Task

LEAST = WINDOW  # bytes of a mapping that is tracked
_PATIENCE = 0.5  # seconds for direct I/O to end


def trackable(mapping: Mapping) -> bool:
    """Return whether it is private anonymous memory without code, and nothing special."""
    return (
        not mapping.inode
        and mapping.perms[2:] == "-p"
        and (mapping.path in ("", "[heap]") or mapping.path.startswith("[anon:"))
    )


def ranges_of(pid: int) -> list[Range]:
    """Return the mappings of a process that are worth tracking."""
    return [
        (m.start, m.end)
        for m in each_mapping(pid)
        if m.size >= LEAST and "w" in m.perms and trackable(m)
    ]


def pinned(pid: int) -> str:
    """Return what may write to the process's memory past its page tables; "" once there was a
    moment without.

    What was under way when the pages were protected has ended then.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            why = kernel_writers.pins(pid)
        except CriuctlError as error:
            return error.message
        if not why or time.monotonic() > until:
            return why
        time.sleep(0.001)


def protected(task: Task, *, every: bool) -> Iterator[Run]:
    """Protect all pages, and yield those that were not; with `every` also those that were already,
    by whatever was there before: Linux before 6.13 leaves the protection to memory that has moved.

    Of a window that is stored in parts, yield all pages: it becomes one chunk again.
    """
    for start, end in task.ranges:
        changed = list(written_pages.protect(task.memory.pagemap, start, end))
        if every:
            changed = [
                (a.start, a.end) for a in written_pages.look(task.memory.pagemap, start, end)
            ]
        elif task.based:
            changed = list(_whole(task, changed, start, end))
        for low, high in changed:
            yield Run(low, high, dirty=True)


def _whole(task: Task, changed: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    done = start  # up to here everything was yielded that has to be
    for low, high in changed:
        for window in range(max(low, done) // WINDOW, (high - 1) // WINDOW + 1):
            first = max(window * WINDOW, start, done)
            last = min((window + 1) * WINDOW, end)
            if first >= last:
                continue
            if task.whole(window):
                if max(first, low) < min(last, high):
                    yield max(first, low), min(last, high)
                    done = min(last, high)
            else:
                for area in written_pages.look(task.memory.pagemap, first, last):
                    yield area.start, area.end
                done = last
