"""One fetch of chunks: spans of packs are read, opened and verified by several threads.

`plan_spans` sorts the places of chunks by pack and offset, and joins neighbours into *spans*. Each
thread runs `FetchJob.run`: it takes the next span, reads it into a buffer of its own, opens and
verifies each record, and passes the content to the sink. On a store that answers slowly the threads
wait for different spans; on a fast one they share the processors. Memory is bounded by the threads'
buffers.

The first error stops all threads, and `finish` raises it. A pack that fails is distrusted in the
index first, so that the next dump does not rely on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ..errors import Damaged, ObjectMissing
from .codec import Decompressor, Sealer
from .index import Index
from .packs import Place, object_name, open_record

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import Buffer, Store

SPAN = 8 << 20  # bytes fetched at once, at most (but at least one whole record)
_GAP = 128 << 10  # unwanted bytes between two records that are fetched to save a request
ALIGNMENT = 4096  # stores read best at offsets and into buffers aligned to this
# takes the verified content of each chunk
Sink = Callable[["Place", "Buffer"], None]


class Span(Struct, frozen=True):
    """Neighbouring records of one pack."""

    pack: bytes
    start: int
    end: int
    places: tuple[Place, ...]


def plan_spans(places: Iterable[Place], limit: int) -> list[Span]:
    """Join records that lie next to each other into spans of at most `limit` bytes, by pack and
    offset.
    """
    spans: list[Span] = []
    run: list[Place] = []
    for place in sorted(places, key=lambda p: (p.pack, p.offset)):
        if run and (
            place.pack != run[0].pack
            or place.offset - run[-1].end > _GAP
            or place.end - run[0].offset > limit
        ):
            spans.append(Span(run[0].pack, run[0].offset, run[-1].end, tuple(run)))
            run = []
        run.append(place)
    if run:
        spans.append(Span(run[0].pack, run[0].offset, run[-1].end, tuple(run)))
    return spans


class FetchJob:
    """One fetch that several threads work on."""

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        index: Index,
        reporter: Reporter,
        spans: Sequence[Span],
        sink: Sink,
        spare: list[memoryview],
    ) -> None:
        self._store, self._sealer, self._index, self._reporter, self._sink = (
            store,
            sealer,
            index,
            reporter,
            sink,
        )
        self._spans = iter(spans)
        self._spare = spare
        self._total = sum(place.plain for span in spans for place in span.places)
        self._done = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take spans until none is left or a thread has failed."""
        buffer = self._buffer()
        try:
            decompress = Decompressor()
            while (span := self._next()) is not None:
                self._read(span, buffer, decompress)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            self._spare.append(buffer)

    def stop(self) -> None:
        """Stop the threads from taking another span."""
        with self._lock:
            self._spans = iter(())

    def finish(self) -> None:
        """Raise the first error."""
        if self._error is not None:
            raise self._error

    def _buffer(self) -> memoryview:
        try:
            return self._spare.pop()
        except IndexError:
            return self._store.memory(SPAN + ALIGNMENT)

    def _next(self) -> Span | None:
        with self._lock:
            return None if self._error is not None else next(self._spans, None)

    def _read(self, span: Span, buffer: memoryview, decompress: Decompressor) -> None:
        # Start at a block boundary, so that a store can read straight from its disk into the
        # buffer.
        start = span.start - span.start % ALIGNMENT
        view = buffer[: span.end - start]
        try:
            self._store.read_into(object_name(span.pack), start, view)
            sealer = self._sealer.of_pack(span.pack)
            seal = sealer.pack(span.pack)
            plain = 0
            for place in span.places:
                record = view[place.offset - start : place.end - start]
                self._sink(place, open_record(place, record, sealer, seal, decompress))
                plain += place.plain
        except (Damaged, ObjectMissing) as error:
            # The next dump must not rely on this pack.
            self._index.distrust([span.pack], damaged=isinstance(error, Damaged))
            raise
        with self._lock:
            self._done += plain
        self._reporter.progress("read", self._done, self._total)
