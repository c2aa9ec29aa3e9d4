"""The transport for a client that has started this process: lines on the standard streams.

The SDK's own reads standard input in a thread that nothing can interrupt, so a signal would not end
the server.  This one reads on the event loop.  While it serves, descriptor 0 is empty and
descriptor 1 is standard error, so nothing else gets into the protocol.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import cast

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

from .service import Service

_LINE = 16 << 20  # bytes of a message
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def serve_stdio(server: MCPServer[Service], service: Service) -> int:
    """Serve until the client closes its end, then let operations end; return 0.

    After a signal, interrupt operations, and return its number plus 128.
    """
    ended_by = 0
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        nonlocal ended_by
        ended_by = number
        scope.cancel()

    with _streams() as (incoming, outgoing), anyio.CancelScope() as scope:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        lines = await Lines.open(incoming, outgoing)
        # It iterates over lines, and calls `write` and `flush`.
        file = cast("anyio.AsyncFile[str]", lines)
        async with stdio_server(file, file) as (reading, writing):
            low = server._lowlevel_server  # its own run_stdio_async takes no streams
            await low.run(reading, writing, low.create_initialization_options())
    with anyio.CancelScope(shield=True):
        await service.operations.close(interrupt=bool(ended_by))
    return 128 + ended_by if ended_by else 0


class Lines:
    """Two pipes as a text file for `stdio_server`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, incoming: int, outgoing: int) -> Lines:
        """Watch the two descriptors, which belong to the object from now on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb", 0)
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(outgoing, "wb", 0)
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def __aiter__(self) -> AsyncIterator[str]:
        while line := await self._reader.readline():
            yield line.decode(errors="replace")

    async def write(self, text: str) -> None:
        """Write a line; an error of the pipe is the end of the client, which reading shows."""
        self._writer.write(text.encode())

    async def flush(self) -> None:
        """Wait until the client has read enough."""
        try:
            await self._writer.drain()
        except ConnectionError:
            raise anyio.ClosedResourceError from None


@contextmanager
def _streams() -> Iterator[tuple[int, int]]:
    """Yield the standard streams under other numbers; put them back afterwards."""
    incoming, outgoing, kept = os.dup(0), os.dup(1), (os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    try:
        yield incoming, outgoing
    finally:
        for number, fd in enumerate(kept):
            os.set_blocking(fd, True)  # the loop has changed that of the shared file
            os.dup2(fd, number)
            os.close(fd)
