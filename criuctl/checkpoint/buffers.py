"""Memory for content on its way: allocated when first needed, and reused.

The first touch of new memory is the slowest part of a copy, so nothing in the pipeline allocates
per chunk. Buffers are anonymous mappings that ask for huge pages, which makes the first touch
several times cheaper.

A `PageBuffer` is filled by the producer and cut into windows. It goes back to its pool when the
producer has released it and its last window is processed: `BufferPool.add` and `BufferPool.done`
count its users.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..store.base import allocate

BUFFER_SIZE = 4 << 20


class PageBuffer:
    """A reusable piece of memory."""

    __slots__ = ("users", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        # the producer, and each unprocessed window; guarded by the pool's lock
        self.users = 0


class BufferPool:
    """At most `count` buffers of `size` bytes; `acquire` waits while all are in use.

    `kept` buffers are reserved for `acquire_spare`, so that a thread that empties buffers is never
    blocked.
    """

    def __init__(
        self,
        count: int,
        size: int,
        check: Callable[[], None],
        *,
        kept: int = 0,
        memory: Callable[[int], memoryview] = allocate,
    ) -> None:
        self._limit = count
        self._size = size
        self._kept = kept
        self._memory = memory
        self._made = 0
        self._free: list[PageBuffer] = []
        self._check = check  # raises the error of another thread
        self._changed = threading.Condition(threading.Lock())

    def acquire(self, *, spare: bool = False) -> PageBuffer:
        """Return a free buffer with the caller as its user; `spare` ones count as free. Raise the
        pipeline's error if there is one.
        """
        with self._changed:
            while True:
                self._check()
                if self._available() > (0 if spare else self._kept):
                    return self._take()
                self._changed.wait()

    def acquire_spare(self) -> PageBuffer | None:
        """Return a free buffer, the last one included, or None; never wait."""
        with self._changed:
            return self._take() if self._available() else None

    def low(self) -> bool:
        """Return whether less than a third of the buffers are free."""
        return self._available() * 3 < self._limit

    def add(self, buffer: PageBuffer, users: int = 1) -> None:
        """Add `users` users to `buffer`."""
        with self._changed:
            buffer.users += users

    def done(self, buffer: PageBuffer, users: int = 1) -> None:
        """Remove `users` users from `buffer`; without users it is free."""
        with self._changed:
            buffer.users -= users
            if buffer.users == 0:
                self._free.append(buffer)
                # all: the first waiting thread may not be one that can use a spare buffer
                self._changed.notify_all()

    def wake(self) -> None:
        """Make a waiting `acquire` check for errors."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back; buffers still in use are freed with their last reference."""
        with self._changed:
            self._free.clear()
            self._made = self._limit

    def _available(self) -> int:
        return len(self._free) + self._limit - self._made

    def _take(self) -> PageBuffer:
        if self._free:
            buffer = self._free.pop()
        else:
            buffer = PageBuffer(self._memory(self._size))
            self._made += 1
        buffer.users = 1
        return buffer
