"""Chunks that were opened before they are needed.

While a session's memory is still being transferred, there is time to fetch, open and verify the
packs that have come; when the session runs and waits for a page, there is none. `Gathered` gets
packs as they arrive and keeps the plain content of their chunks in anonymous memory. It takes no
more than the host can spare (`room` is called before each piece). Chunks that it lacks are read as
usual, so an error here costs only time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..errors import CriuctlError
from ..store.base import allocate
from .packs import Place

if TYPE_CHECKING:
    from ..store import Buffer
    from .reader import CheckpointReader

_SLAB = 16 << 20  # bytes of memory allocated at once; more than any chunk


class _Full(Exception):
    """There is no memory for more chunks."""


class Gathered:
    """Plain chunks by id; a thread opens the packs in the order they come. Must be closed."""

    def __init__(self, reader: CheckpointReader, room: Callable[[int], bool]) -> None:
        """Start the thread; `room` returns whether so many more bytes may be taken."""
        self._reader, self._room = reader, room
        self._chunks: dict[bytes, memoryview] = {}
        self._packs: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._slab, self._fill = memoryview(b""), 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="criuctl-gather", daemon=True)
        self._thread.start()

    def take(self, pack: str, size: int) -> None:
        """Queue this object of `size` bytes; return at once."""
        self._packs.put((pack, size))

    def get(self, chunk: bytes) -> memoryview | None:
        """Return the verified content of a chunk; None if it is not here."""
        return self._chunks.get(chunk)

    def wait(self) -> None:
        """Wait until all queued packs are opened."""
        self._packs.put(None)
        self._thread.join()

    def close(self) -> None:
        """Free all memory."""
        self._closing = True
        self.wait()
        self._chunks.clear()

    def _run(self) -> None:
        while (pack := self._packs.get()) is not None:
            if self._closing:
                continue
            try:
                self._reader.open_pack(*pack, self._keep)
            except (_Full, OSError, MemoryError):
                return
            except CriuctlError:
                continue  # reported when the chunk is requested

    def _keep(self, place: Place, content: Buffer) -> None:
        if self._closing or place.chunk in self._chunks:
            return
        if self._fill + place.plain > len(self._slab):
            if not self._room(_SLAB):
                raise _Full
            self._slab, self._fill = allocate(_SLAB), 0
        end = self._fill + place.plain
        self._slab[self._fill : end] = content
        self._chunks[place.chunk] = self._slab[self._fill : end].toreadonly()
        self._fill = end
