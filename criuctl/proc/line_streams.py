"""Pipes as lines on an event loop: the standard streams of a protocol's server, and of a child.

A thread that reads standard input cannot be interrupted, so a server that has one does not end by a
signal; these are read on the loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

_LINE = 16 << 20  # bytes of a line


class LineStreams:
    """A descriptor to read lines from, and one to write lines to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | int) -> None:
        """Set up; a `writer` that is a descriptor never blocks."""
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, incoming: int, outgoing: int) -> LineStreams:
        """Watch two pipes, sockets, terminals or files, which belong to the object from now on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE)
        if _can_be_watched(incoming):
            await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb", 0)
            )
        else:
            with os.fdopen(incoming, "rb") as file:
                reader.feed_data(file.read(_LINE))
            reader.feed_eof()
        if not _can_be_watched(outgoing):
            return cls(reader, outgoing)
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(outgoing, "wb", 0)
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield lines until the other end is closed; ValueError for a line that is too long."""
        while line := await self._reader.readline():
            yield line

    async def send(self, line: bytes) -> None:
        """Write a line, and wait until the reader has read enough; ConnectionError."""
        if isinstance(self._writer, int):
            while line:
                line = line[os.write(self._writer, line) :]
            return
        self._writer.write(line)
        await self._writer.drain()

    def close(self) -> None:
        """Close the descriptor that is written to, when all is written."""
        if isinstance(self._writer, int):
            os.close(self._writer)
        else:
            self._writer.close()


def _can_be_watched(fd: int) -> bool:
    """Whether an event loop can wait for a descriptor: not for a file, nor for /dev/null."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


@contextmanager
def standard_streams() -> Iterator[tuple[int, int]]:
    """Yield standard input and output under other numbers, for a protocol.

    Meanwhile descriptor 0 is empty and descriptor 1 is standard error: nothing else gets into the
    protocol.  Afterwards they are as before.
    """
    incoming, outgoing, kept = os.dup(0), os.dup(1), (os.dup(0), os.dup(1))
    blocking = [os.get_blocking(fd) for fd in kept]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    try:
        yield incoming, outgoing
    finally:
        for number, fd in enumerate(kept):
            os.set_blocking(fd, blocking[number])  # the loop has changed that of the open file
            os.dup2(fd, number)
            os.close(fd)
