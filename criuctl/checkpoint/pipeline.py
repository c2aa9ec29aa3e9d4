"""The path of new content into the store: hash, look up, compress, seal, pack, upload.

    producer -> hasher -> workers -> uploaders
                (one)    (one per core)

The producer hands over *windows*, parts of buffers, in batches. The hasher computes each window's
chunk id, appends it to its stream, and drops the window if the chunk is known: in the store's
index, or from earlier in this dump. New content stays in its buffer until a worker has compressed
and sealed it into a pack; full packs wait for an uploader. So memory is bounded by two pools:
buffers of plain windows, and buffers of packs. For memory windows that were sent ahead the hasher
knows the pages, and makes chunks of those that changed (`layers`).

Invariants: windows of one stream are hashed in the order they came; a chunk goes into one pack
only; a pack is listed (`packs`) only after the store has it; the first error of any thread stops
all of them, wakes all waiting calls, and is raised by every later call. After an error items still
flow, but are dropped, so no call waits endlessly.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from ..config import Config
from ..errors import CriuctlError
from ..report import Reporter
from ..store import Store
from .buffers import BUFFER_SIZE, BufferPool, PageBuffer
from .chunks import CHUNK_ENTRY
from .codec import Compressor, Sealer
from .index import Index
from .layers import At, Chunk, Composition, Layers
from .packs import PackBuilder, PackIndex, object_name
from .streams import Stored, Stream, Together, WriterStats

_MIB = 1 << 20
_PACK_BUDGET = 96 * _MIB  # for all packs being filled or uploaded
_PACK_SIZES = (4 * _MIB + 64 * 1024, 16 * _MIB)  # smallest (it must hold the largest chunk), wanted
# bytes of the first pack, so that the store is busy soon; each pack may be twice as large as the
# one before
_FIRST = 2 << 20
_SOON = 2 << 20  # bytes of each pack while a caller waits
_WORK = 4  # windows that a worker takes at once

# with its address, if it is memory that may come again
Window = tuple[Stream, PageBuffer, int, int, At | None]
Work = list[tuple[bytes, PageBuffer, int, int]]


class Aborted(CriuctlError):
    """The dump was given up."""

    code = "aborted"


class Pipeline:
    """The threads of one dump and what they share; `close` ends them whatever has happened."""

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        index: Index,
        config: Config,
        reporter: Reporter,
        uid: int = 0,
    ) -> None:
        self.stats = WriterStats()
        self.expected = 0  # bytes of all windows, as estimated; 0: unknown
        self.packs: list[PackIndex] = []  # durable in the store
        # older packs that this dump relies on, and their sizes
        self.referenced: dict[bytes, int] = {}
        self._store, self._sealer, self._index, self._reporter = store, sealer, index, reporter
        self._user = sealer.user_of(uid)
        self.level = config.compression  # zstd; may be changed at any time
        # a pack of this many bytes is sent although more would fit
        self._enough, self._growing = _FIRST, True
        self.workers = workers = config.workers or min(len(os.sched_getaffinity(0)), 16)
        uploads = max(config.uploads, 1)
        smallest, wanted = _PACK_SIZES
        slots = workers + uploads
        size = min(wanted, max(smallest, _PACK_BUDGET // slots))
        self.buffers = BufferPool(
            max(config.buffers_mib * _MIB // BUFFER_SIZE, 6), BUFFER_SIZE, self.check, kept=1
        )
        self._pack_buffers = BufferPool(slots, size, self.check, memory=store.memory)
        # packs that no worker is filling at the moment
        self._open: list[tuple[PackBuilder, PageBuffer]] = []
        self._seen: set[bytes] = set()
        self._ahead: dict[bytes, int] = {}  # new chunks that no kept stream has, and their sizes
        self._compact: PageBuffer | None = None
        self._compact_fill = 0
        self._layers: Layers | None = None  # set once memory was sent ahead
        self._windows: SimpleQueue[
            Sequence[Window] | threading.Event | Together | Stored | None
        ] = SimpleQueue()
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[PackBuilder, PageBuffer] | None] = SimpleQueue()
        self._state = threading.Condition(threading.Lock())  # guards the following attributes
        self._error: BaseException | None = None
        self._working = 0  # windows given to the workers that are not in a pack yet
        self._uploading = 0  # packs that are not in the store yet
        self._puts = 0  # uploads under way
        self._put_since = 0.0
        self._hasher = self._thread(self._hash, "hash")
        self._workers = [self._thread(self._compress, f"pack-{n}") for n in range(workers)]
        self._uploaders = [self._thread(self._upload, f"put-{n}") for n in range(uploads)]
        self._threads = [self._hasher, *self._workers, *self._uploaders]
        self._started = False

    # -- for the producer
    # ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, once."""
        if not self._started:
            self._started = True
            try:
                for thread in self._threads:
                    thread.start()
            except BaseException as error:  # there may be no memory for more threads
                self.fail(error)
                raise

    def hurry(self) -> None:
        """Keep packs small from now on: a caller waits for new content."""
        with self._state:
            self._enough, self._growing = _SOON, False

    def submit(self, batch: Sequence[Window]) -> None:
        """Hand over windows; each is a user of its buffer until it is processed."""
        self.check()
        self.start()
        self._windows.put(batch)

    def check(self) -> None:
        """Raise the first error of any thread."""
        if self._error is not None:
            raise self._error

    def wait_hashed(self) -> None:
        """Wait until every window handed over so far is hashed, and dropped if it is known."""
        self.check()
        if self._started:
            barrier = threading.Event()
            self._windows.put(barrier)
            barrier.wait()
        self.check()

    def put_together(self, together: Together) -> None:
        """Put a stream together of loose pages that were handed over before."""
        self.check()
        self.start()
        self._windows.put(together)
        together.done.wait()
        self.check()

    def take_over(self, stored: Stored) -> bool:
        """Make loose pages of what older checkpoints have stored; return whether the store has all
        of it, else nothing has changed.
        """
        self.check()
        self.start()
        self._windows.put(stored)
        stored.done.wait()
        self.check()
        return stored.found

    def flush(self) -> None:
        """Wait until everything handed over so far is durable in the store."""
        self.wait_hashed()
        with self._state:
            self._state.wait_for(lambda: self._working == 0 or self._error is not None)
        self.check()
        while self._open:
            self._finish(*self._open.pop())
        with self._state:
            self._state.wait_for(lambda: self._uploading == 0 or self._error is not None)
        self.check()

    def fail(self, error: BaseException) -> None:
        """Stop everything because of `error`; the first error is kept."""
        with self._state:
            if self._error is None:
                self._error = error
            self._state.notify_all()
        self.buffers.wake()
        self._pack_buffers.wake()

    def close(self, until: float | None = None) -> bool:
        """End and join all threads and give the memory back; content that is not durable by now is
        dropped.

        With `until`, a monotonic time, threads that have not ended by then are abandoned. Return
        whether all have ended.
        """
        self.fail(Aborted("the dump was given up"))
        ended = True
        if self._started:
            self._windows.put(None)
            ended = _join([self._hasher], until)
            for _ in self._workers:
                self._work.put(None)
            ended = _join(self._workers, until) and ended
            for _ in self._uploaders:
                self._full.put(None)
            ended = _join(self._uploaders, until) and ended
        self._open.clear()
        self._seen.clear()
        self._ahead.clear()
        self._layers = None
        self.buffers.close()
        self._pack_buffers.close()
        return ended

    def leave_out_unused(self) -> list[PackIndex]:
        """Take packs that hold only content sent ahead, and in no kept stream, off the list of
        packs; return them.
        """
        ahead = self._ahead
        unused = [
            pack for pack in self.packs if ahead and all(chunk in ahead for chunk, *_ in pack)
        ]
        self.packs = [pack for pack in self.packs if pack not in unused]
        return unused

    # -- threads
    # ---------------------------------------------------------------------------------------

    def _thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(
            target=self._guard, args=(run,), name=f"criuctl-{name}", daemon=True
        )

    def _guard(self, run: Callable[[], None]) -> None:
        """Run one thread's loop until it ends; an error becomes the pipeline's, and later items are
        dropped.
        """
        while True:
            try:
                run()
                return
            except BaseException as error:
                self.fail(error)

    def _hash(self) -> None:
        while (batch := self._windows.get()) is not None:
            if isinstance(batch, threading.Event | Together | Stored):
                try:
                    if self._error is None:
                        self._between(batch)
                except BaseException as error:  # recorded before waiting callers go on
                    self.fail(error)
                finally:
                    (batch if isinstance(batch, threading.Event) else batch.done).set()
            elif self._error is None:
                self._hash_batch(batch)

    def _between(self, what: threading.Event | Together | Stored) -> None:
        """Do what a caller waits for, behind all windows so far."""
        if isinstance(what, Stored):
            self._take_over(what)
            return
        if self._layers is not None:
            self._layers.end_patch()
        self._end_compact()
        if isinstance(what, Together):
            self._put_together(what)

    def _hash_batch(self, batch: Sequence[Window]) -> None:
        """Name the windows by their hashes, and give the workers those that the store lacks."""
        chunk_id, entry, stats = self._chunk_id, CHUNK_ENTRY.pack, self.stats
        named: Work = []  # chunks with their ids
        kept: set[bytes] = set()  # ids of chunks that a kept stream has
        finished: dict[PageBuffer, int] = {}  # windows of a buffer that need no more work
        for stream, buffer, start, end, at in batch:
            content = buffer.view[start:end]
            stats.bytes_in += end - start
            wanted = at is not None or stream.loose is not None
            layers = self._layers_of(stream) if wanted else None
            if stream.loose is not None and layers is not None:
                places, chunk = (
                    layers.scattered(content) if stream.scattered else layers.whole(content)
                )
                stream.loose.extend(places)
                if not chunk:
                    finished[buffer] = finished.get(buffer, 0) + 1
                    continue
            elif at is None or layers is None:
                assert stream.made is None, "memory without addresses behind memory with them"
                chunk = chunk_id(content)
                if stream.kept:
                    stream.packed += entry(chunk, end - start)
                    stream.size += end - start
            else:
                places, chunk = layers.settle(at, content, last=stream.kept)
                if stream.kept:
                    stream.made = stream.made or Composition(layers.chunks)
                    kept.update(stream.made.add(places))
                if not chunk:
                    finished[buffer] = finished.get(buffer, 0) + 1
                    continue
            if stream.kept:
                kept.add(chunk)
            named.append((chunk, buffer, start, end))
        stats.chunks += len(batch)
        unknown = self._unknown({chunk: end - start for chunk, _buffer, start, end in named}, kept)
        work: Work = []
        for item in named:
            chunk, buffer, _start, _end = item
            if chunk in unknown:
                unknown.remove(chunk)
                work.append(item)
            else:
                finished[buffer] = finished.get(buffer, 0) + 1
        if work:
            if len(work) * 2 <= len(batch) and self.buffers.low():
                work = self._compacted(work, finished)
            self._give(work)
        for buffer, users in finished.items():
            self.buffers.done(buffer, users)
        total = max(self.expected, stats.bytes_in) if self.expected else None
        self._reporter.progress("pages", stats.bytes_in, total)

    def _put_together(self, together: Together) -> None:
        """Make the stream of the places that its pages have by now."""
        stream = together.stream
        assert stream.loose is not None and self._layers is not None
        places = stream.loose
        stream.made = made = Composition(self._layers.chunks)
        used: set[bytes] = set()
        for window in together.windows:
            used.update(made.add([places[number] for number in window]))
        self.stats.bytes_unused -= sum(self._ahead.pop(chunk, 0) for chunk in used)

    def _take_over(self, stored: Stored) -> None:
        sizes = {part.chunk: part.size for part in stored.parts}
        places = self._index.find(list(sizes))
        layers, loose = self._layers_of(stored.stream), stored.stream.loose
        assert layers is not None and loose is not None
        if any(chunk not in places or places[chunk].plain != sizes[chunk] for chunk in sizes):
            return
        self._seen.update(sizes)
        self.referenced.update({place.pack: place.pack_size for place in places.values()})
        for run in layers.stored(stored.parts):
            loose.extend(run)
        stored.found = True

    def _unknown(self, sizes: dict[bytes, int], kept: Collection[bytes]) -> set[bytes]:
        """Return those of these chunks that must be stored now; `kept` are those that a kept stream
        has.
        """
        stats, ahead = self.stats, self._ahead
        fresh = [chunk for chunk in sizes if chunk not in self._seen]
        known = self._index.find(fresh) if fresh else {}
        self._seen.update(fresh)
        for place in known.values():
            self.referenced[place.pack] = place.pack_size
        unknown = {chunk for chunk in fresh if chunk not in known}
        for chunk in unknown:
            stats.chunks_new += 1
            stats.bytes_new += sizes[chunk]
            if chunk not in kept:
                ahead[chunk] = sizes[chunk]
                stats.bytes_unused += sizes[chunk]
        if ahead:
            stats.bytes_unused -= sum(ahead.pop(chunk, 0) for chunk in kept)
        return unknown

    def _chunk_id(self, content: memoryview) -> bytes:
        """Return the id of a chunk of this writer's user."""
        return self._sealer.chunk_id(content, self._user)

    def _layers_of(self, stream: Stream) -> Layers | None:
        """Return the page layers for this stream, if any of its windows were, or are, sent
        ahead.
        """
        if self._layers is None and not stream.kept:
            self._layers = Layers(
                self._chunk_id, self._patch_buffer, self._patch, self.buffers.done
            )
        return self._layers if not stream.packed else None

    def _patch_buffer(self) -> PageBuffer:
        """Wait for a spare buffer.

        Waiting windows use only buffers that `acquire` gave, and this thread holds none of the
        others, so the workers will finish with them.
        """
        self._end_compact()
        return self.buffers.acquire(spare=True)

    def _patch(self, chunk: Chunk, buffer: PageBuffer, start: int, end: int) -> None:
        """Store a complete chunk of changed pages."""
        if self._unknown({chunk.id: end - start}, [chunk.id] if chunk.used else ()):
            self.buffers.add(buffer)
            self._give([(chunk.id, buffer, start, end)])

    def _give(self, work: Work) -> None:
        """Give this work to the workers."""
        with self._state:
            self._working += len(work)
        for begin in range(0, len(work), _WORK):
            self._work.put(work[begin : begin + _WORK])

    def _compacted(self, work: Work, finished: dict[PageBuffer, int]) -> Work:
        """Move the few new windows of mostly known buffers together, so that those buffers become
        free.
        """
        moved: Work = []
        for item in work:
            chunk, buffer, start, end = item
            size = end - start
            if self._compact is not None and self._compact_fill + size > len(self._compact.view):
                self._end_compact()
            if self._compact is None:
                self._compact, self._compact_fill = self.buffers.acquire_spare(), 0
            if self._compact is None:
                moved.append(item)
                continue
            begin, self._compact_fill = self._compact_fill, self._compact_fill + size
            self._compact.view[begin : begin + size] = buffer.view[start:end]
            self.buffers.add(self._compact)
            moved.append((chunk, self._compact, begin, begin + size))
            finished[buffer] = finished.get(buffer, 0) + 1
        return moved

    def _end_compact(self) -> None:
        if self._compact is not None:
            self.buffers.done(self._compact)
            self._compact = None

    def _compress(self) -> None:
        # made with the first work item: an error before that would repeat endlessly, see `_guard`
        level, compress = 0, None
        while (work := self._work.get()) is not None:
            if compress is None or level != self.level:
                level = self.level
                compress = Compressor(level)
            if self._error is None:
                self._pack(work, compress)

    def _pack(self, work: Work, compress: Compressor) -> None:
        """Put these windows into a pack that no other worker is filling."""
        spent = 0.0
        with self._state:
            current = self._open.pop() if self._open else None
        for chunk, buffer, start, end in work:
            if current is not None and not current[0].fits(end - start):
                self._finish(*current)
                current = None
            if current is None:
                slot = self._pack_buffers.acquire()
                current = PackBuilder(self._sealer, slot.view), slot
            content = buffer.view[start:end]
            began = time.monotonic()
            codec, payload = compress(content)
            current[0].add(chunk, end - start, codec, payload)
            spent += time.monotonic() - began
            self.buffers.done(buffer)
        if current is not None and current[0].size >= self._enough:
            self._finish(*current)
            current = None
        with self._state:
            if current is not None:
                self._open.append(current)
            self.stats.packing += spent
            self._working -= len(work)
            if self._working == 0:
                self._state.notify_all()

    def _finish(self, builder: PackBuilder, slot: PageBuffer) -> None:
        """Give a full pack to the uploaders."""
        with self._state:
            self._uploading += 1
            if self._growing:
                self._enough = min(2 * self._enough, len(slot.view))
        self._full.put((builder, slot))

    def _upload(self) -> None:
        while (full := self._full.get()) is not None:
            builder, slot = full
            if self._error is None:
                index, data = builder.finish()
                with self._sending():
                    self._store.put(object_name(index.pack), data)
                with self._state:
                    self.packs.append(index)
                    self.stats.bytes_stored += index.size
                    self._uploading -= 1
                    self._state.notify_all()
                self._reporter.progress("upload", self.stats.bytes_stored)
            self._pack_buffers.done(slot)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Measure the time in which at least one pack is being uploaded."""
        with self._state:
            if not self._puts:
                self._put_since = time.monotonic()
            self._puts += 1
        try:
            yield
        finally:
            with self._state:
                self._puts -= 1
                if not self._puts:
                    self.stats.sending += time.monotonic() - self._put_since


def _join(threads: Iterable[threading.Thread], until: float | None) -> bool:
    ended = True
    for thread in threads:
        if thread.ident is not None:  # otherwise it could not be started
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            ended = ended and not thread.is_alive()
    return ended
