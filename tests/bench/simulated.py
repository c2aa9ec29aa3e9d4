"""Make a store of many checkpoints in seconds: ``python -m bench.simulated CHECKPOINTS CHUNKS``.

What a site has after months: sessions of `PER_SESSION` hourly checkpoints each; each adds its part
of the chunks and shares most of what it needs with the ones before.  Packs, index segments and
manifests are what `criuctl.checkpoint` makes; only the chunks are tiny, no object is synced by
itself, and no threads are started for a checkpoint.  A program of its own, so that it sees
criuctl's environment.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

from criuctl.checkpoint import objects
from criuctl.checkpoint.chunks import CHUNK_ENTRY, StreamRef
from criuctl.checkpoint.codec import RAW
from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.index import PREFIX, encode_segments
from criuctl.checkpoint.manifest import (
    HostInfo,
    ImageFile,
    Manifest,
    MemoryImage,
    ProcessRecord,
    SessionRef,
)
from criuctl.checkpoint.packs import PackBuilder, object_name
from criuctl.checkpoint.repository import Repository
from criuctl.config import load
from criuctl.store import open_store
from criuctl.store.base import Data, as_views
from criuctl.store.local import LocalStore

PER_SESSION = 50  # checkpoints
NEEDED = 5  # checkpoints' worth of chunks that one needs
CHUNK = 64  # bytes
_WRITERS = 8  # sessions that are written to a bucket at a time


class _Hasty(LocalStore):
    """A folder whose objects are durable when the whole store is."""

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        path = Path(self.url) / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.writev(fd, as_views(data))
        finally:
            os.close(fd)


class _Session:
    """One session's checkpoints, as its dumps would have made them."""

    def __init__(self, repository: Repository, name: str, fresh: int, buffer: memoryview) -> None:
        self._repository = repository
        self._buffer = buffer
        self._fresh = fresh
        self._ref = SessionRef(name, secrets.token_hex(16))
        self._recent: deque[bytes] = deque(maxlen=NEEDED)  # `CHUNK_ENTRY` records
        self._processes = tuple(
            ProcessRecord(
                pid,
                pid,
                ppid=max(pid - 1, 1),
                command="worker",
                argv=("worker", f"--number={pid}"),
                exe="/usr/bin/worker",
            )
            for pid in range(100, 106)
        )

    def dump(self, when: datetime) -> None:
        """One more checkpoint."""
        repository = self._repository
        pack = PackBuilder(repository.sealer, self._buffer)
        packed = b"".join(self._add(pack, secrets.token_bytes(CHUNK)) for _ in range(self._fresh))
        self._recent.append(packed)
        everything = b"".join(self._recent)
        listed = self._add(pack, everything)
        memory = StreamRef(
            len(everything) // CHUNK_ENTRY.size * CHUNK, b"", StreamRef(len(everything), listed)
        )
        image = self._add(pack, os.urandom(2000))
        index, data = pack.finish()
        repository.store.put(object_name(index.pack), data)
        for body in encode_segments([index]):
            name = PREFIX + secrets.token_hex(16)
            repository.store.put(
                name, objects.encode(objects.INDEX, name, b"", body, repository.sealer)
            )
        repository.publish(
            Manifest(
                id=secrets.token_hex(16),
                session=self._ref,
                created=when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                host=HostInfo(
                    "simulated",
                    kernel="6.18",
                    os="Debian",
                    cpu_flags=tuple(f"flag{n}" for n in range(60)),
                ),
                root=self._processes[0],
                processes=self._processes,
                images=(ImageFile("inventory.img", 2000),),
                image_data=StreamRef(2000, image),
                memory=(
                    MemoryImage("task", 100, memory.size // CHUNK, StreamRef(2000, image), memory),
                ),
                connections=tuple(
                    ConnectionRecord(100, fd, family="inet", local="10.0.0.1:80")
                    for fd in range(3, 7)
                ),
                files=tuple(
                    FileRecord(f"/usr/lib/library-{n}.so", "mapped", size=123456) for n in range(12)
                ),
                bytes={"memory": memory.size, "new": self._fresh * CHUNK, "stored": index.size},
            )
        )

    def _add(self, pack: PackBuilder, content: bytes) -> bytes:
        chunk = self._repository.sealer.chunk_id(content)
        pack.add(chunk, len(content), RAW, content)
        return CHUNK_ENTRY.pack(chunk, len(content))


def simulate(checkpoints: int, chunks: int) -> None:
    """Make the configured store, a folder that does not exist or an empty corner of a bucket, with
    that many checkpoints and chunks in it.
    """
    config = load()
    remote = config.store.startswith("s3:")
    per_session = min(PER_SESSION, checkpoints)
    now = datetime.now(UTC)
    with open_store(config.store, config) if remote else _Hasty(config.store) as store:
        store.create()
        with Repository.init(store, encryption=False, config=config) as repository:

            def fill(number: int) -> None:
                buffer = memoryview(bytearray(1 << 20))
                session = _Session(repository, f"simulated-{number}", chunks // checkpoints, buffer)
                for hour in range(per_session, 0, -1):
                    session.dump(now - timedelta(hours=hour))

            numbers = range(checkpoints // per_session)
            with ThreadPoolExecutor(_WRITERS) if remote else nullcontext() as pool:
                for _ in pool.map(fill, numbers) if pool else map(fill, numbers):
                    pass
    os.sync()


if __name__ == "__main__":
    simulate(int(sys.argv[1]), int(sys.argv[2]))
