"""The pages of an address space that have not arrived yet, and where they belong now.

A page is stored under the address that it had at the dump, its *home*. The program may move memory
(mremap) before the page arrives, so each run has an address of now, too. Bookkeeping only: nothing
here asks the kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

_SHIFTS = 32  # distances that are remembered before unused ones are dropped


class Run(NamedTuple):
    """Adjacent pages: the addresses of now, and the home of the first one."""

    start: int
    end: int
    home: int

    def part(self, start: int, end: int) -> Run:
        """Return the part between two addresses of now."""
        low = max(start, self.start)
        return Run(low, min(end, self.end), self.home + low - self.start)


class AbsentPages:
    """Runs in ascending order of their addresses of now, which do not overlap."""

    def __init__(self, runs: Iterable[Run] = (), shifts: Iterable[int] = (0,)) -> None:
        self._runs = sorted(runs)
        self._shifts = set(shifts)  # by how much some runs are away from home

    def __bool__(self) -> bool:
        return bool(self._runs)

    def runs(self) -> list[Run]:
        """Return all runs."""
        return list(self._runs)

    def copy(self) -> AbsentPages:
        """Return the pages that a child lacks which is forked now."""
        return AbsentPages(self._runs, self._shifts)

    def home(self, address: int) -> int | None:
        """Return the home of the page at this address; None: no page will arrive there."""
        at = bisect_right(self._runs, address, key=itemgetter(0)) - 1
        if at < 0 or address >= self._runs[at].end:
            return None
        return self._runs[at].home + address - self._runs[at].start

    def next(self, address: int, limit: int) -> int:
        """Return the start of the first run after this address, at most `limit`."""
        at = bisect_right(self._runs, address, key=itemgetter(0))
        return min(self._runs[at].start, limit) if at < len(self._runs) else limit

    def located(self, home: int, end: int) -> list[Run]:
        """Return the runs whose homes lie in this range, as far as they do."""
        return [
            run.part(home + shift, end + shift)
            for shift in self._shifts
            for run in self._within(home + shift, end + shift)
            if run.start - run.home == shift
        ]

    def remove(self, start: int, end: int) -> list[Run]:
        """Remove what lies in this range of addresses of now, and return it."""
        low, high = self._span(start, end)
        touched = self._runs[low:high]
        outside = [run.part(run.start, start) for run in touched if run.start < start]
        outside += [run.part(end, run.end) for run in touched if run.end > end]
        self._runs[low:high] = outside
        return [run.part(start, end) for run in touched]

    def move(self, start: int, to: int, length: int) -> None:
        """Note that the memory at `start` lies at `to` now.

        What is expected there stays: of a move that shrinks, older kernels report the old length.
        """
        moved = [
            Run(run.start + to - start, run.end + to - start, run.home)
            for run in self.remove(start, start + length)
        ]
        for run in moved:
            at = run.start
            for there in self._within(run.start, run.end):
                if at < there.start:
                    self._insert(run.part(at, there.start))
                at = there.end
            if at < run.end:
                self._insert(run.part(at, run.end))
        if len(self._shifts) > _SHIFTS:
            self._shifts = {run.start - run.home for run in self._runs}

    def _insert(self, run: Run) -> None:
        self._runs.insert(bisect_right(self._runs, run.start, key=itemgetter(0)), run)
        self._shifts.add(run.start - run.home)

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Return the indexes of the runs that overlap this range."""
        low = bisect_right(self._runs, start, key=itemgetter(1))
        high = low
        while high < len(self._runs) and self._runs[high].start < end:
            high += 1
        return low, high

    def _within(self, start: int, end: int) -> list[Run]:
        low, high = self._span(start, end)
        return self._runs[low:high]
