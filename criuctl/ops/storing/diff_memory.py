"""The differences between the memory of two checkpoints, computed from the names of chunks.

A memory image is kept as chunks. Each chunk holds some pages of one window (256 KiB of addresses),
in order. Both checkpoints are in one store, so two chunks with the same pages and the same id hold
the same bytes and need not be read. In the rest of a window, all pages that both checkpoints have
count as changed, because at least one of them is. With a reader, these chunks are read and only the
pages that really differ are counted.

The pages of a chunk follow from its size alone, because the rule by which windows are cut may
differ between the checkpoints. A window of a layered image consists of parts of chunks. Such
windows are compared page by page: two pages are the same if they have the same place in the same
chunk.

The results are summed by mapping: heap, stack, a file, an anonymous mapping. Two mappings are the
same if they have the same name and the same start, or the same end, which is what stacks keep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import asdict

from ...checkpoint.chunks import Extent
from ...criu.image_records import Area
from ...criu.pages import PAGE, WINDOW, PagemapEntry
from ...errors import Damaged

Run = tuple[int, int]  # address, bytes


class Piece(Struct, frozen=True):
    """A chunk of an image, or a part of one, and the runs of pages in it."""

    chunk: bytes
    runs: tuple[Run, ...]
    skip: int  # bytes of the chunk before these pages
    whole: int  # bytes of the chunk

    @property
    def size(self) -> int:
        """The bytes of all runs."""
        return sum(length for _address, length in self.runs)


Pieces = tuple[Piece, ...]  # the pieces of one window
Windows = dict[int, Pieces]  # by number: address of the first page / WINDOW
_BATCH = 32  # windows that are compared, and read if necessary, at once


class Reader(Protocol):
    """Reads chunks and verifies them."""

    def some(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        """Return the content of these chunks (id -> plain size) by id."""


class Region(Struct):
    """A mapping, or addresses for which no mapping is known; all counts in bytes."""

    start: int
    end: int
    name: str
    before: int = 0
    after: int = 0
    changed: int = 0
    added: int = 0  # pages that only the second checkpoint has
    removed: int = 0  # pages that only the first checkpoint has

    def to_dict(self) -> dict[str, Any]:
        """Return the region as JSON."""
        return asdict(self)


def windows(entries: Iterable[PagemapEntry], parts: Iterable[Extent]) -> Windows:
    """Return the windows of an image, from its page map and its parts of chunks.

    Raise `Damaged` if the page map and the parts do not fit together.
    """
    found: dict[int, list[Piece]] = {}
    pages = ((entry.vaddr, entry.pages * PAGE) for entry in entries)
    address, left = next(pages, (0, 0))
    for chunk, whole, skip, size in parts:
        runs: list[Run] = []
        while size and left:
            step = min(size, left)
            runs.append((address, step))
            address, left, size = address + step, left - step, size - step
            if not left:
                address, left = next(pages, (0, 0))
        if size or not runs:
            raise Damaged("a memory image has more pages than its page map lists")
        found.setdefault(runs[0][0] // WINDOW, []).append(Piece(chunk, tuple(runs), skip, whole))
    if left:
        raise Damaged("a memory image has fewer pages than its page map lists")
    return {number: tuple(pieces) for number, pieces in found.items()}


def compare(
    before: Windows,
    after: Windows,
    areas: tuple[Sequence[Area], Sequence[Area]],
    exact: Reader | None = None,
) -> list[Region]:
    """Return the regions of an address space that contain pages, by address."""
    regions = _Regions(*areas)
    numbers = sorted(before.keys() | after.keys())
    for start in range(0, len(numbers), _BATCH):
        batch = numbers[start : start + _BATCH]
        differing = {
            n: _differing(before.get(n, ()), after.get(n, ()))
            for n in batch
            if before.get(n) != after.get(n)
        }
        contents = {} if exact is None else _contents(differing.values(), exact)
        for number in batch:
            regions.count("before", _runs(before.get(number, ())), first=True)
            regions.count("after", _runs(after.get(number, ())))
            if number in differing:
                old, new = differing[number]
                regions.count("removed", _without(_runs(old), _runs(new)), first=True)
                regions.count("added", _without(_runs(new), _runs(old)))
                regions.count(
                    "changed",
                    _both(_runs(old), _runs(new))
                    if exact is None
                    else _changed(old, new, contents),
                )
    return regions.found()


def _differing(old: Pieces, new: Pieces) -> tuple[Pieces, Pieces]:
    """Return the pieces that only one of two windows has."""
    if any(piece.size != piece.whole for piece in (*old, *new)):
        old, new = _single(old), _single(new)
    before, after = set(old), set(new)
    return tuple(piece for piece in old if piece not in after), tuple(
        piece for piece in new if piece not in before
    )


def _single(pieces: Pieces) -> Pieces:
    """Return the same pages, each as a separate piece."""
    pages = [
        (piece, address)
        for piece in pieces
        for start, length in piece.runs
        for address in range(start, start + length, PAGE)
    ]
    skips = [skip for piece in pieces for skip in range(piece.skip, piece.skip + piece.size, PAGE)]
    return tuple(
        Piece(piece.chunk, ((address, PAGE),), skip, piece.whole)
        for (piece, address), skip in zip(pages, skips, strict=True)
    )


def _runs(pieces: Pieces) -> list[Run]:
    """Return the runs of these pieces; adjacent runs are joined."""
    joined: list[Run] = []
    for piece in pieces:
        for address, length in piece.runs:
            if joined and sum(joined[-1]) == address:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((address, length))
    return joined


class _Regions:
    """Sums of bytes by mapping; where no mapping is known, by adjacent windows."""

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
        """Add these runs to `what`; with `first` they are of the first checkpoint."""
        for address, length in runs:
            for area, step in self._areas[first].split(address, length):
                region = self._at(address, step) if area is None else self._of(area)
                setattr(region, what, getattr(region, what) + step)
                address += step

    def found(self) -> list[Region]:
        """Return all regions, by address."""
        return sorted(
            [*self._found.values(), *self._loose_ones],
            key=lambda region: (region.start, region.end),
        )

    def _of(self, area: Area) -> Region:
        area = self._as_after.get(area, area)
        region = self._found.get(area)
        if region is None:
            region = self._found[area] = Region(area.start, area.end, area.name)
        return region

    def _at(self, address: int, length: int) -> Region:
        """Return the region for addresses without a known mapping; they come in the order of
        windows.
        """
        start, end = address // WINDOW * WINDOW, -(-(address + length) // WINDOW) * WINDOW
        if self._loose is None or start > self._loose.end:
            self._loose = Region(start, end, "")
            self._loose_ones.append(self._loose)
        self._loose.end = max(self._loose.end, end)
        return self._loose


class _Known:
    """The mappings of an address space, with a search by address."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._starts = [area.start for area in areas]

    def split(self, address: int, length: int) -> Iterator[tuple[Area | None, int]]:
        """Yield the parts of a run: the mapping, or None if none is known, and its bytes."""
        while length:
            index = bisect_right(self._starts, address) - 1
            area = self._areas[index] if index >= 0 and address < self._areas[index].end else None
            end = (
                self._starts[index + 1]
                if area is None and index + 1 < len(self._starts)
                else address + length
            )
            step = min(length, (area.end if area is not None else end) - address)
            yield area, step
            address, length = address + step, length - step


def _both(one: Sequence[Run], other: Sequence[Run]) -> Iterator[Run]:
    """Yield the parts that both have."""
    for address, length in one:
        for start, size in other:
            begin, end = max(address, start), min(address + length, start + size)
            if begin < end:
                yield begin, end - begin


def _without(one: Sequence[Run], other: Sequence[Run]) -> Iterator[Run]:
    """Yield the parts that only the first has."""
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


def _contents(pairs: Iterable[tuple[Pieces, Pieces]], reader: Reader) -> dict[bytes, bytes]:
    """Return the chunks of these windows by id; a window that only one checkpoint has is left
    out.
    """
    return reader.some(
        {piece.chunk: piece.whole for old, new in pairs if old and new for piece in (*old, *new)}
    )


def _changed(old: Pieces, new: Pieces, contents: dict[bytes, bytes]) -> Iterator[Run]:
    """Yield the pages that both have and that differ."""
    if old and new:
        after = dict(_pages(new, contents))
        for address, page in _pages(old, contents):
            if after.get(address, page) != page:
                yield address, PAGE


def _pages(pieces: Pieces, contents: dict[bytes, bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the pages of a window: address and content."""
    for piece in pieces:
        content, position = contents[piece.chunk], piece.skip
        for start, length in piece.runs:
            for address in range(start, start + length, PAGE):
                yield address, content[position : position + PAGE]
                position += PAGE
