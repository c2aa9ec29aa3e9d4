"""Chunks that were opened before anybody asked for them.

While a session's memory is still on its way, there is time to fetch, open and verify what has come;
when the session runs and waits for a page, there is none.  `Gathered` is told of packs as they
arrive and keeps the plain content of their chunks in anonymous memory.  It takes no more than the
host can spare (`room` is asked before each piece), and what it has not is read as always, so that
whatever goes wrong here costs time only.
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

_SLAB = 16 << 20  # bytes of memory taken at once; more than any chunk


class _Full(Exception):
    """There is no room for more."""


class Gathered:
    """Plain chunks by id; packs are opened by a thread of its own, in the order they come.  To be
    closed.
    """

    def __init__(self, reader: CheckpointReader, room: Callable[[int], bool]) -> None:
        """`room` is asked whether so many more bytes may be taken."""
        self._reader, self._room = reader, room
        self._chunks: dict[bytes, memoryview] = {}
        self._packs: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._slab, self._fill = memoryview(b""), 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="criuctl-gather", daemon=True)
        self._thread.start()

    def take(self, pack: str, size: int) -> None:
        """This object of `size` bytes has come; returns at once."""
        self._packs.put((pack, size))

    def get(self, chunk: bytes) -> memoryview | None:
        """The verified content of a chunk, if it is there."""
        return self._chunks.get(chunk)

    def wait(self) -> None:
        """Until all packs that it was told of are opened."""
        self._packs.put(None)
        self._thread.join()

    def close(self) -> None:
        """Give it all back."""
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
                continue  # told when the chunk is asked for

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
