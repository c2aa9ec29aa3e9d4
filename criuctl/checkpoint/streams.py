"""The streams being written, and the counts of a dump."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from msgspec import Struct, field

from .chunks import Extent
from .layers import Composition


class Stream(Struct):
    """A stream being written: its chunks so far, as the hasher names them."""

    packed: bytearray = field(default_factory=bytearray)  # `chunks.CHUNK_ENTRY` records
    size: int = 0  # bytes hashed
    # small content that does not fill a chunk yet
    tail: bytearray = field(default_factory=bytearray)
    # used instead of `packed` and `size` for memory that was partly sent ahead
    made: Composition | None = None
    # False: its chunks are sent ahead, but it is not part of the checkpoint
    kept: bool = True
    # set for pages that are stored first, and put together to streams later: their places
    loose: array[int] | None = None
    scattered: bool = False  # loose pages that are not a window: they share chunks with others


class Together(Struct):
    """A stream to put together of loose pages."""

    stream: Stream
    windows: Sequence[Sequence[int]]  # numbers of loose pages
    done: threading.Event = field(default_factory=threading.Event)


class Stored(Struct):
    """Pages that older checkpoints have stored, to become loose pages as they are."""

    stream: Stream
    parts: Sequence[Extent]
    found: bool = False  # the store has all of their chunks
    done: threading.Event = field(default_factory=threading.Event)


class WriterStats(Struct):
    """The counts and times of a dump."""

    bytes_in: int = 0  # plain bytes of all windows
    bytes_new: int = 0  # plain bytes that the store did not have
    bytes_stored: int = 0  # bytes of the packs written for them
    chunks: int = 0
    chunks_new: int = 0
    packing: float = 0.0  # seconds, summed over all workers
    sending: float = 0.0  # seconds in which at least one pack was being uploaded
    bytes_unused: int = 0  # of `bytes_new`: sent ahead, but in no stream that is kept
