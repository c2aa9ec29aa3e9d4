"""What the pipeline keeps account of: the streams being written, and what a dump came to."""

from __future__ import annotations

from msgspec import Struct, field

from .layers import Composition


class Stream(Struct):
    """A stream being written: its chunks so far, as the hasher names them."""

    packed: bytearray = field(default_factory=bytearray)  # `chunks.ENTRY` records
    size: int = 0  # bytes hashed
    tail: bytearray = field(default_factory=bytearray)  # small things that do not fill a chunk yet
    # instead of `packed` and `size`, when it is memory of which some was sent ahead
    made: Composition | None = None
    # False: its chunks are sent ahead, but it is nobody's content and is not remembered
    kept: bool = True


class WriterStats(Struct):
    """What a dump came to."""

    bytes_in: int = 0  # plain bytes of all windows
    bytes_new: int = 0  # plain bytes that the store did not have
    bytes_stored: int = 0  # bytes of the packs written for them
    chunks: int = 0
    chunks_new: int = 0
    packing: float = 0.0  # seconds of all workers together
    sending: float = 0.0  # seconds in which packs were on their way
    bytes_unused: int = 0  # of `bytes_new`: sent ahead, but in no stream that is kept (by now)
