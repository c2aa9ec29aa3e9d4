"""The pages of a checkpoint for a lazy restore: chunks fetched when asked for, a few kept.

CRIU asks for runs of pages, small ones for page faults and up to 4 MiB in the background, mostly upwards; a
run is answered from the chunks that it lies in, all of one request fetched and verified together.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict

from ..checkpoint.chunks import StreamRef
from ..checkpoint.reader import CheckpointReader
from ..criu.pages import PAGE

_KEPT = 64  # chunks that are remembered, 16 MiB


class StoredPages:
    """The pages of one memory image, as a `criuctl.criu.lazy.PageSource`."""

    def __init__(self, reader: CheckpointReader, data: StreamRef) -> None:
        self._reader = reader
        self._chunks = reader.entries(data)
        self._starts: list[int] = []
        position = 0
        for _chunk, size in self._chunks:
            self._starts.append(position)
            position += size
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()

    def read(self, first: int, count: int) -> list[bytes]:
        """Pages `first` to ``first + count`` in pieces."""
        start, end = first * PAGE, (first + count) * PAGE
        low = bisect.bisect_right(self._starts, start) - 1
        high = bisect.bisect_left(self._starts, end)
        wanted = self._chunks[low:high]
        held = self._hold(dict(wanted))
        pieces = []
        for (chunk, size), begins in zip(wanted, self._starts[low:high], strict=True):
            content = held[chunk]
            pieces.append(content[max(0, start - begins) : min(size, end - begins)])
        return pieces

    def _hold(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        held = {chunk: self._recent[chunk] for chunk in sizes if chunk in self._recent}
        missing = {chunk: size for chunk, size in sizes.items() if chunk not in held}
        if missing:
            held.update(self._reader.some(missing))
        for chunk, content in held.items():
            self._recent[chunk] = content
            self._recent.move_to_end(chunk)
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return held
