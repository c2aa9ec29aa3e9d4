"""Reading checkpoints: chunks are fetched from packs, verified, and written to their places.

`CheckpointReader.write_to` is for large content. It looks up every chunk once, and has each fetched
once (`fetch_job`) and written to every place that needs it (`chunk_targets`).

The places of chunks can become wrong. A garbage collection may move chunks and delete their old
packs, even long after it marked those packs. A chunk of a damaged pack may be sound in another one.
This host's cache of the index may itself be damaged. So when a pack fails, or a chunk is not found,
the chunk is looked up again and read from where it is now.

A stream may be much longer than its stored size, because one chunk can occur in it many times. What
is read at once is bounded by the stored size (`bounds`); everything else is read chunk by chunk.

Invariants: no byte is written that was not verified by its chunk's id; damage, or a chunk that is
not found, raises an error naming the object; the first error stops all threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import Damaged, DataError, Foreign, ObjectMissing
from . import bounds
from .chunk_targets import Targets, only_zeros, write_at
from .chunks import CHUNK_ENTRY, ChunkList, Extent, Layout, StreamRef, check_entries, missing_chunk
from .codec import Sealer
from .fetch_job import SPAN, FetchJob, Sink, plan_spans
from .index import Index
from .packs import Place, damaged_chunk, object_name, pack_of, read_index

if TYPE_CHECKING:
    from ..config import Config
    from ..report import Reporter
    from ..store import Buffer, Store

_SMALL_SPAN = 2 << 20  # the limit when there is little to fetch, so that every thread gets a span
_LITTLE = 64 << 20  # bytes of records
_AHEAD = (32, 32 << 20)  # parts of a stream that are read at once, and bytes of their chunks
_MAX_LIST = 1 << 30  # bytes of one stream's list of chunks


def _ahead(parts: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Group the parts that are read at once."""
    wanted: list[Extent] = []
    chunks = 0
    for part in parts:
        if wanted and (len(wanted) == _AHEAD[0] or chunks + part.size > _AHEAD[1]):
            yield wanted
            wanted, chunks = [], 0
        wanted.append(part)
        chunks += part.size
    if wanted:
        yield wanted


class CheckpointReader:
    """Reads streams of a repository; made by `Repository.reader`.  Safe to use from several
    threads.
    """

    def __init__(
        self, store: Store, sealer: Sealer, index: Index, config: Config, reporter: Reporter
    ) -> None:
        self._store, self._sealer, self._index, self._reporter = store, sealer, index, reporter
        self._threads = (config.workers or min(len(os.sched_getaffinity(0)), 8)) + max(
            config.uploads, 1
        )
        # span buffers between two fetches: touching new memory is slow
        self._spare: list[memoryview] = []

    def read(self, ref: StreamRef, free: int = bounds.FREE_CONTENT) -> bytes:
        """Return the whole content of a small stream, or of one whose stored size allows its
        length; raise `Damaged`.
        """
        self.check_size([ref], free)
        return b"".join(self.chunks(ref))

    def chunks(self, ref: StreamRef) -> Iterator[bytes]:
        """Yield the stream's content in order, chunk by chunk (part by part if layered), reading
        some MiB ahead; raise `Damaged`.
        """
        for wanted in _ahead(self.layout(ref).walk()):
            got = self.some({part.chunk: part.size for part in wanted})
            for chunk, size, skip, length in wanted:
                yield got[chunk] if length == size else got[chunk][skip : skip + length]

    def check_size(self, refs: Sequence[StreamRef], free: int = bounds.FREE_CONTENT) -> None:
        """Raise `Damaged` if these streams together are longer than the stored size of their chunks
        allows.
        """
        size = sum(ref.size for ref in refs)
        if size <= free:
            return
        chunks = {
            part.chunk: part.size for ref in dict.fromkeys(refs) for part in self.layout(ref).walk()
        }
        stored = sum(place.stored for place in self._places(chunks, ()))
        if size > bounds.most(stored, free):
            raise Damaged(
                f"{size} bytes are stored in {stored}, which is less than criuctl needs for any "
                "such content"
            )

    def entries(self, ref: StreamRef) -> ChunkList:
        """Yield (id, plain bytes) of the chunks of a stream that is not layered, in order; raise
        `Damaged`.
        """
        return ChunkList(self._entries(ref))

    def extents(self, ref: StreamRef) -> list[Extent]:
        """Yield the parts of the stream in order; raise `Damaged`."""
        return self.layout(ref).parts()

    def layout(self, ref: StreamRef) -> Layout:
        """Return the stream's layout, for random access to its parts; raise `Damaged`."""
        if ref.pages is None or ref.runs is None:
            return Layout(self.entries(ref), None, ref.size)
        if ref.runs.size > _MAX_LIST:
            raise Damaged(f"a list of runs has {ref.runs.size} bytes")
        return Layout(self.entries(ref.pages), self.read(ref.runs, bounds.FREE_RUNS), ref.size)

    def some(self, sizes: dict[bytes, int]) -> dict[bytes, bytes]:
        """Return the verified content of a few chunks, by id; raise `Damaged`."""
        got: dict[bytes, bytes] = {}

        def keep(place: Place, content: Buffer) -> None:
            got[place.chunk] = bytes(content)

        self.fetch(sizes, keep)
        return got

    def write_to(self, placements: Iterable[tuple[StreamRef, int, int]]) -> None:
        """Write each stream to its descriptor at its offset, as `write` does."""
        targets = Targets()
        for ref, fd, offset in placements:
            targets.add(fd, offset, self.extents(ref))
        self.write(targets)

    def write(self, targets: Targets) -> None:
        """Write all parts to their targets; each chunk is verified before a byte of it is written.

        Zeros are left out where a file has no data yet, so that sparse files and memory stay
        sparse.

        Raise `Damaged` or `ObjectMissing` naming the object, errors of the store, and `OSError`
        from writing.
        """
        # Files without any data: zeros need not be written there.
        empty = {fd for fd in targets.ends if os.fstat(fd).st_blocks == 0}

        def write(place: Place, content: Buffer) -> None:
            zeros = only_zeros(place, content)
            view = memoryview(content)
            for fd, offset, skip, length in targets.of[place.chunk]:
                if not (zeros and fd in empty):
                    write_at(fd, view[skip : skip + length], offset)

        self.fetch(targets.sizes, write)
        for fd in empty:
            if os.fstat(fd).st_size < targets.ends[fd]:
                os.ftruncate(fd, targets.ends[fd])

    def verify(self, streams: Iterable[StreamRef]) -> int:
        """Read and check every chunk of these streams; return their plain bytes.

        A damaged pack, or an index segment that cannot be read, is an error here, although a
        restore may succeed without it.
        """
        # the local cache may be sound while the segments in the store are damaged
        self._index.sync()
        sizes: dict[bytes, int] = {}
        total = 0
        for stream in streams:
            total += stream.size
            for ref in stream.parts:
                sizes.update(CHUNK_ENTRY.iter_unpack(self._entries(ref)))
            if stream.runs is not None:
                for _ in self.layout(stream).walk():
                    pass  # yielding a chunk checks it
        used: dict[bytes, int] = {}
        self.fetch(
            sizes, lambda place, _content: used.update({place.pack: place.pack_size}), strict=True
        )
        for pack in self._index.distrusted(used):
            with suppress(DataError, ObjectMissing):  # verifying needs only the sound records
                self.open_pack(object_name(pack), used[pack], lambda _place, _content: None)
                self._index.trust([pack])
        for error in self._index.unreadable:
            raise error
        return total

    def open_pack(self, name: str, size: int, sink: Sink) -> None:
        """Pass the verified content of every chunk of one pack of `size` bytes to `sink`; raise
        `Damaged` or `ObjectMissing`.
        """
        inner = read_index(self._store, name, size, self._sealer)
        places = (
            Place(chunk, inner.pack, offset, stored, plain)
            for chunk, offset, stored, plain in inner
        )
        spans = plan_spans(places, SPAN)
        job = FetchJob(
            self._store, self._sealer, self._index, self._reporter, spans, sink, self._spare
        )
        job.run()
        job.finish()

    # -- inside
    # ----------------------------------------------------------------------------------------

    def _entries(self, ref: StreamRef) -> bytes:
        """Return the stream's packed list of chunks, checked."""
        packed = ref.chunks
        if ref.list is not None:
            if ref.list.size > _MAX_LIST:
                raise Damaged(f"a list of chunks has {ref.list.size} bytes")
            packed = self.read(ref.list, bounds.FREE_LIST)
        check_entries(packed, ref.size, "a stream")
        return packed

    def _places(self, sizes: dict[bytes, int], failed: Collection[bytes]) -> list[Place]:
        """Return the places of these chunks: look in the index, then in newer segments of the
        store, then in the packs themselves.
        """
        wanted = list(sizes)
        found = self._index.find(wanted, distrusted=True, failed=failed)
        if len(found) < len(wanted):
            self._index.sync()
            found = self._index.find(wanted, distrusted=True, failed=failed)
        fit = len(found) == len(wanted) and all(
            found[chunk].plain == size for chunk, size in sizes.items()
        )
        if not fit and self._index.reload():
            found = self._index.find(wanted, distrusted=True, failed=failed)
        if len(found) < len(wanted):
            for error in self._index.unreadable:
                self._reporter.warning(error.message, "the packs are searched instead")
            found.update(self._search_packs({chunk for chunk in wanted if chunk not in found}))
        for chunk, size in sizes.items():
            if chunk not in found:
                raise missing_chunk(chunk)
            if found[chunk].plain != size:
                raise damaged_chunk(
                    found[chunk], f"it has {found[chunk].plain} bytes where {size} are needed"
                )
        return list(found.values())

    def _search_packs(self, wanted: set[bytes]) -> dict[bytes, Place]:
        """Look for chunks in packs that no index segment lists: packs describe themselves."""
        known = self._index.pack_sizes()
        found: dict[bytes, Place] = {}
        for info in self._store.list("packs/"):
            pack = pack_of(info.name)
            if pack is None or pack in known or len(found) == len(wanted):
                continue
            try:
                inner = read_index(self._store, info.name, info.size, self._sealer)
            except (Damaged, ObjectMissing, Foreign):
                continue  # it cannot be read; chunks that are only in it are reported as missing
            for chunk, offset, stored, plain in inner:
                if chunk in wanted:
                    found[chunk] = Place(chunk, pack, offset, stored, plain)
        return found

    def fetch(self, sizes: dict[bytes, int], sink: Sink, *, strict: bool = False) -> None:
        """Pass every chunk's verified content to `sink` once, from several threads, in no order.

        With `strict`, damage is an error also where another sound copy exists.
        """
        left = dict(sizes)

        def give(place: Place, content: Buffer) -> None:
            sink(place, content)
            del left[place.chunk]

        failed: set[bytes] = set()
        while left:
            places = self._places(left, failed)
            try:
                self._fetch(places, give)
            except (Damaged, ObjectMissing) as error:
                pack = pack_of(str(error.details.get("object", "")))
                if pack is None or pack in failed:
                    raise
                failed.add(pack)
                if not self._others(places, left, failed, error, strict=strict):
                    raise

    def _others(
        self,
        places: Iterable[Place],
        left: Collection[bytes],
        failed: Collection[bytes],
        error: Damaged | ObjectMissing,
        *,
        strict: bool,
    ) -> bool:
        """Return whether the remaining chunks are, or may be, in other places than before; the
        failed packs are distrusted by now.
        """
        before = {place.chunk: place for place in places}

        def changed() -> bool:
            found = self._index.find(list(left), distrusted=True, failed=failed)
            new = [chunk for chunk in left if found.get(chunk) != before[chunk]]
            return (
                any(chunk in found and found[chunk].pack == before[chunk].pack for chunk in new)
                if strict
                else bool(new)
            )

        if isinstance(error, ObjectMissing):
            strict = False
            self._index.sync()
        if (strict or not changed()) and not (self._index.reload() and changed()):
            return False
        if isinstance(error, Damaged):
            self._reporter.warning(error.message, "Its chunks are looked for in other packs.")
        return True

    def _fetch(self, places: Sequence[Place], sink: Sink) -> None:
        total = sum(place.stored for place in places)
        spans = plan_spans(places, SPAN if total > _LITTLE else _SMALL_SPAN)
        threads = min(self._threads, len(spans))
        job = FetchJob(
            self._store, self._sealer, self._index, self._reporter, spans, sink, self._spare
        )
        if threads == 1:
            job.run()
        else:
            helpers = [
                threading.Thread(target=job.run, name=f"criuctl-read-{n}", daemon=True)
                for n in range(1, threads)
            ]
            try:
                for helper in helpers:
                    helper.start()
                job.run()
            finally:
                job.stop()
                for helper in helpers:
                    if helper.ident is not None:  # otherwise it could not be started
                        helper.join()
        job.finish()
