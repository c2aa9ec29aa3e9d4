"""How the memory of two checkpoints differs, found out from names of chunks.

A memory image is kept as chunks, each of which holds some pages of one window (256 KiB of
addresses), in order.  Both checkpoints are in one store, so two chunks with the same pages and the
same id hold the same bytes, and nothing of them is read.  Of what is left in a window, the pages
that both have count as changed, all of them: at least one is.  Given a reader, the chunks are read
and the pages counted that really differ.

Which pages a chunk has is told by its size alone, as the rule by which windows are cut may be
another in each checkpoint.  A window of a layered image is made of parts of chunks; such windows
are compared page by page, a page being the same if it is the same one of the same chunk.

What was found is added up by mapping: heap, stack, a file, an anonymous one.  A mapping of one
checkpoint is that of the other with the same name and the same start, or the same end, as stacks
have it.
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
    """One chunk of an image, or a part of one, and the runs of pages in it."""

    chunk: bytes
    runs: tuple[Run, ...]
    skip: int  # bytes of the chunk before them
    whole: int  # bytes of the chunk

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(length for _address, length in self.runs)


Pieces = tuple[Piece, ...]  # those of one window
Windows = dict[int, Pieces]  # by number: address of the first page / WINDOW
_BATCH = 32  # windows looked at, and perhaps read, at once


class Reader(Protocol):
    """Gives the content of chunks, verified."""

    def some(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        """The content of these chunks (id -> plain size) by id."""


class Region(Struct):
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
        return asdict(self)


def windows(entries: Iterable[PagemapEntry], parts: Iterable[Extent]) -> Windows:
    """The windows of one image, from its page map and what it is made of; `Damaged` if they do not
    fit.
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
            raise Damaged("a memory image has more pages than its page map tells of")
        found.setdefault(runs[0][0] // WINDOW, []).append(Piece(chunk, tuple(runs), skip, whole))
    if left:
        raise Damaged("a memory image has fewer pages than its page map tells of")
    return {number: tuple(pieces) for number, pieces in found.items()}


def compare(
    before: Windows,
    after: Windows,
    areas: tuple[Sequence[Area], Sequence[Area]],
    exact: Reader | None = None,
) -> list[Region]:
    """The regions of one address space in which something is, by address."""
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
    """What only one of two windows has."""
    if any(piece.size != piece.whole for piece in (*old, *new)):
        old, new = _single(old), _single(new)
    before, after = set(old), set(new)
    return tuple(piece for piece in old if piece not in after), tuple(
        piece for piece in new if piece not in before
    )


def _single(pieces: Pieces) -> Pieces:
    """The same pages, each a piece of its own."""
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
    """The runs of these, those that touch as one."""
    joined: list[Run] = []
    for piece in pieces:
        for address, length in piece.runs:
            if joined and sum(joined[-1]) == address:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((address, length))
    return joined


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
        """A region for addresses that no mapping is known for; they come in the order of
        windows.
        """
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
            end = (
                self._starts[index + 1]
                if area is None and index + 1 < len(self._starts)
                else address + length
            )
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


def _contents(pairs: Iterable[tuple[Pieces, Pieces]], reader: Reader) -> dict[bytes, bytes]:
    """The chunks of these windows by id; none of a window of which only one checkpoint has
    pages.
    """
    return reader.some(
        {piece.chunk: piece.whole for old, new in pairs if old and new for piece in (*old, *new)}
    )


def _changed(old: Pieces, new: Pieces, contents: dict[bytes, bytes]) -> Iterator[Run]:
    """The pages that both have, and that differ."""
    if old and new:
        after = dict(_pages(new, contents))
        for address, page in _pages(old, contents):
            if after.get(address, page) != page:
                yield address, PAGE


def _pages(pieces: Pieces, contents: dict[bytes, bytes]) -> Iterator[tuple[int, bytes]]:
    """The pages of a window: address and content."""
    for piece in pieces:
        content, position = contents[piece.chunk], piece.skip
        for start, length in piece.runs:
            for address in range(start, start + length, PAGE):
                yield address, content[position : position + PAGE]
                position += PAGE
