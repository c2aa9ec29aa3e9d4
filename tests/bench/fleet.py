"""A store under a fleet: ``scripts/store-fleet``, which shows what it costs and how it degrades.

Hosts with caches of their own dump sessions in turns into one store, through the code that dumps
use; only the trees are missing. Each checkpoint shares most of its content with others of all
sessions, as programs of one kind do. Every request to the store is counted by kind and by place,
and waits for a latency that is added. Printed are the requests of a dump when the store is young
and when it is full, those of a listing, a lease, a prune and a collection, and the price of a
million dumps. The manual (stores-and-keys, "Many hosts") says what that means for a fleet.

The store is a dictionary in this process, for thousands of checkpoints, or radosgw (``--rgw``).
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs
from servers.radosgw import radosgw
from support import checkpoints as kit

from criuctl.checkpoint import leases
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.host.retention import Rules
from criuctl.ops import prune
from criuctl.report import Reporter
from criuctl.store import Store
from criuctl.store.base import Capabilities, Data, ObjectInfo
from criuctl.store.memory import MemoryStore

PAGE = 1000  # objects of one LIST
# US dollars for a million requests, as the largest provider asks for its standard class
PRICES = {"PUT": 5.0, "LIST": 5.0, "GET": 0.4, "HEAD": 0.4, "DELETE": 0.0}
CHUNK = 4096


class Ordered(MemoryStore):
    """Objects in memory, whose listings cost what they return."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        super().put(name, data, if_absent=if_absent)
        with self._lock:
            at = bisect.bisect_left(self._names, name)
            if at == len(self._names) or self._names[at] != name:
                self._names.insert(at, name)

    def delete(self, name: str) -> None:
        super().delete(name)
        with self._lock:
            at = bisect.bisect_left(self._names, name)
            if at < len(self._names) and self._names[at] == name:
                del self._names[at]

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=True, kind="simulated")  # hosts keep caches

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            first = bisect.bisect_left(self._names, prefix)
            last = bisect.bisect_left(self._names, f"{prefix}~")
            found = [
                ObjectInfo(name, len(self._objects[name][0]), self._objects[name][1])
                for name in self._names[first:last]
            ]
        return iter(found)


class Counted(Store):
    """A store whose requests are counted and delayed."""

    def __init__(self, store: Store, latency: float) -> None:
        self.url, self._store, self._latency = store.url, store, latency
        self.counts: Counter[tuple[str, str]] = Counter()  # (kind, first part of the name)
        self._lock = threading.Lock()

    def _count(self, kind: str, name: str, times: int = 1) -> None:
        with self._lock:
            self.counts[kind, name.partition("/")[0]] += times
        if self._latency:
            time.sleep(self._latency * times)

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        self._count("PUT", name)
        self._store.put(name, data, if_absent=if_absent)

    def get(self, name: str, limit: int | None = None) -> bytes:
        self._count("GET", name)
        return self._store.get(name, limit)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        self._count("GET", name)
        return self._store.get_range(name, offset, length)

    def stat(self, name: str) -> ObjectInfo:
        self._count("HEAD", name)
        return self._store.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = list(self._store.list(prefix))
        self._count("LIST", prefix, 1 + len(found) // PAGE)
        return iter(found)

    def delete(self, name: str) -> None:
        self._count("DELETE", name)
        self._store.delete(name)

    def create(self) -> None:
        self._store.create()

    def probe(self) -> Capabilities:
        return self._store.probe()

    def place(self) -> str:
        return self._store.place()


@dataclass
class Step:
    """The cost of one operation, or of several alike."""

    requests: dict[str, float]  # by kind, for one
    places: dict[str, float]  # by kind and place, for one
    seconds: float  # for one

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {"seconds": round(self.seconds, 4), **self.requests, "places": self.places}

    @property
    def dollars(self) -> float:
        """The price of one."""
        return sum(PRICES[kind] * n for kind, n in self.requests.items()) / 1e6


@dataclass
class Fleet:
    """Hosts, their sessions, and the store that they have in common."""

    store: Store
    folder: Path
    hosts: int
    sessions: int
    latency: float
    chunks: int  # of one checkpoint
    random: random.Random = field(default_factory=lambda: random.Random(7))
    done: int = 0

    def __post_init__(self) -> None:
        self.counted = Counted(self.store, 0)
        kit.repository(self.folder, store=self.store, encrypted=True).close()
        self.bases = [self.random.randbytes(self.chunks * CHUNK) for _ in range(4)]
        self.own: dict[int, bytes] = {}

    def config(self, host: int) -> Config:
        """The configuration of one host."""
        made = kit.config(self.folder, workers=1, uploads=4, buffers_mib=8)
        own = self.folder / f"host-{host}"
        return structs.replace(made, cache_dir=str(own / "cache"), state_dir=str(own / "state"))

    @contextmanager
    def opened(self, host: int) -> Iterator[Repository]:
        """The store as this host opens it for one command."""
        repository = Repository.open(self.counted, self.config(host))
        try:
            yield repository
        finally:
            repository.close()

    def dump(self) -> None:
        """Store the next session's checkpoint, in a process of its own."""
        with self.opened(self.done % self.sessions % self.hosts) as repository:
            repository.preflight_write()
            self._store(repository)

    def _store(self, repository: Repository) -> None:
        """Store the next session's checkpoint: most of it is of its kind, a part its own."""
        session = self.done % self.sessions
        self.done += 1
        own = self.own.get(session) or self.bases[session % len(self.bases)]
        changed = bytearray(own)
        for _ in range(max(1, self.chunks // 16)):
            at = self.random.randrange(self.chunks) * CHUNK
            changed[at : at + CHUNK] = self.random.randbytes(CHUNK)
        self.own[session] = bytes(changed)
        content = replace(kit.SMALL, memory=bytes(changed), window=CHUNK, file=b"")
        kit.write(repository, content, session=f"s{session}")

    def measured(self, work: Any, times: int = 1) -> Step:
        """Do `work` so often; return what one costs."""
        self.counted.counts.clear()
        self.counted._latency = self.latency
        began = time.monotonic()
        for _ in range(times):
            work()
        seconds = (time.monotonic() - began) / times
        self.counted._latency = 0
        kinds: Counter[str] = Counter()
        for (kind, _place), count in self.counted.counts.items():
            kinds[kind] += count
        return Step(
            {kind: round(count / times, 2) for kind, count in sorted(kinds.items())},
            {
                f"{kind} {place}": round(count / times, 2)
                for (kind, place), count in self.counted.counts.most_common(12)
            },
            seconds,
        )

    def grow(self, checkpoints: int) -> None:
        """Dump until the store has so many, without the latency, in one process for each host."""
        with ExitStack() as stack:
            every = [stack.enter_context(self.opened(host)) for host in range(self.hosts)]
            while self.done < checkpoints:
                self._store(every[self.done % self.sessions % self.hosts])
        for host in range(self.hosts):  # each knows what there is, as after many dumps
            with self.opened(host) as repository:
                repository.preflight_write()


def leased(fleet: Fleet) -> tuple[Step, Step]:
    """Return what claiming a session costs, and one beat of its lease."""
    with fleet.opened(0) as repository:
        session = SessionRef("leased", "1" * 32)
        claim = fleet.measured(
            lambda: leases.claim(
                repository, session.name, session.id, 1, host="h0", host_name="h0", ttl=60_000
            )
        )
        beat = fleet.measured(lambda: leases.renew(repository, session, host="h0", ttl=60_000), 20)
    return claim, beat


def listed(fleet: Fleet, host: int) -> None:
    """List everything on this host."""
    with fleet.opened(host) as repository:
        if len(repository.list()) != fleet.done:
            raise AssertionError("the list is not complete")


def collected(fleet: Fleet, grace: float) -> None:
    """Collect garbage."""
    with fleet.opened(0) as repository:
        Collection(repository, Reporter(), grace=grace).run()


def pruned(fleet: Fleet) -> int:
    """Keep the newest two of each session; return how many that removes."""
    with fleet.opened(0) as repository:
        done = prune.prune_in(repository, fleet.config(0), [], Rules(last=2), reporter=Reporter())
    return len(done.removed)


def run(fleet: Fleet, sizes: list[int]) -> dict[str, Any]:
    """Grow the store to each size and measure; return what is printed."""
    found: dict[str, Any] = {"hosts": fleet.hosts, "sessions": fleet.sessions, "sizes": {}}
    found["latency_ms"] = fleet.latency * 1000
    for size in sizes:
        fleet.grow(size - 2 * fleet.hosts)
        body: dict[str, Any] = {"dump": fleet.measured(fleet.dump, 2 * fleet.hosts).to_dict()}
        new = fleet.hosts + size  # a host that has seen nothing yet
        body["list, first time"] = fleet.measured(lambda n=new: listed(fleet, n)).to_dict()
        body["list, again"] = fleet.measured(lambda n=new: listed(fleet, n)).to_dict()
        found["sizes"][size] = body
        print(json.dumps({"checkpoints": size, **body}), flush=True)
    found["claim"], found["beat"] = (step.to_dict() for step in leased(fleet))
    removed = 0

    def prune_all() -> None:
        nonlocal removed
        removed = pruned(fleet)

    step = fleet.measured(prune_all)
    found["prune"] = {"removed": removed, **step.to_dict()}
    found["gc"] = fleet.measured(lambda: collected(fleet, 0)).to_dict()
    found["gc, again"] = fleet.measured(lambda: collected(fleet, 0)).to_dict()
    after = fleet.measured(fleet.dump, 2 * fleet.hosts)
    found["dump after gc"] = after.to_dict()
    found["dollars of a million dumps"] = round(after.dollars * 1e6, 2)
    return found


def main() -> None:
    """Read the command line, simulate, print JSON lines."""
    parser = argparse.ArgumentParser(prog="store-fleet", description=__doc__)
    parser.add_argument("--sizes", default="100,300,1000", help="checkpoints, ascending")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=32, help="of 4 KiB, of one checkpoint")
    parser.add_argument("--latency", type=float, default=0.0, metavar="MS", help="of a request")
    parser.add_argument("--rgw", action="store_true", help="against a radosgw of its own")
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.sizes.split(",")]

    def simulate(store: Store, folder: str) -> None:
        fleet = Fleet(
            store, Path(folder), asked.hosts, asked.sessions, asked.latency / 1000, asked.chunks
        )
        print(json.dumps(run(fleet, sizes)))

    with tempfile.TemporaryDirectory(prefix="store-fleet-") as folder:
        if not asked.rgw:
            simulate(Ordered(), folder)
            return
        import os

        from criuctl.store import open_store

        with radosgw() as server:
            os.environ.update(server.env)
            server.client().create_bucket(Bucket="fleet")
            with open_store("s3://fleet/x", kit.config(Path(folder))) as store:
                simulate(store, folder)


if __name__ == "__main__":
    main()
