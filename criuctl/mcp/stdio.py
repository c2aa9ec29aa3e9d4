"""The transport for a client that has started this process: lines on the standard streams.

The SDK's own reads standard input in a thread that nothing can interrupt, so a signal would not end
the server.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import cast

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

from ..proc.line_streams import LineStreams, standard_streams
from .service import Service

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

    with standard_streams() as (incoming, outgoing), anyio.CancelScope() as scope:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        streams = await LineStreams.open(incoming, outgoing)
        # It iterates over lines, and calls `write` and `flush`.
        file = cast("anyio.AsyncFile[str]", _TextFile(streams))
        async with stdio_server(file, file) as (reading, writing):
            low = server._lowlevel_server  # MCPServer.run_stdio_async takes no streams
            await low.run(reading, writing, low.create_initialization_options())
    with anyio.CancelScope(shield=True):
        await service.operations.close(interrupt=bool(ended_by))
    return 128 + ended_by if ended_by else 0


class _TextFile:
    """Streams of lines as the file that `stdio_server` takes."""

    def __init__(self, streams: LineStreams) -> None:
        self._streams = streams

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in self._streams.lines():
            yield line.decode(errors="replace")

    async def write(self, text: str) -> None:
        try:
            await self._streams.send(text.encode())
        except ConnectionError:  # the client is gone, which the end of its lines shows, too
            raise anyio.ClosedResourceError from None

    async def flush(self) -> None:
        """Nothing is held back."""
