"""Chunks and streams: stored content, as numbers.

A *chunk* is a piece of plain content up to `MAX_CHUNK` bytes, named by its id: BLAKE3-256 keyed
with the store's chunk key, so that without the key the content of a store cannot be found out by
hashing guesses. A *stream* is a sequence of chunks; `StreamRef` names one. A long stream's list of
chunks is content too and is stored as a stream again (`StreamRef.list`), so a manifest stays small
for any content.

A *layered* stream is made of pages of another one: *runs* list pages of chunks in their order. It
has no chunks of its own, and pages outside all runs are not in it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, overload

from msgspec import Struct

from ..errors import Damaged
from .records import MAX_INT, damaged

ID_SIZE = 32
# memory is cut at multiples of this (see `criuctl.criu.pages`), and so is small content
WINDOW = 256 * 1024
FILE_PIECE = 1 << 20  # files are cut at multiples of this
MAX_CHUNK = 4 << 20  # a larger chunk is refused
INLINE_CHUNKS = 64  # a stream of more chunks stores its list as a stream
PAGE = 4096  # a layered stream is made of pages of this size
MAX_LIST_DEPTH = 3  # lists of lists; 3 levels hold more than any file system

CHUNK_ENTRY = struct.Struct("<32sI")  # id, plain size: one entry of a list of chunks
RUN = struct.Struct("<IHH")  # number of a chunk, its first page, pages: one run of a layered stream
LAYERS = "layers"  # the feature of a manifest that has such a stream


class Extent(NamedTuple):
    """A part of a chunk, as a part of a stream."""

    chunk: bytes
    size: int  # plain bytes of the whole chunk
    skip: int  # bytes of it before this part
    length: int


class StreamRef(Struct, frozen=True):
    """`size` plain bytes: in `chunks` (`CHUNK_ENTRY` records), or in `list`, or the pages of
    `pages` that `runs` select.
    """

    size: int = 0
    chunks: bytes = b""
    list: StreamRef | None = None
    pages: StreamRef | None = None
    runs: StreamRef | None = None  # `RUN` records

    @property
    def parts(self) -> tuple[StreamRef, ...]:
        """Return the sequences of chunks that it is made of."""
        return (self,) if self.pages is None or self.runs is None else (self.pages, self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON: `size` and ``"chunks": [[id, size], ...]``, ``"list": {...}``, or ``"pages":
        {...}`` and ``"runs": {...}``.
        """
        if self.pages is not None and self.runs is not None:
            return {"size": self.size, "pages": self.pages.to_dict(), "runs": self.runs.to_dict()}
        if self.list is not None:
            return {"size": self.size, "list": self.list.to_dict()}
        return {
            "size": self.size,
            "chunks": [[name.hex(), size] for name, size in entries(self.chunks)],
        }

    @classmethod
    def from_dict(cls, value: Any, where: str = "stream", depth: int = 0) -> StreamRef:
        """Return the reference in decoded JSON that may be hostile; raise `Damaged`."""
        size = value.get("size") if isinstance(value, dict) else None
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_INT:
            raise damaged(where, "has no size")
        if ("list" in value) + ("chunks" in value) + ("pages" in value) != 1 or (
            "pages" in value
        ) != ("runs" in value):
            raise damaged(where, "has neither chunks nor a list of them")
        if "pages" in value:
            if depth:
                raise damaged(where, "has layers, but is a part of something")
            pages, runs = (
                cls.from_dict(value[name], f"{where}.{name}", 1) for name in ("pages", "runs")
            )
            if runs.size % RUN.size or runs.size // RUN.size > size // PAGE:
                raise damaged(f"{where}.runs", "is not a list of runs")
            return cls(size, pages=pages, runs=runs)
        if "list" in value:
            if depth >= MAX_LIST_DEPTH:
                raise damaged(where, "is nested too deeply")
            inner = cls.from_dict(value["list"], f"{where}.list", depth + 1)
            if inner.size % CHUNK_ENTRY.size:
                raise damaged(f"{where}.list", "is not a list of chunks")
            return cls(size, b"", inner)
        found = value["chunks"]
        if not isinstance(found, list) or len(found) > INLINE_CHUNKS:
            raise damaged(where, "has no short list of chunks")
        packed = bytearray()
        for item in found:
            try:
                name, length = item
                raw = bytes.fromhex(name)
                if len(raw) != ID_SIZE or isinstance(length, bool) or not isinstance(length, int):
                    raise ValueError
                packed += CHUNK_ENTRY.pack(raw, length)
            except (TypeError, ValueError, struct.error):
                raise damaged(where, "has a chunk without id and size") from None
        made = cls(size, bytes(packed))
        check_entries(made.chunks, size, where)
        return made


def entries(packed: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield (id, plain size) of each chunk in a packed list."""
    return CHUNK_ENTRY.iter_unpack(packed)


class ChunkList(Sequence[tuple[bytes, int]]):
    """A packed list of chunks as (id, plain size) of each; it uses only the memory of the packed
    list.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // CHUNK_ENTRY.size

    @overload
    def __getitem__(self, number: int) -> tuple[bytes, int]: ...
    @overload
    def __getitem__(self, number: slice) -> ChunkList: ...
    def __getitem__(self, number: int | slice) -> tuple[bytes, int] | ChunkList:
        places = range(len(self))[number]
        if isinstance(places, int):
            return CHUNK_ENTRY.unpack_from(self._packed, places * CHUNK_ENTRY.size)
        if places.step != 1:
            raise ValueError("only neighbours can be taken out of a list of chunks")
        return ChunkList(
            self._packed[places.start * CHUNK_ENTRY.size : places.stop * CHUNK_ENTRY.size]
        )

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return CHUNK_ENTRY.iter_unpack(self._packed)


def check_entries(packed: bytes, size: int, where: str) -> None:
    """Raise `Damaged` unless the packed list's sizes are possible and add up to `size`."""
    if len(packed) % CHUNK_ENTRY.size:
        raise damaged(where, "is not a list of chunks")
    total = 0
    for _id, length in CHUNK_ENTRY.iter_unpack(packed):
        if not 0 < length <= MAX_CHUNK:
            raise damaged(where, f"has a chunk of {length} bytes")
        total += length
    if total != size:
        raise damaged(where, f"has chunks of {total} bytes where {size} are said")


class Layout:
    """Where the parts of a stream are: of a layered one the runs, otherwise its chunks.

    `starts` are the offsets of the parts in the stream. There may be hundreds of thousands, of
    which a few are requested.
    """

    def __init__(self, chunks: Sequence[tuple[bytes, int]], runs: bytes | None, size: int) -> None:
        """Compute the layout of a stream of `size` bytes from its chunks and, if it is layered, its
        packed runs; raise `Damaged`.
        """
        self._chunks = chunks
        self._runs: array[int] | None = None
        lengths: Iterable[int] = (size for _chunk, size in chunks)
        if runs is not None:
            if len(runs) % RUN.size:
                raise damaged("a stream", "has runs that are cut off")
            self._runs = array("Q", runs)
            if sys.byteorder == "big":
                self._runs.byteswap()
            if not all(run >> 48 for run in self._runs):
                raise damaged("a stream", "has a run without pages")
            lengths = ((run >> 48) * PAGE for run in self._runs)
        # Neither these nor the parts are a list: a stream from another host may have very many.
        self.starts = array("Q", accumulate(lengths, initial=0))
        total = self.starts.pop()
        if total != size:
            raise damaged("a stream", f"has parts of {total} bytes where {size} are said")

    def parts(self, low: int = 0, high: int | None = None) -> list[Extent]:
        """Return the parts from number `low` up to, not including, `high`; raise `Damaged`."""
        return list(self.walk(low, high))

    def walk(self, low: int = 0, high: int | None = None) -> Iterator[Extent]:
        """Yield the same, one after another."""
        chunks = self._chunks
        if self._runs is None:
            for chunk, size in chunks[low:high]:
                yield Extent(chunk, size, 0, size)
            return
        for run in self._runs[low:high]:
            number, skip, length = run & 0xFFFFFFFF, (run >> 32 & 0xFFFF) * PAGE, (run >> 48) * PAGE
            if number >= len(chunks) or skip + length > chunks[number][1]:
                raise damaged("a stream", "has a run that is in no chunk")
            yield Extent(*chunks[number], skip, length)


def cut(parts: Iterable[Extent], lengths: Iterable[int]) -> Iterator[list[Extent]]:
    """Cut the parts of a stream, which come in order, into runs of these lengths (bytes)."""
    following = iter(parts)
    rest: Extent | None = None  # of a part that was cut
    for length in lengths:
        run = []
        while length:
            part = rest or next(following)
            rest = None
            if part.length > length:
                rest = part._replace(skip=part.skip + length, length=part.length - length)
                part = part._replace(length=length)
            run.append(part)
            length -= part.length
        yield run


def missing_chunk(name: bytes) -> Damaged:
    """Return the error for a chunk that no pack of the store holds."""
    return Damaged(
        f"chunk {name.hex()[:16]} is in no pack that the store's index knows",
        hint=(
            "An index segment or a pack was lost; checkpoints that need the chunk cannot be "
            "restored."
        ),
        chunk=name.hex(),
    )
