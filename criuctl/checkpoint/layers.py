"""Layers: of a window of memory that was stored before, only the pages that changed are stored again.

A chunk is named by all of its content, so one changed page makes a window new.  Memory that is read in rounds (pre-copy)
would be sent in whole windows each time, however few pages a program writes to.  So `Layers` remembers for each window
where each of its pages is stored, and digests of its pages.  When the window comes again, the pages that differ go into
the *patch*, which is a chunk in the making: pages of many windows, one after the other.  A window that is new, has another
number of pages, or differs in nearly all of them, is stored whole.  So are the first few that changed, whatever is left of
them: whole windows are found again by other checkpoints, and of a tree that changes little no layers are made.

What is remembered is told by where the window lies, which is but a hint where to look: what is the same is decided by digests
alone.  They are BLAKE3, keyed with random bytes that never leave this process, cut to 128 bits.  Nobody who writes the memory
can make a change that keeps the digest without knowing the key, and by chance one is missed in 2^128.  (Sums with random
weights would be faster, but are not safe: modulo 2^64 two words that both change their top bit cancel.)  What a reader gets is
checked as always, by the ids of chunks.

A `Composition` is the other side: which chunks a stream rests on, and which of their pages it consists of.  As long as all
are whole chunks, it is an ordinary stream.

Everything here belongs to one thread, the hasher (see `pipeline`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .buffers import PageBuffer
from .chunks import ENTRY, PAGE, RUN, WINDOW

_DIGEST = 16  # bytes
_BLOCK = 4 * PAGE  # BLAKE3 takes that much at once two to three times as fast as single pages
_MOST = 7 / 8  # of a window's pages may have changed; a tree that writes that fast is still worth another round
LITTLE = 8 << 20  # bytes of windows that are stored whole first though few of their pages changed
_REMEMBERED = 1 << 16  # windows; with 64 pages each, 16 GiB of memory, and some 120 MiB here

At = tuple[Hashable, int]  # what a window is of, and the address of its first page there


class Chunk:
    """A chunk that is stored, or, while it has no id, the patch in the making."""

    __slots__ = ("id", "number", "size", "used")

    def __init__(self, number: int, id: bytes = b"", size: int = 0) -> None:
        self.number, self.id, self.size = number, id, size
        self.used = False  # a stream that is kept rests on it

    def whole(self, first: int, pages: int) -> bool:
        """Whether these are all of its pages."""
        return first == 0 and pages * PAGE == self.size


Run = tuple[Chunk, int, int]  # the first of its pages, how many


class Composition:
    """What a stream is made of."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.runs = bytearray()  # `RUN` records
        self.size = 0
        self.layered = False  # else it is its chunks, one after the other
        self._numbers: dict[Chunk, int] = {}

    def add(self, runs: Sequence[Run]) -> list[bytes]:
        """The next window is made of these; the ids of their chunks, as far as they have one yet."""
        for chunk, first, pages in runs:
            chunk.used = True
            if len(runs) == 1 and chunk.whole(first, pages):
                number = len(self.chunks)
                self.chunks.append(chunk)
                self._numbers[chunk] = number
            else:
                self.layered = True
                number = self._numbers.setdefault(chunk, len(self.chunks))
                if number == len(self.chunks):
                    self.chunks.append(chunk)
            self.runs += RUN.pack(number, first, pages)
            self.size += pages * PAGE
        return [chunk.id for chunk, _first, _pages in runs if chunk.id]

    def packed(self) -> tuple[bytes, int]:
        """The list of its chunks, and their size."""
        return b"".join(ENTRY.pack(c.id, c.size) for c in self.chunks), sum(c.size for c in self.chunks)


class Settled(NamedTuple):
    """What became of a window."""

    runs: Sequence[Run]
    new: bytes  # id of the chunk that all of it is, if that has to be stored


@dataclass(slots=True)
class _Version:
    """A window as it was last seen."""

    blocks: bytes  # digests
    pages: bytes
    runs: bytes = b""  # packed: there are many


class Layers:
    """What is known of the windows of memory."""

    def __init__(
        self,
        chunk_id: Callable[[memoryview], bytes],
        acquire: Callable[[], PageBuffer],
        store: Callable[[Chunk, PageBuffer, int, int], None],
        release: Callable[[PageBuffer], None],
    ) -> None:
        """Patches are made in buffers that come from `acquire`; a finished one is handed to `store`, at once."""
        from blake3 import blake3

        self._hash, self._key = blake3, os.urandom(32)
        self._chunk_id, self._acquire, self._store, self._release = chunk_id, acquire, store, release
        self._versions: dict[Hashable, _Version] = {}
        self._chunks: list[Chunk] = []  # by number
        self._patch: Chunk | None = None
        self._buffer: PageBuffer | None = None  # where the patch is, from `_start` to `_fill`
        self._start = self._fill = 0
        self._little = 0  # bytes of windows of which few pages changed

    def settle(self, at: At, content: memoryview, *, last: bool) -> Settled:
        """Where the pages of this window are stored, or will be; with `last` it will not be seen again."""
        # Processes that share memory since a fork have it at the same address, and it is read but in one of them.
        known = self._versions.get(at) or self._versions.get(at[1])
        pages = len(content) // PAGE
        version: _Version | None = None
        if known is not None and len(known.pages) == pages * _DIGEST:
            version = self._compared(known, content)
            changed = _differing(known.pages, version.pages)
            if not changed or (len(changed) <= _MOST * pages and self._much(len(content))):
                runs = self._patched(known.runs, changed, content)
                if not last:
                    self._remember(at, version, runs)
                return Settled(runs, b"")
        name = self._chunk_id(content)
        runs = [(self._new_chunk(name, len(content)), 0, pages)]
        if not last:
            version = version or _Version(self._digests(content, _BLOCK), self._digests(content, PAGE))
            self._remember(at, version, runs)
        return Settled(runs, name)

    def end_patch(self) -> None:
        """Hand over the patch as it is."""
        self._end_chunk()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._release(buffer)

    # -- inside ----------------------------------------------------------------------------------------

    def _much(self, size: int) -> bool:
        """Whether, with this window, more than `LITTLE` changed a little."""
        self._little += size
        return self._little > LITTLE

    def _compared(self, known: _Version, content: memoryview) -> _Version:
        """The digests of this window; only where a block differs those of its pages are taken."""
        blocks = self._digests(content, _BLOCK)
        pages = bytearray(known.pages)
        for block in _differing(known.blocks, blocks):
            first = block * (_BLOCK // PAGE) * _DIGEST
            fresh = self._digests(content[block * _BLOCK : (block + 1) * _BLOCK], PAGE)
            pages[first : first + len(fresh)] = fresh
        return _Version(blocks, bytes(pages))

    def _digests(self, content: memoryview, step: int) -> bytes:
        digest, key = self._hash, self._key
        return b"".join([digest(content[at : at + step], key=key).digest(_DIGEST) for at in range(0, len(content), step)])

    def _new_chunk(self, id: bytes = b"", size: int = 0) -> Chunk:
        self._chunks.append(Chunk(len(self._chunks), id, size))
        return self._chunks[-1]

    def _remember(self, at: At, version: _Version, runs: Sequence[Run]) -> None:
        if at in self._versions or len(self._versions) < 2 * _REMEMBERED:
            version.runs = b"".join([RUN.pack(chunk.number, first, pages) for chunk, first, pages in runs])
            self._versions[at] = version
            self._versions[at[1]] = version

    def _patched(self, packed: bytes, changed: Sequence[int], content: memoryview) -> list[Run]:
        """The runs with the changed pages replaced, which go into the patch."""
        runs = [(self._chunks[number], first, pages) for number, first, pages in RUN.iter_unpack(packed)]
        if not changed:
            return runs
        places = [(chunk, page) for chunk, first, pages in runs for page in range(first, first + pages)]
        for number in changed:
            places[number] = self._put(content[number * PAGE : (number + 1) * PAGE])
        return _joined(places)

    def _put(self, page: memoryview) -> tuple[Chunk, int]:
        """Copy a page into the patch; where it is then."""
        if self._buffer is None:
            self._buffer = self._acquire()
            self._start = self._fill = 0
        if self._patch is None:
            self._patch = self._new_chunk()
        place = self._patch, (self._fill - self._start) // PAGE
        self._buffer.view[self._fill : self._fill + PAGE] = page
        self._fill += PAGE
        if self._fill - self._start == WINDOW:
            self._end_chunk()
            if self._fill + WINDOW > len(self._buffer.view):
                self.end_patch()
        return place

    def _end_chunk(self) -> None:
        """Give the patch its name and store it."""
        chunk, buffer, start = self._patch, self._buffer, self._start
        if chunk is not None and buffer is not None:
            self._patch, self._start = None, self._fill
            chunk.id, chunk.size = self._chunk_id(buffer.view[start : self._fill]), self._fill - start
            self._store(chunk, buffer, start, self._fill)


def _differing(before: bytes, after: bytes) -> list[int]:
    """Which digests differ."""
    if before == after:
        return []
    places = range(0, len(before), _DIGEST)
    return [n for n, at in enumerate(places) if before[at : at + _DIGEST] != after[at : at + _DIGEST]]


def _joined(places: Sequence[tuple[Chunk, int]]) -> list[Run]:
    """These pages as runs."""
    runs: list[Run] = []
    last, first, end = places[0][0], places[0][1], places[0][1]
    for chunk, page in places:
        if chunk is not last or page != end:
            runs.append((last, first, end - first))
            last, first, end = chunk, page, page
        end += 1
    runs.append((last, first, end - first))
    return runs
