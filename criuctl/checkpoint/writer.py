"""Writing one checkpoint: streams in, packs, then the manifest.

A `CheckpointWriter` is a context manager. `commit` is the commit point. Before it everything can be
given up, and leaving the context without a commit does so: threads are joined, memory is given
back, and packs that no other writer can know of are deleted as far as the store allows
(`publication`).
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from ..config import Config
from ..errors import CriuctlError
from .buffers import BUFFER_SIZE, PageBuffer
from .chunks import (
    CHUNK_ENTRY,
    FILE_PIECE,
    INLINE_CHUNKS,
    MAX_CHUNK,
    PAGE,
    WINDOW,
    Extent,
    StreamRef,
)
from .compression_level import fitting
from .layers import At
from .manifest import Manifest
from .pipeline import Pipeline, Window
from .publication import Publication
from .streams import Stored, Stream, Together, WriterStats
from .summary import CheckpointSummary

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import Buffer
    from .repository import Repository

_BATCH = 16  # windows handed over to the pipeline at once
_MEASURABLE = 32 << 20  # plain bytes; below this, speeds are not measured
_LAST = 5.0  # seconds that abandoned threads have to end


class FileDigest(Struct, frozen=True):
    """The result of `CheckpointWriter.add_file`."""

    digest: str  # BLAKE3 of the contents, hex
    size: int  # bytes read
    changed: bool  # the file was written to meanwhile: its contents may mix several moments


class CheckpointWriter:
    """Takes the content of one checkpoint; made by `Repository.writer`.

    `acquire`, `window` and `release` are the fast path: content is written into buffers of the
    pool, and it is copied only when that frees memory. All methods may be called from any thread;
    the windows of one stream keep the order of the calls.
    """

    def __init__(
        self, repository: Repository, pipeline: Pipeline, reporter: Reporter, *, layers: bool = True
    ) -> None:
        """Make a writer; without `layers` everything is stored in whole windows."""
        self._repository = repository
        self._layers = layers
        self._pipeline = pipeline
        self._reporter = reporter
        self._streams: dict[Hashable, Stream] = {}
        self._tailed: list[Stream] = []  # contains every stream that has a tail
        self._ahead = Stream(kept=False)
        self._loose = Stream(kept=False, loose=array("Q"))
        self._scattered = Stream(kept=False, loose=self._loose.loose, scattered=True)
        self._loose_pages = 0
        self._lock = threading.RLock()
        self._pending: list[Window] = []
        self._small: PageBuffer | None = None  # the buffer that small content is copied to
        self._small_fill = 0
        self._zeros: PageBuffer | None = None
        self._dirty = False  # windows were submitted since the last wait for the hasher
        self._publication = Publication(repository, pipeline, reporter)
        self._given_up = False

    @property
    def stats(self) -> WriterStats:
        """Return the counts and times so far; they are exact after `flush`."""
        return self._pipeline.stats

    def expect(self, amount: int) -> None:
        """Report progress as a part of about this many bytes."""
        self._pipeline.expected = amount

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and, without a `commit`, give the checkpoint up. Idempotent.

        After `give_up`, requests that hang in the store are abandoned, and objects already in the
        store are left to the garbage collection.
        """
        until = time.monotonic() + _LAST if self._given_up else None
        ended = self._pipeline.close(until)
        if not (self._publication.wait(until) and ended):
            self._repository.hangs = True
            return
        self._publication.close()
        self._streams.clear()
        self._pending.clear()

    def give_up(self, error: CriuctlError) -> None:
        """Make every call under way, and every later one, raise `error` instead of waiting for the
        store. Callable from any thread.
        """
        self._given_up = True
        self._pipeline.fail(error)

    # -- content
    # ---------------------------------------------------------------------------------------

    def acquire(self) -> PageBuffer:
        """Return a free buffer of `BUFFER_SIZE` bytes; wait while all are in use. Raise the first
        error of any thread.
        """
        self._submit()
        return self._pipeline.buffers.acquire()

    def window(
        self, key: Hashable, buffer: PageBuffer, start: int, end: int, at: int | None = None
    ) -> None:
        """Append ``buffer.view[start:end]`` to the stream `key` as its next chunk. It must not
        change until it is released.

        With `at`, the window is pages of the memory `key`, starting at that address. Pages that
        were sent `ahead` and have not changed since are not stored again.
        """
        if (
            not 0 <= start < end <= len(buffer.view)
            or end - start > MAX_CHUNK
            or (at is not None and (end - start) % PAGE)
        ):
            raise ValueError(f"no window: {start}..{end}")
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = Stream()
            if stream.tail:
                self._end_tail(stream)
            self._window(
                stream, buffer, start, end, (key, at) if at is not None and self._layers else None
            )

    def ahead(
        self, buffer: PageBuffer, start: int, end: int, key: Hashable = None, at: int | None = None
    ) -> None:
        """Store ``buffer.view[start:end]`` now if the store lacks it: it will probably be a chunk
        of a stream.

        It belongs to no stream yet. A later `window` with the same content reuses it. Content that
        no window uses is counted in `WriterStats.bytes_unused` and left to the garbage collection.
        `at` is as for `window`: only the pages that changed since they were last sent ahead are
        stored.
        """
        with self._lock:
            self._window(
                self._ahead,
                buffer,
                start,
                end,
                (key, at) if at is not None and self._layers else None,
            )

    @property
    def layered(self) -> bool:
        """Whether pages can be stored apart from their windows, as loose ones are."""
        return self._layers

    def loose(self, buffer: PageBuffer, start: int, end: int, *, scattered: bool = False) -> int:
        """Store the pages in ``buffer.view[start:end]``, which `put_together` makes streams of, and
        return the number of the first one; the others follow it.

        Without `scattered` they become one chunk; with it they share chunks with other pages. Pages
        that no stream has are left to the garbage collection.
        """
        with self._lock:
            number, self._loose_pages = (
                self._loose_pages,
                self._loose_pages + (end - start) // PAGE,
            )
            self._window(self._scattered if scattered else self._loose, buffer, start, end)
        return number

    def take_over(self, parts: Sequence[Extent]) -> int | None:
        """Make loose pages of parts of streams that are stored already; return the number of the
        first page, or None if the store lacks some of them.

        Parts consist of whole pages.
        """
        with self._lock:
            self._submit()
            self._dirty = True
            if not self._pipeline.take_over(Stored(self._loose, parts)):
                return None
            number = self._loose_pages
            self._loose_pages += sum(part.length for part in parts) // PAGE
        return number

    def put_together(self, key: Hashable, windows: Sequence[Sequence[int]]) -> None:
        """Make the stream `key` of loose pages: their numbers, window by window."""
        self._submit()
        stream = Stream(loose=self._loose.loose)
        self._pipeline.put_together(Together(stream, windows))
        stream.loose = None
        with self._lock:
            self._streams[key] = stream

    def release(self, buffer: PageBuffer) -> None:
        """Hand `buffer` back: it is complete, and is used again when its last window is
        processed.
        """
        self._submit()
        self._pipeline.buffers.done(buffer)

    def add_bytes(self, key: Hashable, data: Buffer) -> None:
        """Append small content to the stream `key`; it is cut into chunks of 256 KiB."""
        view = memoryview(data).cast("B")
        with self._lock:
            stream = self._streams.setdefault(key, Stream())
            while len(view):
                if not stream.tail:
                    self._tailed.append(stream)
                step = min(len(view), WINDOW - len(stream.tail))
                stream.tail += view[:step]
                view = view[step:]
                if len(stream.tail) == WINDOW:
                    self._end_tail(stream)

    def add_file(self, key: Hashable, fd: int, size: int) -> FileDigest:
        """Append the first `size` bytes of an open regular file to the stream `key`.

        Holes are not read. If the file has become shorter, reading ends early: see
        `FileDigest.size` and `changed`. Raise `OSError` if it cannot be read. The descriptor's file
        offset is left as it is.
        """
        from blake3 import blake3

        before = os.fstat(fd)
        hasher = blake3()
        with self._lock:
            stream = self._streams.setdefault(key, Stream())
            self._end_tail(stream)
        done = 0
        while done < size:
            hole = _hole(fd, done, min(size, before.st_size))
            if hole:
                self._add_hole(stream, hole, hasher)
                done += hole
                continue
            buffer = self.acquire()
            try:
                fill = _read(fd, buffer.view[: min(len(buffer.view), size - done)], done)
                hasher.update(buffer.view[:fill])
                with self._lock:
                    for start in range(0, fill, FILE_PIECE):
                        self._window(stream, buffer, start, min(start + FILE_PIECE, fill))
            finally:
                self.release(buffer)
            if fill == 0:
                break
            done += fill
        after = os.fstat(fd)
        same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        return FileDigest(hasher.hexdigest(), done, changed=not same or done < size)

    def _add_hole(self, stream: Stream, size: int, hasher: Any) -> None:
        """Append `size` zeros in whole pieces, all from the one buffer of zeros."""
        if self._zeros is None:
            self._zeros = PageBuffer(memoryview(bytes(FILE_PIECE)))
            self._zeros.users = 1  # never released: it must not be filled with other content
        for start in range(0, size, FILE_PIECE):
            piece = min(FILE_PIECE, size - start)
            hasher.update(self._zeros.view[:piece])
            with self._lock:
                self._window(stream, self._zeros, 0, piece)
        self._submit()

    def adapt(self, before: WriterStats) -> int:
        """Choose the zstd level that suits the store, from the progress since `before`; return it.

        A level that the configuration sets to another value than the default is kept.
        """
        pipeline, now = self._pipeline, self.stats
        packing, sending = now.packing - before.packing, now.sending - before.sending
        plain, stored = now.bytes_new - before.bytes_new, now.bytes_stored - before.bytes_stored
        if (
            self._repository.config.compression == Config().compression
            and plain >= _MEASURABLE
            and packing > 0
            and sending > 0
        ):
            workers = min(pipeline.workers, len(os.sched_getaffinity(0)))
            pipeline.level = fitting(
                pipeline.level, workers * plain / packing, stored / plain, stored / sending
            )
        return pipeline.level

    def hurry(self) -> None:
        """Send new content soon, in smaller packs, while other content is still being read: a
        caller is waiting from now on.
        """
        self._pipeline.hurry()

    # -- barriers
    # --------------------------------------------------------------------------------------

    def wait_hashed(self) -> None:
        """Wait until every window so far is hashed and, if the store has its content, dropped.

        New content is then in this process's memory, so the owner of the original may change it.
        """
        with self._lock:
            while self._tailed:
                self._end_tail(self._tailed.pop(0))
            self._submit()
            dirty, self._dirty = self._dirty, False
        if dirty:
            self._pipeline.wait_hashed()
        self._pipeline.check()

    def stream(self, key: Hashable) -> StreamRef:
        """Return the reference to the stream `key` as it is now; wait for its windows to be
        hashed.
        """
        self.wait_hashed()
        return self._reference(self._streams.get(key) or Stream())

    def joined(self, keys: Sequence[Hashable]) -> StreamRef:
        """Return the reference to one stream that is made of these, one after the other.

        They hold windows, small content or files, not memory that was sent ahead.
        """
        self.wait_hashed()
        streams = [self._streams[key] for key in keys]
        packed = b"".join(bytes(stream.packed) for stream in streams)
        return self._sequence(packed, sum(stream.size for stream in streams))

    def keys(self) -> frozenset[Hashable]:
        """Return the keys of all streams so far."""
        with self._lock:
            return frozenset(self._streams)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Drop all other streams: they are to be written again.

        Content that comes again is not stored twice. Content that does not is left to the garbage
        collection.
        """
        self.wait_hashed()
        with self._lock:
            self._streams = {key: stream for key, stream in self._streams.items() if key in keys}

    def flush(self) -> None:
        """Wait until everything so far is durable in the store."""
        self.wait_hashed()
        self._pipeline.flush()

    def commit(
        self, manifest: Manifest, allowed: Callable[[], object] | None = None
    ) -> CheckpointSummary:
        """Make everything durable, then publish `manifest` under the session's next number.

        For `allowed` and the errors see `Publication.publish`.
        """
        self.flush()
        return self._publication.publish(manifest, allowed)

    # -- inside
    # ----------------------------------------------------------------------------------------

    def _window(
        self, stream: Stream, buffer: PageBuffer, start: int, end: int, at: At | None = None
    ) -> None:
        self._pipeline.buffers.add(buffer)
        self._pending.append((stream, buffer, start, end, at))
        if len(self._pending) >= _BATCH:
            self._submit()

    def _submit(self) -> None:
        """Hand the pending windows over to the pipeline."""
        with self._lock:
            if self._pending:
                batch, self._pending = self._pending, []
                self._dirty = True
                self._pipeline.submit(batch)

    def _end_tail(self, stream: Stream) -> None:
        """Make a chunk of the bytes that `add_bytes` has gathered."""
        size = len(stream.tail)
        if not size:
            return
        small = self._small
        if small is not None and self._small_fill + size > len(small.view):
            self.release(small)
            small = None
        if small is None:
            small, self._small_fill = self.acquire(), 0
            self._small = small
        start, self._small_fill = self._small_fill, self._small_fill + size
        small.view[start : self._small_fill] = stream.tail
        stream.tail = bytearray()
        self._window(stream, small, start, self._small_fill)

    def _reference(self, stream: Stream) -> StreamRef:
        made = stream.made
        if made is None:
            return self._sequence(bytes(stream.packed), stream.size)
        pages = self._sequence(*made.packed())
        return (
            StreamRef(made.size, pages=pages, runs=self._small_stream(made.packed_runs()))
            if made.layered
            else pages
        )

    def _sequence(self, packed: bytes, size: int) -> StreamRef:
        if len(packed) <= INLINE_CHUNKS * CHUNK_ENTRY.size:
            return StreamRef(size, packed)
        return StreamRef(size, b"", self._small_stream(packed))

    def _small_stream(self, content: Buffer) -> StreamRef:
        """Store a stream that only another reference points to."""
        inner: Hashable = ("part of a reference", object())
        self.add_bytes(inner, content)
        return self.stream(inner)


def _hole(fd: int, offset: int, size: int) -> int:
    """Return how many bytes from `offset` are whole pieces inside a hole of the file of `size`
    bytes; 0 for data.
    """
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:  # ENXIO: no data after `offset`; reading reports any other error
        data = size
    finally:
        os.lseek(fd, position, os.SEEK_SET)
    if data >= size:
        return max(size - offset, 0)
    return (data - offset) // FILE_PIECE * FILE_PIECE


def _read(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` from `offset`, holes with zeros; return the number of bytes read."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


__all__ = ["BUFFER_SIZE", "CheckpointWriter", "FileDigest", "PageBuffer", "WriterStats"]
