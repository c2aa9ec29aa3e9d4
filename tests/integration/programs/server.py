"""A small asyncio web server with a counter in memory: ``server.py FOLDER``; its port is in the
file ``port``.
"""

from __future__ import annotations

import asyncio
import signal

from animal import Check, path, ready, report

hits = 0
seconds = 0


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve requests of one connection until it is closed."""
    global hits
    while line := await reader.readline():
        while (await reader.readline()).strip():
            pass
        if line.startswith(b"GET /hit"):
            hits += 1
        body = str(hits).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
    writer.close()


def check(found: Check) -> None:
    found.facts |= {"hits": hits, "ticks": seconds}


async def tick() -> None:
    global seconds
    while True:
        await asyncio.sleep(0.02)
        seconds += 1


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with open(path("port"), "w") as file:
        file.write(str(server.sockets[0].getsockname()[1]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report, check)
    ready()
    await tick()


asyncio.run(main())
