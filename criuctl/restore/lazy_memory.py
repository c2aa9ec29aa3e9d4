"""The memory of a checkpoint that follows: first what the program asks for, then what comes after
it, in ascending order.

A chunk is put at all places that it belongs to when it is fetched, also for one page of it. So no
content is kept, and none is fetched twice, except by threads that need it at the same time.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..checkpoint.chunk_targets import Targets, only_zeros
from ..checkpoint.chunks import Extent
from ..checkpoint.manifest import MemoryImage
from ..checkpoint.opened_chunks import Gathered
from ..checkpoint.packs import Place
from ..checkpoint.reader import CheckpointReader
from ..criu.lazy import Put, Skip
from ..criu.pages import PAGE
from ..errors import Damaged
from ..proc.syscalls import has_userfaultfd
from ..store import Buffer

LARGE = 256 << 20  # bytes of a tree's memory
_SHARED = 8  # the part of it that may be in several processes
_AT_ONCE = 64 << 20  # bytes of chunks that are fetched together


class StoredMemory:
    """The memory of a tree that follows, as a `criuctl.criu.lazy.PageSource`."""

    def __init__(self, reader: CheckpointReader, gathered: Gathered | None = None) -> None:
        """`gathered`: chunks that are open already."""
        self.runs: dict[int, list[tuple[int, int]]] = {}
        self._reader, self._gathered = reader, gathered
        self._targets = Targets()
        # by PID: the addresses at which parts begin, in ascending order, and their chunks
        self._starts: dict[int, list[int]] = {}
        self._chunks: dict[int, list[bytes]] = {}
        self._left: dict[bytes, None] = {}  # chunks that have not been brought
        self._wanted: SimpleQueue[bytes] = SimpleQueue()  # chunks that were asked for

    def add(self, pid: int, address: int, parts: Sequence[Extent]) -> None:
        """Add parts of chunks that are, one after the other, the pages at `address`.

        `pid`: of the process in the images. Addresses of one process come in ascending order.
        """
        starts, chunks = self._starts.setdefault(pid, []), self._chunks.setdefault(pid, [])
        self._targets.add(pid, address, parts)
        end = address
        for part in parts:
            if part.length % PAGE:
                raise Damaged(f"a part of the memory of PID {pid} is no number of pages")
            starts.append(end)
            chunks.append(part.chunk)
            self._left[part.chunk] = None
            end += part.length
        self.runs.setdefault(pid, []).append((address, end))

    def bring(self, pid: int, address: int, put: Put) -> None:
        """Put the chunk of this page where it belongs; raise `Damaged`, `ObjectMissing` or an error
        of the store.
        """
        chunk = self._chunks[pid][bisect.bisect_right(self._starts[pid], address) - 1]
        content: Buffer | None = self._gathered.get(chunk) if self._gathered else None
        if content is None:
            content = self._reader.some({chunk: self._targets.sizes[chunk]})[chunk]
        self._put(chunk, content, put)
        self._wanted.put(chunk)

    def fill(self, put: Put, skip: Skip) -> None:
        """Put all chunks, from several threads; what follows a page that was asked for comes first.

        Raises what `bring` raises.
        """

        def place(found: Place, content: Buffer) -> None:
            if only_zeros(found, content):
                for pid, address, _skip, length in self._targets.of[found.chunk]:
                    skip(pid, address, length)
            else:
                self._put(found.chunk, content, put)

        order = list(self._targets.sizes)
        numbers = {chunk: number for number, chunk in enumerate(order)}
        first = 0  # all before it have been brought
        while self._left:
            at = first
            with suppress(Empty):
                while True:  # the last one that was asked for
                    at = numbers[self._wanted.get_nowait()]
            sizes: dict[bytes, int] = {}
            room = _AT_ONCE
            while at < len(order) and room > 0:
                if order[at] in self._left:
                    sizes[order[at]] = size = self._targets.sizes[order[at]]
                    room -= size
                at += 1
            missing = dict(sizes)
            if self._gathered is not None:
                for chunk in sizes:
                    if (content := self._gathered.get(chunk)) is not None:
                        self._put(chunk, content, put)
                        del missing[chunk]
            if missing:
                self._reader.fetch(missing, place)
            for chunk in sizes:
                self._left.pop(chunk, None)
            while first < len(order) and order[first] not in self._left:
                first += 1

    def _put(self, chunk: bytes, content: Buffer, put: Put) -> None:
        view = memoryview(content)
        for pid, address, skip, length in self._targets.of[chunk]:
            put(pid, address, view[skip : skip + length])
        self._left.pop(chunk, None)


def worthwhile(memory: Sequence[MemoryImage], reader: CheckpointReader) -> bool:
    """Return whether the tree should run before its memory is there.

    That is so if it has much memory, few processes share it, and the kernel allows it.  Processes
    that share memory since a fork would not share it any more.
    """
    images = [image for image in memory if image.kind == "task"]
    if sum(image.data.size for image in images) < LARGE or not has_userfaultfd():
        return False
    if len(images) == 1:
        return True
    unique: set[Extent] = set()
    total = 0
    for image in images:
        own = set(reader.extents(image.data))
        unique |= own
        total += sum(part.length for part in own)
    return total - sum(part.length for part in unique) <= total // _SHARED
