"""Where the parts of chunks belong in files, memory or anything else that has offsets.

One chunk may belong in many places: it is fetched once and written to each.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import Damaged
from .chunks import Extent
from .packs import Place

if TYPE_CHECKING:
    from ..store import Buffer

_ZEROS_STORED = 256  # an upper bound on the stored size of a chunk of zeros
# descriptor or number, offset there; first byte and length of the part of a chunk
Target = tuple[int, int, int, int]


class Targets:
    """Where parts of chunks belong: in files, by descriptor, or in anything else with a number and
    offsets.
    """

    def __init__(self) -> None:
        self.of: dict[bytes, list[Target]] = {}  # by chunk
        self.sizes: dict[bytes, int] = {}  # plain bytes of the chunks
        self.ends: dict[int, int] = {}  # by descriptor: the offset of the end of the content

    def add(self, where: int, offset: int, parts: Iterable[Extent]) -> None:
        """Add these parts, in order, to `where` at `offset`; raise `Damaged`."""
        for chunk, size, skip, length in parts:
            self.of.setdefault(chunk, []).append((where, offset, skip, length))
            if self.sizes.setdefault(chunk, size) != size:
                raise Damaged(
                    f"chunk {chunk.hex()[:16]} is said to have two sizes", chunk=chunk.hex()
                )
            offset += length
        self.ends[where] = max(self.ends.get(where, 0), offset)


def only_zeros(place: Place, content: Buffer) -> bool:
    """Return whether the chunk contains only zeros."""
    return place.stored < _ZEROS_STORED and bytes(content).count(0) == place.plain


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`; raise `OSError`."""
    while view:
        count = os.pwrite(fd, view, offset)
        if not count:  # the memory of a process that has ended
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        view = view[count:]
        offset += count
