"""The pages of a checkpoint for a lazy restore: chunks are fetched when needed, and a few are kept.

CRIU asks for runs of pages, small ones for page faults and up to 4 MiB in the background, mostly in
ascending order.  A run is answered from the chunks that it lies in; those of one request are
fetched and verified together.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..checkpoint.chunks import Extent, StreamRef
from ..checkpoint.manifest import MemoryImage
from ..checkpoint.opened_chunks import Gathered
from ..checkpoint.reader import CheckpointReader
from ..criu.pages import PAGE
from ..proc.syscalls import has_userfaultfd
from ..store import Buffer

LARGE = 256 << 20  # bytes of a tree's memory
_SHARED = 8  # the part of it that may be in several processes
_KEPT = 64  # chunks that are cached, 16 MiB
_AT_ONCE = 32  # chunks that are fetched together, or as many as one run needs


class StoredPages:
    """The pages of one memory image, as a `criuctl.criu.lazy.PageSource`."""

    def __init__(
        self, reader: CheckpointReader, data: StreamRef, gathered: Gathered | None = None
    ) -> None:
        """`gathered`: chunks that are not read again."""
        self._reader, self._gathered = reader, gathered
        self._layout = reader.layout(data)
        self._recent: OrderedDict[bytes, Buffer] = OrderedDict()

    def read(self, first: int, count: int) -> list[Buffer]:
        """Return pages `first` to ``first + count`` in pieces."""
        low, parts = self._parts(first, count)
        return self._cut(
            first, count, low, parts, self._hold({part.chunk: part.size for part in parts})
        )

    def read_all(self, runs: Iterable[tuple[int, int]]) -> Iterator[Buffer]:
        """Return many runs of pages, (first, count), in pieces; what several of them need is
        fetched once.
        """
        group: list[tuple[int, int, int, list[Extent]]] = []
        sizes: dict[bytes, int] = {}
        for first, count in runs:
            low, parts = self._parts(first, count)
            sizes.update({part.chunk: part.size for part in parts})
            group.append((first, count, low, parts))
            if len(sizes) >= _AT_ONCE:
                yield from self._all(group, sizes)
                group, sizes = [], {}
        yield from self._all(group, sizes)

    def _all(
        self, group: Sequence[tuple[int, int, int, list[Extent]]], sizes: dict[bytes, int]
    ) -> Iterator[Buffer]:
        held = self._hold(sizes)
        for first, count, low, parts in group:
            yield from self._cut(first, count, low, parts, held)

    def _parts(self, first: int, count: int) -> tuple[int, list[Extent]]:
        """Return the parts that these pages lie in, and the number of the first."""
        starts = self._layout.starts
        low = bisect.bisect_right(starts, first * PAGE) - 1
        return low, self._layout.parts(low, bisect.bisect_left(starts, (first + count) * PAGE))

    def _cut(
        self, first: int, count: int, low: int, parts: Sequence[Extent], held: dict[bytes, Buffer]
    ) -> list[Buffer]:
        start, end = first * PAGE, (first + count) * PAGE
        starts = self._layout.starts[low : low + len(parts)]
        pieces: list[Buffer] = []
        for (chunk, _size, skip, length), begins in zip(parts, starts, strict=True):
            pieces.append(
                held[chunk][skip + max(0, start - begins) : skip + min(length, end - begins)]
            )
        return pieces

    def _hold(self, sizes: dict[bytes, int]) -> dict[bytes, Buffer]:
        held: dict[bytes, Buffer] = {}
        if self._gathered is not None:
            held = {
                chunk: content
                for chunk in sizes
                if (content := self._gathered.get(chunk)) is not None
            }
        if len(held) == len(sizes):
            return held
        known = {chunk: self._recent[chunk] for chunk in sizes if chunk in self._recent}
        missing = {
            chunk: size for chunk, size in sizes.items() if chunk not in held and chunk not in known
        }
        if missing:
            known.update(self._reader.some(missing))
        for chunk, piece in known.items():
            self._recent[chunk] = piece
            self._recent.move_to_end(chunk)
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return held | known


def worthwhile(memory: Sequence[MemoryImage], reader: CheckpointReader) -> bool:
    """Return whether the tree should run before its memory is there.

    That is so if it has much memory, few processes share it, and the kernel allows it.  Processes
    that share memory since a fork would not share it any more.
    """
    images = [image for image in memory if image.kind == "task"]
    if sum(image.data.size for image in images) < LARGE or not has_userfaultfd():
        return False
    if len(images) == 1:
        return True
    unique: set[Extent] = set()
    total = 0
    for image in images:
        own = set(reader.extents(image.data))
        unique |= own
        total += sum(part.length for part in own)
    return total - sum(part.length for part in unique) <= total // _SHARED
