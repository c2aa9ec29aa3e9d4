"""Layers: of a window of memory that was stored before, only the changed pages are stored again.

A chunk is named by all of its content, so one changed page makes a window new. Memory that is read
in rounds (pre-copy) would be sent in whole windows each time, however few pages a program writes
to. So `Layers` remembers for each window where each of its pages is stored, and digests of its
pages. When the window comes again, the pages that differ go into the *patch*, a chunk that is still
being filled with pages of many windows. A window that is new, has another number of pages, or
differs in nearly all of them, is stored whole. So are the first few that changed, however small the
change: other checkpoints can reuse whole windows, and for a tree that changes little no layers are
made.

A window is remembered by its address, which is only a hint; the digests alone decide whether pages
are equal. They are GMAC: a hash of 128 bits that is universal under a secret key, here a random one
that never leaves this process, as the digests do not. So a program that writes the memory cannot
make a change that keeps the digest, and by chance one is missed in 2^116 (NIST SP 800-38D; the
constant nonce would matter only if the digests were visible). Processors have instructions for it,
so that single pages take half as long as with BLAKE3. (Sums with random weights would be faster,
but are not safe: modulo 2^64 two words that both change their top bit cancel.) The content that a
reader gets is checked as always, by the ids of chunks.

A `Composition` is the result: the chunks of a stream, and the pages of them that it consists of.
While all are whole chunks, it is an ordinary stream.

Everything here belongs to one thread, the hasher (see `pipeline`).
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from .buffers import PageBuffer
from .chunks import CHUNK_ENTRY, PAGE, WINDOW, Extent

_DIGEST = 16  # bytes
_NONCE = bytes(12)
_BLOCK = 4 * PAGE  # hashing this much at once takes half as long as its single pages
# the part of a window's pages that may have changed; a tree that writes that fast is still worth
# another round
_MOST = 7 / 8
LITTLE = 8 << 20  # bytes of windows that are stored whole first although few of their pages changed
_REMEMBERED = 1 << 16  # windows; with 64 pages each, 16 GiB of memory, and some 120 MiB here

At = tuple[Hashable, int]  # the memory of a window, and the address of its first page there

# Where a page is stored: the number of a chunk, and of a page in it, in one integer, so that the
# next page is one more.
_PAGE_BITS = 16
_PAGE_MASK = (1 << _PAGE_BITS) - 1
Places = Sequence[int]


class Chunk:
    """A chunk that is stored, or, while it has no id, the patch that is being filled."""

    __slots__ = ("id", "number", "size", "used")

    def __init__(self, number: int, id: bytes = b"", size: int = 0) -> None:
        self.number, self.id, self.size = number, id, size
        self.used = False  # a stream that is kept uses it


class Composition:
    """The composition of a stream."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        """Make an empty composition; `chunks` are all chunks that places refer to, by number."""
        self.chunks: list[Chunk] = []
        self.size = 0
        self.layered = False  # otherwise it is its chunks, one after another
        self._all = chunks
        self._numbers: dict[int, int] = {}
        self._runs = array("Q")

    def add(self, places: Places) -> list[bytes]:
        """Append a window of these pages; return the ids of the chunks that are new to the stream,
        if they have one yet.
        """
        before = len(self.chunks)
        numbers, runs = self._numbers, _runs(places)
        whole = self._all[runs[0][0] >> _PAGE_BITS]
        if len(runs) == 1 and runs[0] == (whole.number << _PAGE_BITS, whole.size // PAGE):
            # once for each occurrence in the stream, as an ordinary stream has it
            self._number(whole)
        else:
            self.layered = True
        for place, pages in runs:
            number = numbers.get(place >> _PAGE_BITS)
            if number is None:
                number = self._number(self._all[place >> _PAGE_BITS])
            self._runs.append(number | (place & _PAGE_MASK) << 32 | pages << 48)  # a `RUN`
        self.size += len(places) * PAGE
        return [chunk.id for chunk in self.chunks[before:] if chunk.id]

    def packed(self) -> tuple[bytes, int]:
        """Return the list of its chunks, and their size."""
        return b"".join(CHUNK_ENTRY.pack(c.id, c.size) for c in self.chunks), sum(
            c.size for c in self.chunks
        )

    def packed_runs(self) -> bytes:
        """Return the list of its runs."""
        if sys.byteorder == "big":
            self._runs.byteswap()
        return self._runs.tobytes()

    def _number(self, chunk: Chunk) -> int:
        chunk.used = True
        number = self._numbers[chunk.number] = len(self.chunks)
        self.chunks.append(chunk)
        return number


class Settled(NamedTuple):
    """The places of a window's pages."""

    places: Places
    new: bytes  # id of the chunk for the whole window, if it has to be stored


class _Version(Struct):
    """The last seen version of a window."""

    blocks: bytes  # digests
    pages: bytes
    places: array[int]


class Layers:
    """The known windows of memory."""

    def __init__(
        self,
        chunk_id: Callable[[memoryview], bytes],
        acquire: Callable[[], PageBuffer],
        store: Callable[[Chunk, PageBuffer, int, int], None],
        release: Callable[[PageBuffer], None],
    ) -> None:
        """Set up; `acquire` returns buffers for patches; a finished one is handed to `store`, at
        once.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._digest = AESGCM(os.urandom(16)).encrypt
        self._chunk_id, self._acquire, self._store, self._release = (
            chunk_id,
            acquire,
            store,
            release,
        )
        self._versions: dict[Hashable, _Version] = {}
        self.chunks: list[Chunk] = []  # by number
        self._patch: Chunk | None = None
        # of the patch, which is between `_start` and `_fill`
        self._buffer: PageBuffer | None = None
        self._start = self._fill = 0
        self._little = 0  # bytes of windows in which few pages changed

    def settle(self, at: At, content: memoryview, *, last: bool) -> Settled:
        """Return where the pages of this window are stored, or will be; with `last` it will not be
        seen again.
        """
        # Processes that share memory since a fork have it at the same address, and it is read in
        # only one of them.
        known = self._versions.get(at) or self._versions.get(at[1])
        pages = len(content) // PAGE
        if known is not None and len(known.places) == pages:
            version, changed = self._compared(known, content)
            if not changed or (len(changed) <= _MOST * pages and self._much(len(content))):
                for number in changed:
                    version.places[number] = self._put(content[number * PAGE : (number + 1) * PAGE])
                return self._settled(at, version, b"", last=last)
        else:
            version = _Version(b"", b"", array("Q")) if last else self._fresh(content)
        name = self._chunk_id(content)
        first = self._new_chunk(name, len(content)).number << _PAGE_BITS
        version.places = array("Q", range(first, first + pages))
        return self._settled(at, version, name, last=last)

    def whole(self, content: memoryview) -> Settled:
        """Return where the pages of a window will be stored that is not remembered."""
        name = self._chunk_id(content)
        first = self._new_chunk(name, len(content)).number << _PAGE_BITS
        return Settled(range(first, first + len(content) // PAGE), name)

    def scattered(self, content: memoryview) -> Settled:
        """Return where these pages will be stored: in the patch, with others."""
        return Settled(
            [self._put(content[at : at + PAGE]) for at in range(0, len(content), PAGE)], b""
        )

    def stored(self, parts: Iterable[Extent]) -> Iterator[range]:
        """Yield the places of pages that are in chunks of older checkpoints."""
        chunks: dict[bytes, Chunk] = {}
        for name, size, skip, length in parts:
            chunk = chunks.get(name)
            if chunk is None:
                chunk = chunks[name] = self._new_chunk(name, size)
            first = chunk.number << _PAGE_BITS | skip // PAGE
            yield range(first, first + length // PAGE)

    def end_patch(self) -> None:
        """Store the patch as it is."""
        self._end_chunk()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._release(buffer)

    # -- inside
    # ----------------------------------------------------------------------------------------

    def _much(self, size: int) -> bool:
        """Return whether, with this window, more than `LITTLE` bytes changed a little."""
        self._little += size
        return self._little > LITTLE

    def _settled(self, at: At, version: _Version, name: bytes, *, last: bool) -> Settled:
        if not last and (at in self._versions or len(self._versions) < 2 * _REMEMBERED):
            self._versions[at] = self._versions[at[1]] = version
        return Settled(version.places, name)

    def _fresh(self, content: memoryview) -> _Version:
        return _Version(self._digests(content, _BLOCK), self._digests(content, PAGE), array("Q"))

    def _compared(self, known: _Version, content: memoryview) -> tuple[_Version, list[int]]:
        """Return the known version of this window, its old places, and which pages have changed.

        Only where a block differs the digests of its pages are computed.
        """
        blocks = self._digests(content, _BLOCK)
        changed: list[int] = []
        pages = bytearray(known.pages)
        for block in _differing(known.blocks, blocks):
            first = block * (_BLOCK // PAGE)
            start, fresh = (
                first * _DIGEST,
                self._digests(content[block * _BLOCK : (block + 1) * _BLOCK], PAGE),
            )
            end = start + len(fresh)
            changed += [first + n for n in _differing(known.pages[start:end], fresh)]
            pages[start:end] = fresh
        return _Version(blocks, bytes(pages), known.places[:]), changed

    def _digests(self, content: memoryview, step: int) -> bytes:
        digest = self._digest
        return b"".join(
            [digest(_NONCE, b"", content[at : at + step]) for at in range(0, len(content), step)]
        )

    def _new_chunk(self, id: bytes = b"", size: int = 0) -> Chunk:
        self.chunks.append(Chunk(len(self.chunks), id, size))
        return self.chunks[-1]

    def _put(self, page: memoryview) -> int:
        """Copy a page into the patch; return its place."""
        if self._buffer is None:
            self._buffer = self._acquire()
            self._start = self._fill = 0
        if self._patch is None:
            self._patch = self._new_chunk()
        place = self._patch.number << _PAGE_BITS | (self._fill - self._start) // PAGE
        self._buffer.view[self._fill : self._fill + PAGE] = page
        self._fill += PAGE
        if self._fill - self._start == WINDOW:
            self._end_chunk()
            if self._fill + WINDOW > len(self._buffer.view):
                self.end_patch()
        return place

    def _end_chunk(self) -> None:
        """Name the patch and store it."""
        chunk, buffer, start = self._patch, self._buffer, self._start
        if chunk is not None and buffer is not None:
            self._patch, self._start = None, self._fill
            chunk.id, chunk.size = (
                self._chunk_id(buffer.view[start : self._fill]),
                self._fill - start,
            )
            self._store(chunk, buffer, start, self._fill)


def _differing(before: bytes, after: bytes) -> list[int]:
    """Return which digests differ."""
    if before == after:
        return []
    places = range(0, len(before), _DIGEST)
    return [
        n for n, at in enumerate(places) if before[at : at + _DIGEST] != after[at : at + _DIGEST]
    ]


def _runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of pages that follow each other: the place of the first, and their number."""
    runs: list[tuple[int, int]] = []
    first = following = -1
    for place in places:
        if place != following:
            runs.append((first, following - first))
            first = place
        following = place + 1
    runs.append((first, following - first))
    return runs[1:]
