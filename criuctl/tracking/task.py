"""A process whose writes are tracked, and what is known of its pages."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from msgspec import Struct, field

from ..criu.pages import PAGE, WINDOW, ImageKey
from ..proc.memory import TaskMemory
from ..proc.tree import ProcessIdentity

Range = tuple[int, int]
_PAGES = WINDOW // PAGE
_UNKNOWN = -1
_NOTHING = array("q", [_UNKNOWN]) * _PAGES


class Task(Struct, eq=False):
    """A process whose writes are tracked."""

    identity: ProcessIdentity
    inside: int  # its PID in its namespace
    uffd: int
    memory: TaskMemory
    ranges: list[Range]  # registered, ascending
    code: int = 0  # what it has, see `userfault_code.code_of`
    # what is not written to since an earlier checkpoint, is as it is stored there
    based: bool = False
    # number of a window -> number of each of its loose pages; -1: not known
    read: dict[int, array[int]] = field(default_factory=dict)
    # of the frozen process: pages with contents, ascending, and the number of the first one if
    # they were read only now
    last: list[tuple[int, int, int]] = field(default_factory=list)
    hidden: list[Range] = field(default_factory=list)
    _settled: list[Range] | None = None  # the known pages, joined; None: not since the last note

    @property
    def key(self) -> ImageKey:
        """Its image."""
        return ImageKey("task", self.inside)

    def close(self) -> None:
        """End the tracking: the kernel forgets all."""
        if self.uffd >= 0:
            os.close(self.uffd)
        self.forget()

    def forget(self) -> None:
        """Leave the tracking to the owner of the descriptor."""
        if self.uffd >= 0:
            self.uffd = -1
            self.memory.close()

    def note(self, pieces: Sequence[Range], number: int) -> None:
        """Note the pages of one window: the number of the first; -1: they were not read."""
        self._settled = None
        window = pieces[0][0] // WINDOW
        numbers = self.read.get(window)
        if numbers is None:
            numbers = self.read[window] = _NOTHING[:]
        base = window * WINDOW
        for start, end in pieces:
            pages = (end - start) // PAGE
            first = (start - base) // PAGE
            if number == _UNKNOWN:
                numbers[first : first + pages] = _NOTHING[:pages]
            else:
                numbers[first : first + pages] = array("q", range(number, number + pages))
                number += pages

    def note_run(self, start: int, pages: int, number: int) -> None:
        """Note pages of any number of windows."""
        end = start + pages * PAGE
        for low, high in _windows(start, end):
            self.note([(low, high)], number + (low - start) // PAGE)

    def doubt(self, start: int, end: int) -> bool:
        """Note that the pages of this range are not known; return whether any were."""
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        windows = [w for w in self.read if start < (w + 1) * WINDOW and w * WINDOW < end]
        for window in windows:
            low, high = max(start, window * WINDOW), min(end, (window + 1) * WINDOW)
            self.note([(low, high)], _UNKNOWN)
        return bool(windows)

    def whole(self, window: int) -> bool:
        """Return whether all known pages of a window follow each other in what is stored."""
        known = [number for number in self.read.get(window, ()) if number != _UNKNOWN]
        return not known or known[-1] - known[0] == len(known) - 1

    def settle(self) -> None:
        """Join the known pages to runs, so that a look at the frozen process is short."""
        runs: list[Range] = []
        for window in sorted(self.read):
            numbers, base = self.read[window], window * WINDOW
            parts = [(base, base + WINDOW)] if _UNKNOWN not in numbers else _runs(base, numbers)
            for start, end in parts:
                if runs and runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], end)
                else:
                    runs.append((start, end))
        self._settled = runs

    def known(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts of this range whose pages are known, and those that are not."""
        if self._settled is None:
            self.settle()
        runs = self._settled or []
        at = bisect_right(runs, start, key=itemgetter(1))  # the first that ends after it
        while start < end:
            low, high = runs[at] if at < len(runs) else (end, end)
            if start < low:
                yield start, min(low, end), False
            if low < end:
                yield max(start, low), min(high, end), True
            start, at = min(high, end), at + 1

    def numbers(self, start: int, end: int) -> Sequence[int]:
        """Return the numbers of the loose pages of a range that is known."""
        found: array[int] = array("q")
        for low, high in _windows(start, end):
            found.extend(self._slice(low, high))
        return found

    def _slice(self, start: int, end: int) -> array[int]:
        """Return what is known of this part of a window."""
        window = start // WINDOW
        first = (start - window * WINDOW) // PAGE
        return self.read.get(window, _NOTHING)[first : first + (end - start) // PAGE]


def _windows(start: int, end: int) -> Iterator[Range]:
    while start < end:
        stop = min(end, start // WINDOW * WINDOW + WINDOW)
        yield start, stop
        start = stop


def _runs(start: int, numbers: Sequence[int]) -> list[Range]:
    """Return the runs of known pages of a window that begins at `start`."""
    runs: list[Range] = []
    for at in range(start, start + len(numbers) * PAGE, PAGE):
        if numbers[(at - start) // PAGE] == _UNKNOWN:
            continue
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + PAGE)
        else:
            runs.append((at, at + PAGE))
    return runs
