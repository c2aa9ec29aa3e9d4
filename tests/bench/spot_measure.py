"""Time real dumps into an S3 server whose answers are delayed, for the numbers of `spot_fleet`.

A proxy in front of Ceph's gateway holds every piece in both directions for half of the latency, so
each request, and each new connection's handshake of criuctl with the gateway, takes that much
longer. The trees hold memory of which half is random. Each is dumped, left running, writes a
twentieth of its memory, and is dumped again, as before a notice.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from servers.radosgw import radosgw

from .spot_fleet import HASHED, LATENCY, MIB, RATIO, REQUESTS, START, UPLINK

SIZES = (16, 64, 256)  # MiB
LATENCIES = (0.0, LATENCY, 0.1)
PROGRAM = """
import os, sys
size = int(sys.argv[1]) << 20
held = bytearray(b"".join(os.urandom(512) + bytes(512) for _ in range(size // 1024)))
print("ready", flush=True)
for line in sys.stdin:
    held[: size // 20] = os.urandom(size // 20)
    print("written", flush=True)
"""


class Delay:
    """Relays TCP to a port of this machine, every piece some seconds late."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port, self._seconds = port, seconds

    async def serve(self, ready: threading.Event, over: asyncio.Event, found: list[int]) -> None:
        """Relay until `over`; the port to connect to is in `found`."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        found.append(server.sockets[0].getsockname()[1])
        ready.set()
        await over.wait()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(deliver())
        with suppress(OSError):
            while data := await reader.read(1 << 18):
                await queue.put((time.monotonic() + self._seconds / 2, data))
            await queue.put((time.monotonic(), b""))
            await sending
        sending.cancel()
        writer.close()


@contextmanager
def delayed(port: int, seconds: float) -> Iterator[int]:
    """A port behind which `port` is so far away."""
    ready, found = threading.Event(), list[int]()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(Delay(port, seconds).serve(ready, over, found),)
    )
    thread.start()
    ready.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


def dump(pid: int, url: str, env: dict[str, str]) -> float:
    """Seconds that one takes."""
    before = time.monotonic()
    words = [sys.executable, "-m", "criuctl", "dump", str(pid), "--leave-running", "--json"]
    subprocess.run(
        [*words, "--store", url, "--name", f"p{pid}"], env=env, check=True, capture_output=True
    )
    return time.monotonic() - before


def modelled(memory: float, latency: float) -> float:
    """What the simulation takes for it, on an idle host."""
    return START + REQUESTS * latency + max(memory / HASHED, memory * RATIO / UPLINK)


def main() -> int:
    """Print first and later dumps for each size and latency."""
    print(f"{'MiB':>5} {'latency ms':>11} {'first s':>8} {'model':>6} {'later s':>8} {'model':>6}")
    folder = Path(tempfile.mkdtemp(prefix="spot-"))
    try:
        with radosgw(block=2 << 30) as server:
            server.make_bucket("spot")
            for latency in LATENCIES:
                with delayed(server.port, latency) as port:
                    for size in SIZES:
                        _one(folder, server.env, port, size, latency)
    finally:
        shutil.rmtree(folder)
    return 0


def _one(folder: Path, store: dict[str, str], port: int, size: int, latency: float) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("CRIUCTL_")}
    env |= store | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    env |= {
        f"CRIUCTL_{name.upper()}_DIR": str(folder / name)
        for name in ("state", "cache", "key", "run")
    } | {"CRIUCTL_HOOK_DIRS": str(folder / "hooks")}
    url = f"s3://spot/{size}-{int(latency * 1000)}"
    init = [sys.executable, "-m", "criuctl", "store", "init", "--no-encrypt", "--store", url]
    subprocess.run(init, env=env, check=True, capture_output=True)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(size)],
        stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as program:  # fmt: skip
        assert program.stdin is not None and program.stdout is not None
        program.stdout.readline()
        first = dump(program.pid, url, env)
        program.stdin.write("\n")
        program.stdin.flush()
        program.stdout.readline()
        later = dump(program.pid, url, env)
        program.kill()
    found = (first, modelled(size * MIB, latency), later, modelled(size * MIB / 20, latency))
    print(
        f"{size:>5} {latency * 1000:>11.0f} "
        + " ".join(
            f"{value:>{width}.2f}" for value, width in zip(found, (8, 6, 8, 6), strict=True)
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
