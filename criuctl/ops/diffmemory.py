"""How the memory of two checkpoints differs, found out from names of chunks.

A memory image is kept as chunks, each of which holds the pages that one window (256 KiB of addresses) has.  Both
checkpoints are in one store, so two windows with the same pages and the same chunk id hold the same bytes, and nothing of
them is read.  Where the ids differ, the pages that both have count as changed, all of them: at least one is.  Given a
reader, the two chunks are read and the pages counted that really differ.

What was found is added up by mapping: heap, stack, a file, an anonymous one.  A mapping of one checkpoint is that of
the other with the same name and the same start, or the same end, as stacks have it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..criu.described import Area
from ..criu.pages import PAGE, WINDOW, PagemapEntry
from ..errors import Damaged

Run = tuple[int, int]  # address, bytes


@dataclass(frozen=True, slots=True)
class Window:
    """One window of one image: its chunk, and the runs of pages in it."""

    chunk: bytes
    runs: tuple[Run, ...]


_NOTHING = Window(b"", ())
_BATCH = 32  # windows looked at, and perhaps read, at once


class Reader(Protocol):
    """Gives the content of chunks, verified."""

    def some(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        """The content of these chunks (id -> plain size) by id."""


@dataclass(slots=True)
class Region:
    """One mapping, or a part of the address space that no mapping is known for; all in bytes."""

    start: int
    end: int
    name: str
    before: int = 0
    after: int = 0
    changed: int = 0
    added: int = 0  # of pages that only the second checkpoint has
    removed: int = 0  # of pages that only the first one has

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def windows(entries: Iterable[PagemapEntry], chunks: Iterable[tuple[bytes, int]]) -> dict[int, Window]:
    """The windows of one image by number, from its page map and its list of chunks; `Damaged` if they do not fit."""
    runs: dict[int, list[Run]] = {}
    for entry in entries:
        address, end = entry.vaddr, entry.vaddr + entry.pages * PAGE
        while address < end:
            number = address // WINDOW
            step = min(end, (number + 1) * WINDOW) - address
            runs.setdefault(number, []).append((address, step))
            address += step
    found = {}
    listed = list(chunks)
    if len(listed) != len(runs):
        raise Damaged("a memory image has not as many chunks as windows")
    for (number, own), (chunk, size) in zip(runs.items(), listed, strict=True):
        if sum(length for _address, length in own) != size:
            raise Damaged("the page map of a memory image does not match its pages")
        found[number] = Window(chunk, tuple(own))
    return found


def compare(
    before: dict[int, Window], after: dict[int, Window], areas: tuple[Sequence[Area], Sequence[Area]], exact: Reader | None = None
) -> list[Region]:
    """The regions of one address space in which something is, by address."""
    regions = _Regions(*areas)
    numbers = sorted(before.keys() | after.keys())
    for start in range(0, len(numbers), _BATCH):
        batch = numbers[start : start + _BATCH]
        differing = [(before[n], after[n]) for n in batch if n in before and n in after and before[n] != after[n]]
        contents = {} if exact is None else _contents(differing, exact)
        for number in batch:
            old, new = before.get(number, _NOTHING), after.get(number, _NOTHING)
            regions.count("before", old.runs, first=True)
            regions.count("after", new.runs)
            if old != new:
                regions.count("removed", _without(old.runs, new.runs), first=True)
                regions.count("added", _without(new.runs, old.runs))
                regions.count("changed", _both(old.runs, new.runs) if exact is None else _changed(old, new, contents))
    return regions.found()


class _Regions:
    """Adds bytes up by mapping; where none is known, by neighbouring windows."""

    def __init__(self, before: Sequence[Area], after: Sequence[Area]) -> None:
        self._areas = (_Known(after), _Known(before))
        by_start = {(area.name, area.start): area for area in after}
        by_end = {(area.name, area.end): area for area in after}
        same = {a: by_start.get((a.name, a.start)) or by_end.get((a.name, a.end)) for a in before}
        self._as_after = {a: b for a, b in same.items() if b is not None}
        self._found: dict[Area, Region] = {}
        self._loose: Region | None = None
        self._loose_ones: list[Region] = []

    def count(self, what: str, runs: Iterable[Run], *, first: bool = False) -> None:
        """Add these runs to `what`; `first`: they are of the first checkpoint."""
        for address, length in runs:
            for area, step in self._areas[first].split(address, length):
                region = self._at(address, step) if area is None else self._of(area)
                setattr(region, what, getattr(region, what) + step)
                address += step

    def found(self) -> list[Region]:
        """What there is, by address."""
        return sorted([*self._found.values(), *self._loose_ones], key=lambda region: (region.start, region.end))

    def _of(self, area: Area) -> Region:
        area = self._as_after.get(area, area)
        region = self._found.get(area)
        if region is None:
            region = self._found[area] = Region(area.start, area.end, area.name)
        return region

    def _at(self, address: int, length: int) -> Region:
        """A region for addresses that no mapping is known for; they come in the order of windows."""
        start, end = address // WINDOW * WINDOW, -(-(address + length) // WINDOW) * WINDOW
        if self._loose is None or start > self._loose.end:
            self._loose = Region(start, end, "")
            self._loose_ones.append(self._loose)
        self._loose.end = max(self._loose.end, end)
        return self._loose


class _Known:
    """The mappings of one address space, to be found by address."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._starts = [area.start for area in areas]

    def split(self, address: int, length: int) -> Iterator[tuple[Area | None, int]]:
        """The parts of a run: the mapping, if one is known, and how many bytes of it."""
        while length:
            index = bisect_right(self._starts, address) - 1
            area = self._areas[index] if index >= 0 and address < self._areas[index].end else None
            end = self._starts[index + 1] if area is None and index + 1 < len(self._starts) else address + length
            step = min(length, (area.end if area is not None else end) - address)
            yield area, step
            address, length = address + step, length - step


def _both(one: Sequence[Run], other: Sequence[Run]) -> Iterator[Run]:
    """What both have."""
    for address, length in one:
        for start, size in other:
            begin, end = max(address, start), min(address + length, start + size)
            if begin < end:
                yield begin, end - begin


def _without(one: Sequence[Run], other: Sequence[Run]) -> Iterator[Run]:
    """What only the first has."""
    for address, length in one:
        end = address + length
        for start, size in other:
            if start + size <= address or start >= end:
                continue
            if start > address:
                yield address, start - address
            address = start + size
        if address < end:
            yield address, end - address


def _contents(pairs: Iterable[tuple[Window, Window]], reader: Reader) -> dict[bytes, bytes]:
    """The chunks of these windows by id."""
    return reader.some({w.chunk: sum(length for _address, length in w.runs) for pair in pairs for w in pair})


def _changed(old: Window, new: Window, contents: dict[bytes, bytes]) -> Iterator[Run]:
    """The pages that both windows have, and that differ."""
    after = dict(_pages(new, contents))
    for address, page in _pages(old, contents):
        if after.get(address, page) != page:
            yield address, PAGE


def _pages(window: Window, contents: dict[bytes, bytes]) -> Iterator[tuple[int, bytes]]:
    """The pages of a window: address and content."""
    content = contents.get(window.chunk, b"")  # of a window that only one checkpoint has, nothing needs to be read
    position = 0
    for start, length in window.runs if content else ():
        for address in range(start, start + length, PAGE):
            yield address, content[position : position + PAGE]
            position += PAGE
