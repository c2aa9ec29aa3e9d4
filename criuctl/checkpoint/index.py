"""Which chunk is in which pack: index segments in the store, and a database of them on this
host.

Each commit adds one or more immutable segments, objects under ``index/``, after its packs and
before its manifest. A host keeps all of them in its `cache.Cache`: `Index.sync` lists the segments,
loads the new ones and forgets those that are gone. Lookups need no request to the store.

A segment's body is a sequence of

    16 s pack's name, u32 pack's size, u32 number of records, records as in a pack's own index

The index is a hint that is always checked: chunks are verified when read, and a commit checks that
the packs it shares with older checkpoints exist. A pack that was found missing or damaged is
*distrusted*: its chunks count as unknown, so that the next dump stores them again. That ends when a
missing pack is there again, or when a damaged one was read as a whole without an error.

A segment is sealed in the domain of its packs (`domains`), and may list only packs and chunks of
that domain. A write-only host records the segments that it cannot read as empty.
"""

from __future__ import annotations

import secrets
import sqlite3
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from ..errors import Damaged, DataError, Foreign, ObjectMissing
from ..proc.threads import in_parallel
from ..store import Store
from . import objects
from .cache import Cache
from .codec import Sealer, broken
from .packs import NAME_SIZE, PACK_ENTRY, PackIndex, Place, check_writer, object_name, pack_of

PREFIX = "index/"
PACK = struct.Struct(f"<{NAME_SIZE}sII")
_SEGMENT_RECORDS = 1 << 18  # records of one segment, about 12 MiB
_BATCH = 64  # ids per query
_UNLISTED = "SELECT n FROM packs WHERE n NOT IN (SELECT pack FROM told)"
_PACKS = "SELECT n, name, size, name IN (SELECT name FROM distrusted) FROM packs"
_FETCHERS = 8
_AT_ONCE = (4 << 20, 256)  # bytes and number of segments that are loaded in one transaction
_MANY_PACKS = 20_000  # more packs than this are not listed before a dump
_LISTED_AT_ONCE = 1000  # packs on one page of a listing, which takes as long as
_LOOKS_PER_PAGE = 8  # this many requests for single packs
# A dump looks through the store's listings again after so many seconds for each of their pages, as
# far as there are more than a few, and at least every hour: then the requests of a host do not grow
# with the number of its dumps times the size of the store.
_SECONDS_PER_PAGE, _FEW_PAGES, _LONGEST = 60.0, 2, 3600.0
_MOST_SEGMENTS = 1024  # new ones that are loaded before a dump
_DAMAGED = "No checkpoint needs it: `criuctl gc` removes it, and writes new segments for its packs."


def encode_segments(packs: Iterable[PackIndex]) -> Iterator[bytes]:
    """Return the bodies of segments that list `packs`."""
    body, records = bytearray(), 0
    for pack in packs:
        if records and records + len(pack) > _SEGMENT_RECORDS:
            yield bytes(body)
            body, records = bytearray(), 0
        body += PACK.pack(pack.pack, pack.size, len(pack)) + pack.entries
        records += len(pack)
    if records:
        yield bytes(body)


def decode_segment(name: str, body: bytes) -> list[PackIndex]:
    """Return the packs that a segment lists; raise `Damaged` when an entry is impossible."""
    packs, position = [], 0
    while position < len(body):
        end = position + PACK.size
        if end > len(body):
            raise broken(name, "it ends in the middle")
        pack, size, count = PACK.unpack_from(body, position)
        position = end + count * PACK_ENTRY.size
        if position > len(body):
            raise broken(name, "it ends in the middle")
        found = PackIndex(pack, size, body[end:position])
        found.check(name)
        packs.append(found)
    return packs


def _segment(name: str, body: bytes, sealer: Sealer) -> bytes:
    """Return the segment; an encrypted store's packs are such that older versions must refuse
    it.
    """
    features = (objects.MASKED,) if sealer.encrypted else ()
    return objects.encode(objects.INDEX, name, b"", body, sealer, features)


def in_batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group the names of objects of these sizes by what fits into memory at once."""
    batch: list[str] = []
    fill = 0
    for name, size in sizes.items():
        if batch and (fill + size > _AT_ONCE[0] or len(batch) == _AT_ONCE[1]):
            yield batch
            batch, fill = [], 0
        batch.append(name)
        fill += size
    if batch:
        yield batch


class Index:
    """The index of one store; safe to use from several threads and processes."""

    def __init__(self, store: Store, sealer: Sealer, cache: Cache) -> None:
        self._store = store
        self._sealer = sealer
        self._cache = cache
        self._packs: dict[int, tuple[bytes, int, int]] = {}
        self._generation = -1
        self._avoided: frozenset[bytes] = frozenset()
        self._reloaded = False
        self._looks = True  # the last `look` was one at the store's listings
        # errors of the segments that could not be read at the last `sync`
        self.unreadable: list[DataError] = []

    # -- the store's segments
    # ------------------------------------------------------------------------

    def sync(self, most: int | None = None) -> None:
        """Load the store's new segments, `most` of them if given; raise errors of the store.

        Of too many the largest are loaded: a garbage collection puts small ones together, and what
        is in the others is stored once more. A segment that cannot be read is recorded in
        `unreadable` and does not prevent the others from being used: writers treat its chunks as
        unknown, and readers look into the packs themselves.
        """
        self.unreadable = []
        present = {info.name: info.size for info in self._store.list(PREFIX)}
        unknown = self._unknown(present)
        if most is not None and len(unknown) > most:
            largest = sorted(unknown, key=lambda name: (-unknown[name], name))[:most]
            unknown = {name: unknown[name] for name in largest}
        for batch in in_batches(unknown):
            self._load(
                [
                    (name, packs)
                    for name, packs in self.read_segments(batch, self.unreadable)
                    if packs is not None
                ]
            )
        self._forget(set(present))

    def look(self) -> None:
        """Learn before a dump what the store has; not again soon where that takes many requests.

        A host then knows the content of other hosts a little later, and stores some of it twice.
        Packs that are deleted meanwhile are no danger: they were listed to be avoided before, and
        stay avoided until the next look (`avoid`); and the commit checks every pack that it needs.
        """
        pages = self._cache.run(
            lambda db: sum(
                db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] // _LISTED_AT_ONCE
                for table in ("segments", "packs")
            )
        )
        pause = min(_SECONDS_PER_PAGE * (pages - _FEW_PAGES), _LONGEST)
        last, _ = self._last_look()
        self._looks = not 0 <= time.time() - last < pause
        if self._looks:
            self.sync(_MOST_SEGMENTS)
            self.inspect_packs()

    def _last_look(self) -> tuple[float, frozenset[bytes]]:
        """Return when this host has looked (unix time), and the packs to be avoided since."""
        row = self._cache.run(lambda db: db.execute("SELECT at, avoided FROM looked").fetchone())
        if row is None:
            return 0.0, frozenset()
        packed = row[1]
        places = range(0, len(packed), NAME_SIZE)
        return row[0], frozenset(packed[at : at + NAME_SIZE] for at in places)

    def reload(self) -> bool:
        """Empty the cache and load every segment again, because the cache may be damaged; return
        False if that was done before.
        """
        if self._reloaded:
            return False
        self._reloaded = True

        def forget(db: sqlite3.Connection) -> None:
            for table in ("chunks", "told", "packs", "segments"):
                db.execute(f"DELETE FROM {table}")

        self._cache.run(forget, write=True)
        self._packs = {}
        self.sync()
        return True

    def read_segments(
        self, names: Sequence[str], unreadable: list[DataError]
    ) -> Iterator[tuple[str, list[PackIndex] | None]]:
        """Return the packs of each of these segments, in this order; None for one that is gone, or
        is in `unreadable`.
        """

        def read(name: str) -> list[PackIndex] | None:
            try:
                return self.read_segment(name)
            except ObjectMissing:
                return None  # removed since it was listed
            except Foreign:
                return []  # it lists no pack that this host can read
            except DataError as error:
                if isinstance(error, Damaged) and error.details.get("object") == name:
                    error.hint = _DAMAGED
                unreadable.append(error)
                return None

        if len(names) == 1:
            yield names[0], read(names[0])
        elif names:
            yield from zip(names, in_parallel(read, names, _FETCHERS, "criuctl-index"), strict=True)

    def read_segment(self, name: str) -> list[PackIndex]:
        """Return the packs that the segment `name` lists; raise `ObjectMissing`, `Damaged`,
        `UnsupportedFormat` or `Foreign`.
        """
        if self._sealer.selective:  # segments of other hosts may be many and large
            with suppress(Damaged):
                start = self._store.get_range(name, 0, objects.DECLARED)
                self._sealer.of(objects.declared(objects.INDEX, name, start)[2], name)
        data = self._store.get(name, objects.INDEX.limit)
        found = objects.layout(objects.INDEX, name, data, len(data))
        packs = decode_segment(name, objects.open_body(name, found, data, self._sealer))
        for pack in packs if found.domain else ():
            check_writer(pack, self._sealer.of(found.domain, name), name)
        return packs

    def publish(self, packs: Sequence[PackIndex], published: list[str]) -> None:
        """Write segments that list `packs`, which must be durable; append their names to
        `published`.
        """
        domains: dict[bytes, tuple[Sealer, list[PackIndex]]] = {}
        for pack in packs:
            sealer = self._sealer.of_pack(pack.pack)
            domains.setdefault(sealer.domain, (sealer, []))[1].append(pack)
        for sealer, own in domains.values():
            for body in encode_segments(own):
                name = PREFIX + secrets.token_hex(16)
                self._store.put(name, _segment(name, body, sealer))
                published.append(name)
                self._load([(name, decode_segment(name, body))])

    def _unknown(self, present: Mapping[str, int]) -> dict[str, int]:
        known = self._cache.run(
            lambda db: {row[0] for row in db.execute("SELECT name FROM segments")}
        )
        return {name: size for name, size in present.items() if name not in known}

    def _load(self, segments: Sequence[tuple[str, Sequence[PackIndex]]]) -> None:
        def load(db: sqlite3.Connection) -> None:
            rows: list[tuple[bytes, int, int, int, int]] = []
            for name, packs in segments:
                if (
                    db.execute("INSERT OR IGNORE INTO segments (name) VALUES (?)", (name,)).rowcount
                    == 0
                ):
                    continue  # another process was faster
                segment = db.execute("SELECT n FROM segments WHERE name = ?", (name,)).fetchone()[0]
                for pack in packs:
                    db.execute(
                        "INSERT OR IGNORE INTO packs (name, size) VALUES (?, ?)",
                        (pack.pack, pack.size),
                    )
                    number = db.execute(
                        "SELECT n FROM packs WHERE name = ?", (pack.pack,)
                    ).fetchone()[0]
                    db.execute("INSERT OR IGNORE INTO told VALUES (?, ?)", (number, segment))
                    rows += [
                        (chunk, number, offset, stored, plain)
                        for chunk, offset, stored, plain in pack
                    ]
            rows.sort()
            db.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?)", rows)

        self._cache.run(load, write=True)

    def _forget(self, here: set[str]) -> None:
        """Forget the segments that are gone, and the packs that no other segment lists."""

        def forget(db: sqlite3.Connection) -> None:
            gone = [
                (n,)
                for n, name in db.execute("SELECT n, name FROM segments").fetchall()
                if name not in here
            ]
            db.executemany("DELETE FROM segments WHERE n = ?", gone)
            db.execute("DELETE FROM told WHERE segment NOT IN (SELECT n FROM segments)")
            # One pass, however many packs there are: chunks are not indexed by pack.
            if db.execute(f"{_UNLISTED} LIMIT 1").fetchone():
                db.execute(f"DELETE FROM chunks WHERE pack IN ({_UNLISTED})")
                db.execute(f"DELETE FROM packs WHERE n IN ({_UNLISTED})")
                db.execute("DELETE FROM distrusted WHERE name NOT IN (SELECT name FROM packs)")

        known = self._cache.run(
            lambda db: {row[0] for row in db.execute("SELECT name FROM segments")}
        )
        # A segment that was published during the listing is not in the list, but it is not gone:
        # ask for it.
        if any(name not in here and not self._exists(name, here) for name in known):
            self._cache.run(forget, write=True)

    def _exists(self, name: str, here: set[str]) -> bool:
        try:
            self._store.stat(name)
        except ObjectMissing:
            return False
        here.add(name)
        return True

    # -- lookups
    # ---------------------------------------------------------------------------------------

    def find(
        self, chunks: Sequence[bytes], *, distrusted: bool = False, failed: Collection[bytes] = ()
    ) -> dict[bytes, Place]:
        """Return where each of these chunks is; those that are nowhere are left out.

        Chunks in distrusted packs count as nowhere, unless `distrusted` asks for them where there
        is no other; of those, the packs that have `failed` come last.
        """
        found: dict[bytes, Place] = {}

        def find(db: sqlite3.Connection) -> None:
            found.clear()
            packs = self._pack_names(db)
            if not packs:
                return
            pending = iter(chunks)
            while batch := list(islice(pending, _BATCH)):
                marks = ",".join("?" * len(batch))
                query = f"SELECT id, pack, offset, stored, plain FROM chunks WHERE id IN ({marks})"
                for chunk, number, offset, stored, plain in db.execute(query, batch).fetchall():
                    if number not in packs:
                        packs = self._pack_names(db, fresh=True)
                    pack, size, bad = packs.get(number, (b"", 0, 1))
                    bad = bad or pack in self._avoided
                    other = found.get(chunk)
                    if pack and (
                        not bad
                        or (
                            distrusted
                            and (other is None or (other.pack in failed and pack not in failed))
                        )
                    ):
                        found[chunk] = Place(chunk, pack, offset, stored, plain, size)

        self._cache.run(find)
        return found

    def _pack_names(
        self, db: sqlite3.Connection, *, fresh: bool = False
    ) -> dict[int, tuple[bytes, int, int]]:
        """Return number -> (name, size, whether it is distrusted) of every pack."""
        if fresh or self._generation != self._cache.generation or not self._packs:
            self._packs = {n: (name, size, bad) for n, name, size, bad in db.execute(_PACKS)}
            self._generation = self._cache.generation
        return self._packs

    # -- trust
    # -----------------------------------------------------------------------------------------

    def pack_sizes(self) -> dict[bytes, int]:
        """Return name -> size of every pack that a segment lists."""
        return self._cache.run(
            lambda db: dict(db.execute("SELECT name, size FROM packs").fetchall())
        )

    def plain_bytes(self) -> int:
        """Return the plain bytes of all chunks in packs, each chunk counted once."""
        each = "SELECT MAX(plain) AS plain FROM chunks GROUP BY id"
        return self._cache.run(
            lambda db: int(db.execute(f"SELECT TOTAL(plain) FROM ({each})").fetchone()[0])
        )

    def avoid(self, packs: frozenset[bytes]) -> None:
        """Count the chunks of these packs as unknown for now: a garbage collection is about to
        delete them. Those of earlier calls stay so until the next `look` at the store's listings.
        """
        now, (last, before) = time.time(), self._last_look()
        if not self._looks:
            now, packs = last, packs | before
        self._avoided = packs
        row = (now, b"".join(sorted(packs)))

        def keep(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM looked")
            db.execute("INSERT INTO looked VALUES (?, ?)", row)

        self._cache.run(keep, write=True)

    def inspect_packs(self) -> None:
        """Distrust the packs that a listing shows as missing or cut off, until they are whole
        again.
        """
        expected = self.pack_sizes()
        if not expected or len(expected) > _MANY_PACKS:
            return
        there = self._listed()
        self.distrust(
            [pack for pack, size in expected.items() if there.get(pack) != size], damaged=False
        )
        gone = self._cache.run(
            lambda db: db.execute("SELECT name FROM distrusted WHERE NOT damaged").fetchall()
        )
        self.trust(
            [pack for (pack,) in gone if pack in there and there[pack] == expected.get(pack)]
        )

    def check_packs(self, packs: Mapping[bytes, int], threads: int, *, listings: bool) -> list[str]:
        """Return those of these packs (name -> size) that are missing or not whole; they are
        distrusted from now on.

        With `listings`, the store's listings show at once what was put and deleted, so one listing
        may replace many requests.
        """
        if not packs:
            return []
        pages = 1 + (len(self.pack_sizes()) + len(packs)) // _LISTED_AT_ONCE
        if listings and len(packs) > _LOOKS_PER_PAGE * pages:
            there = self._listed()
            bad = [pack for pack, size in packs.items() if there.get(pack) != size]
        else:
            sizes = in_parallel(self._size, packs, threads, "criuctl-check")
            bad = [
                pack
                for (pack, size), there_is in zip(packs.items(), sizes, strict=True)
                if there_is != size
            ]
        self.distrust(bad, damaged=False)
        return [object_name(pack) for pack in bad]

    def _listed(self) -> dict[bytes, int]:
        """Return name -> size of every pack in the store."""
        return {
            pack: info.size
            for info in self._store.list("packs/")
            if (pack := pack_of(info.name)) is not None
        }

    def _size(self, pack: bytes) -> int | None:
        try:
            return self._store.stat(object_name(pack)).size
        except ObjectMissing:
            return None

    def distrust(self, packs: Sequence[bytes], *, damaged: bool = True) -> None:
        """Count the chunks of these packs as unknown from now on, on this host; if not `damaged`,
        until the packs are there again.
        """
        query = (
            "INSERT INTO distrusted VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET damaged = "
            "MAX(damaged, excluded.damaged)"
        )
        self._judge(query, [(pack, damaged) for pack in packs])

    def trust(self, packs: Sequence[bytes]) -> None:
        """Stop distrusting these packs: they are whole."""
        self._judge("DELETE FROM distrusted WHERE name = ?", [(pack,) for pack in packs])

    def distrusted(self, packs: Collection[bytes]) -> list[bytes]:
        """Return those of these packs that are distrusted."""
        names = self._cache.run(
            lambda db: {name for (name,) in db.execute("SELECT name FROM distrusted")}
        )
        return [pack for pack in packs if pack in names]

    def _judge(self, query: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            self._cache.run(lambda db: db.executemany(query, rows), write=True)
            self._packs = {}


__all__ = ["PREFIX", "Index", "decode_segment", "encode_segments", "in_batches"]
