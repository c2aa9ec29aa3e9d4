"""Writing one checkpoint: streams in, packs, then the manifest.

A `CheckpointWriter` is a context manager.  `commit` is the commit point: everything before it can
be given up, and leaving the context without it does so: threads are joined, memory is given back,
and packs that nobody can know of yet are deleted as far as the store lets us.

Writing order, which every reader may rely on: packs, index segments, manifest.  Once a segment is
published other writers may rely on its packs, so from then on nothing is deleted any more, whatever
fails.  An `Intent` in the store stands around the commit, so that garbage collections on other
hosts know of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from ..config import Config
from ..errors import CriuctlError, Damaged, StoreUnreachable
from ..proc.threads import Later, side_by_side
from .buffers import BUFFER_SIZE, PageBuffer
from .chunks import ENTRY, FILE_PIECE, INLINE_CHUNKS, MAX_CHUNK, PAGE, WINDOW, StreamRef
from .compression_level import fitting
from .gclists import Intent
from .layers import At
from .manifest import CheckpointSummary, Manifest
from .packs import PackIndex, object_name
from .pipeline import Pipeline, Window
from .streams import Stream, WriterStats

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import Buffer
    from .repository import Repository

_BATCH = 16  # windows handed over at once
_MEASURABLE = 32 << 20  # plain bytes from which on speeds are measured
_LAST = 5.0  # seconds in which what has been given up may end
_CHECKERS = 8  # packs looked at side by side at the commit


class FileDigest(Struct, frozen=True):
    """What `CheckpointWriter.add_file` read."""

    digest: str  # BLAKE3 of the contents, hex
    size: int  # bytes read
    changed: bool  # somebody wrote to the file meanwhile: the contents may be of no one moment


class CheckpointWriter:
    """Takes the content of one checkpoint; made by `Repository.writer`.

    `acquire`, `window` and `release` are the fast way in: content is written into buffers of the
    pool and never copied again unless that frees memory.  All methods may be called from any
    thread; the windows of one stream keep the order of the calls.
    """

    def __init__(
        self, repository: Repository, pipeline: Pipeline, reporter: Reporter, *, layers: bool = True
    ) -> None:
        """Without `layers` everything is stored in whole windows."""
        self._repository = repository
        self._layers = layers
        self._pipeline = pipeline
        self._reporter = reporter
        self._streams: dict[Hashable, Stream] = {}
        self._tailed: list[Stream] = []  # all streams with a tail are among them
        self._ahead = Stream(kept=False)
        self._lock = threading.RLock()
        self._pending: list[Window] = []
        self._small: PageBuffer | None = None  # where small things are copied to
        self._small_fill = 0
        self._zeros: PageBuffer | None = None
        self._dirty = False  # windows were handed over since the hasher was waited for
        self._published: list[str] = []  # index segments that others may see
        self._unused: list[PackIndex] = []  # packs that nobody can know of
        self._intent: Intent | None = None  # until the manifest is there, or surely never will be
        self._committed = False
        self._told: threading.Thread | None = None
        self._committing: threading.Thread | None = None
        self._given_up = False

    @property
    def stats(self) -> WriterStats:
        """What it came to so far; exact after `flush`."""
        return self._pipeline.stats

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
        """End all threads; without a `commit`, give the checkpoint up.  May be called again.

        After `give_up` what hangs in the store is left to itself, and what is in the store to the
        garbage collection.
        """
        until = time.monotonic() + _LAST if self._given_up else None
        ended = self._pipeline.close(until)
        if self._committing is not None:
            self._committing.join(None if until is None else max(0.0, until - time.monotonic()))
            ended = ended and not self._committing.is_alive()
        if not ended:
            self._repository.hangs = True
            return
        if self._intent is not None:
            self._intent.end()
        if self._told is not None:
            self._told.join()
        if not self._committed and not self._published:
            self._unused += self._pipeline.packs
            self._pipeline.packs = []
        while self._unused:
            try:
                self._repository.store.delete(object_name(self._unused.pop().pack))
            except StoreUnreachable:  # so are the others; they are left to the garbage collection
                self._unused.clear()
            except CriuctlError:
                continue
        self._streams.clear()
        self._pending.clear()

    def give_up(self, error: CriuctlError) -> None:
        """Nobody waits for the store any more: every call under way, and every later one, raises
        `error`; from any thread.
        """
        self._given_up = True
        self._pipeline.fail(error)

    # -- content
    # ---------------------------------------------------------------------------------------

    def acquire(self) -> PageBuffer:
        """A free buffer of `BUFFER_SIZE` bytes; waits while all are in use.  Raises what went wrong
        in any thread.
        """
        self._submit()
        return self._pipeline.buffers.acquire()

    def window(
        self, key: Hashable, buffer: PageBuffer, start: int, end: int, at: int | None = None
    ) -> None:
        """``buffer.view[start:end]`` is the next chunk of the stream `key`; it must not change
        until it is released.

        With `at`, it is pages of the memory `key`, the first of them at that address: if they were
        sent `ahead`, those that have not changed since are not stored again.
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
        """``buffer.view[start:end]`` will probably be a chunk of a stream: store it now, if the
        store does not have it.

        It belongs to no stream.  Once a `window` has the same content it is known; what none has is
        `WriterStats.bytes_unused`, and left to the garbage collection.  With `at`, as for `window`:
        of what was sent ahead before, only the pages that have changed are stored.
        """
        with self._lock:
            self._window(
                self._ahead,
                buffer,
                start,
                end,
                (key, at) if at is not None and self._layers else None,
            )

    def release(self, buffer: PageBuffer) -> None:
        """Nothing more is written into `buffer`; it is used again when its last window is
        through.
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

        Holes are not read.  A file that is shorter by now ends early: `FileDigest.size` tells, and
        `changed`.  Raises `OSError` for what cannot be read.  The descriptor's own file offset is
        left as it is.
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
        """`size` zeros, whole pieces of the one buffer of zeros."""
        if self._zeros is None:
            self._zeros = PageBuffer(memoryview(bytes(FILE_PIECE)))
            self._zeros.users = 1  # for ever: it is nobody's to fill
        for start in range(0, size, FILE_PIECE):
            piece = min(FILE_PIECE, size - start)
            hasher.update(self._zeros.view[:piece])
            with self._lock:
                self._window(stream, self._zeros, 0, piece)
        self._submit()

    def adapt(self, before: WriterStats) -> int:
        """Fit the compression of what comes to the store, by what it came to since `before`; the
        zstd level.

        A level that the configuration sets to another value than the default is a wish, and stays.
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
        """From now on somebody waits: what is new is on its way soon, in smaller packs, beside what
        is still being read.
        """
        self._pipeline.hurry()

    # -- barriers
    # --------------------------------------------------------------------------------------

    def hashed(self) -> None:
        """Wait until every window so far is hashed and, if the store knows it, dropped.

        What is new is in memory of ours then: whoever owns the original may go on.
        """
        with self._lock:
            while self._tailed:
                self._end_tail(self._tailed.pop(0))
            self._submit()
            dirty, self._dirty = self._dirty, False
        if dirty:
            self._pipeline.hashed()
        self._pipeline.check()

    def stream(self, key: Hashable) -> StreamRef:
        """The reference to the stream `key` as it is now; waits for its windows to be hashed."""
        self.hashed()
        return self._reference(self._streams.get(key) or Stream())

    def keys(self) -> frozenset[Hashable]:
        """Of all streams so far."""
        with self._lock:
            return frozenset(self._streams)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Give up all other streams: they are to be written anew.

        What comes again is known.  What does not was stored for nothing, and is left to the garbage
        collection.
        """
        self.hashed()
        with self._lock:
            self._streams = {key: stream for key, stream in self._streams.items() if key in keys}

    def flush(self) -> None:
        """Wait until everything so far is durable in the store."""
        self.hashed()
        self._pipeline.flush()

    def commit(
        self, manifest: Manifest, allowed: Callable[[], object] | None = None
    ) -> CheckpointSummary:
        """Make everything durable, then publish `manifest` under the session's next number: THE
        commit point.

        `allowed` is asked just before that, beside the packs, and raises if it must not be.

        Raises `Damaged` when a pack of the checkpoint is gone, as when it shares one with older
        checkpoints (the next dump stores it again), `Conflict` when a garbage collection is
        deleting one, and every error of the store; then there is no checkpoint, but after
        `StoreUnreachable`, which leaves it open.  So does an interrupt: what the store is asked for
        is asked by a thread, so that the caller can be interrupted wherever the store hangs.
        """
        self.flush()
        work = Later(lambda: self._commit(manifest, allowed))
        thread = threading.Thread(target=work.run, name="criuctl-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no room for one more
            work.run()
        else:
            self._committing = thread
        try:
            return work.result()
        except BaseException as error:
            if thread.is_alive():  # we are interrupted, and it shall not go on to the manifest
                self._pipeline.fail(error)
            raise

    def _commit(
        self, manifest: Manifest, allowed: Callable[[], object] | None
    ) -> CheckpointSummary:
        self._unused += self._pipeline.leave_out_unused()
        self._reporter.step("index")
        index = self._repository.index
        packs = {
            **self._pipeline.referenced,
            **{pack.pack: pack.size for pack in self._pipeline.packs},
        }
        self._intent = intent = Intent(self._repository.store, self._repository.sealer, packs)
        intent.begin()
        threads = max(self._repository.config.uploads, _CHECKERS)
        missing, number, _ = side_by_side(
            "criuctl-commit",
            lambda: index.check_packs(
                packs, threads, listings=self._repository.capabilities.conditional_create
            ),
            lambda: self._repository.next_number(manifest),
            allowed or (lambda: None),
        )
        if missing:
            raise Damaged(
                "packs of this checkpoint, or of older ones, are missing or cut off in the "
                f"store: {', '.join(missing[:4])}",
                hint=(
                    "Dump again: what they held is stored anew. `criuctl verify --all` tells "
                    "which checkpoints are hurt."
                ),
                object=missing[0],
            )
        try:
            index.publish(self._pipeline.packs, self._published)
        except BaseException as error:
            # The segment may be there, and others may see it, also when a signal has ended the wait
            # for the store's answer.
            if isinstance(error, StoreUnreachable) or not isinstance(error, CriuctlError):
                self._published.append("perhaps")
            raise
        self._reporter.step("manifest")
        intent.check()
        self._pipeline.check()
        self._intent = None  # whatever interrupts this leaves open whether there is a manifest
        try:
            summary = self._repository.publish(manifest, number)
        except CriuctlError as error:
            self._intent = None if isinstance(error, StoreUnreachable) else intent
            raise
        self._committed = True
        self._end_aside(intent)
        return summary

    def _end_aside(self, intent: Intent) -> None:
        """The manifest is there: the frozen tree need not wait for what is removed."""
        told = threading.Thread(target=intent.end, name="criuctl-told", daemon=True)
        try:
            told.start()
        except RuntimeError:  # there is no room for one more
            intent.end()
        else:
            self._told = told

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
        """Hand the pending windows over."""
        with self._lock:
            if self._pending:
                batch, self._pending = self._pending, []
                self._dirty = True
                self._pipeline.submit(batch)

    def _end_tail(self, stream: Stream) -> None:
        """Make a chunk of what `add_bytes` has gathered."""
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
        if len(packed) <= INLINE_CHUNKS * ENTRY.size:
            return StreamRef(size, packed)
        return StreamRef(size, b"", self._small_stream(packed))

    def _small_stream(self, content: Buffer) -> StreamRef:
        """A stream that only a reference tells of."""
        inner: Hashable = ("part of a reference", object())
        self.add_bytes(inner, content)
        return self.stream(inner)


def _hole(fd: int, offset: int, size: int) -> int:
    """How many bytes from `offset` on are whole pieces in a hole of the file, which has `size`
    bytes; 0 for data.
    """
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:  # ENXIO: no data behind `offset`; any other error will be met again by reading
        data = size
    finally:
        os.lseek(fd, position, os.SEEK_SET)
    if data >= size:
        return max(size - offset, 0)
    return (data - offset) // FILE_PIECE * FILE_PIECE


def _read(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` from `offset`, holes with zeros; returns the bytes there are."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


__all__ = ["BUFFER_SIZE", "CheckpointWriter", "FileDigest", "PageBuffer", "WriterStats"]
