"""Which chunks checkpoints need, and which packs are needed for that.

`Live` gathers the chunks of all manifests; a second look reads only the manifests that are new.
`Survey.take` then gives each of these chunks one *home*: an existing pack that holds it, the
fullest one if there are several. A pack that is no chunk's home is not needed. Packs in `doomed`
are no homes. A chunk that is only in doomed packs is *homeless*.

The content of a pack is taken from the index, or from the pack itself where no segment lists it. A
pack that cannot be read is no home and is left alone. Memory: some 110 bytes for each chunk that is
needed, and a few hundred for each pack; the index is read as a stream from this host's cache.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ..errors import Damaged, DataError, NoSuchCheckpoint, ObjectMissing, UnsupportedFormat
from ..quoting import quoted
from .catalog import parse_name
from .chunks import CHUNK_ENTRY, StreamRef
from .packs import PACK_ENTRY, RECORD, object_name, pack_of, read_index

if TYPE_CHECKING:
    from ..report import Reporter
    from ..store import ObjectInfo
    from .manifest import Manifest
    from .reader import CheckpointReader
    from .repository import Repository

_FETCHERS = 8
_BATCH = 256  # manifests fetched ahead
_OVERHEAD = RECORD.size + PACK_ENTRY.size  # bytes that a chunk takes in a pack besides its content

Row = tuple[bytes, bytes, int, int]  # chunk, pack, stored size, plain size


class Live:
    """The chunks that the store's checkpoints need."""

    def __init__(self, repository: Repository, reporter: Reporter) -> None:
        self._repository = repository
        self._reporter = reporter
        self._reader: CheckpointReader = repository.reader(reporter)
        self._read: set[str] = set()
        self._lists: set[bytes] = set()
        self.chunks: set[bytes] = set()

    @property
    def checkpoints(self) -> int:
        """How many manifests were read."""
        return len(self._read)

    def look(self) -> None:
        """Add what is needed by the manifests that came since the last look.

        One that cannot be read ends it with `Damaged` or `UnsupportedFormat`: it is not known what
        that one needs.
        """
        names = [name for name in self._repository.catalog.names() if name not in self._read]
        with ThreadPoolExecutor(_FETCHERS, "criuctl-gc") as pool:
            for start in range(0, len(names), _BATCH):
                batch = names[start : start + _BATCH]
                for name, manifest in zip(batch, pool.map(self._fetch, batch), strict=True):
                    if manifest is not None:
                        self._add(name, manifest)
                    self._read.add(name)
                self._reporter.progress(
                    "checkpoints", start + len(batch), len(names), "checkpoints"
                )

    def _fetch(self, name: str) -> Manifest | None:
        try:
            return self._repository.manifest_at(name)
        except NoSuchCheckpoint:
            return None  # removed since it was listed
        except Damaged as error:
            raise Damaged(
                f"it is unknown what a checkpoint needs: {error.message}",
                hint="Nothing was removed. Bring the object back, or remove that checkpoint: "
                f"criuctl rm {quoted(parse_name(name)[2][:12])}",
                object=name,
            ) from error

    def _add(self, name: str, manifest: Manifest) -> None:
        try:
            try:
                self._expand_all(manifest)
            except (Damaged, ObjectMissing):
                # Another collection may have moved it meanwhile: a new reader finds the new place.
                self._reader = self._repository.reader(self._reporter)
                self._expand_all(manifest)
        except (Damaged, ObjectMissing) as error:
            if name not in self._repository.catalog.names(manifest.session.name):
                return  # removed, and another collection was faster
            ref = f"{manifest.session.name}@{manifest.number}"
            raise Damaged(
                f"{ref} is damaged, so the objects that it needs are unknown: {error.message}",
                hint=f"Nothing was removed. Remove that checkpoint: criuctl rm {quoted(ref)}",
                object=name,
            ) from error

    def _expand_all(self, manifest: Manifest) -> None:
        for stream in manifest.streams():
            for ref in stream.parts:
                self._expand(ref)

    def _expand(self, ref: StreamRef) -> None:
        if ref.list is None:
            self.chunks.update(chunk for chunk, _size in CHUNK_ENTRY.iter_unpack(ref.chunks))
            return
        self._expand(ref.list)
        if ref.list.chunks and ref.list.chunks in self._lists:
            return  # the same list of an older checkpoint
        self.chunks.update(chunk for chunk, _size in self._reader.entries(ref))
        self._lists.add(ref.list.chunks)


class Pack(Struct):
    """One pack as the store has it."""

    name: bytes
    size: int
    modified: float  # unix time, by the store's clock
    marked: bool = False  # it was not needed at some time, and new checkpoints do not rely on it
    bad: bool = False  # this host found it damaged
    holds: int = 0  # bytes of needed chunks in it
    used: int = 0  # bytes of those chunks whose home it is


class Survey(Struct):
    """The homes that `take` chose, and the packs and chunks without one."""

    packs: dict[bytes, Pack]
    # packs that no segment lists and that cannot be read
    unreadable: set[bytes] = field(default_factory=set)
    # readable packs that no index segment lists
    unlisted: set[bytes] = field(default_factory=set)
    # chunk -> plain size; it is in doomed packs only
    homeless: dict[bytes, int] = field(default_factory=dict)
    lost: int = 0  # chunks that are in no pack

    @classmethod
    def take(
        cls,
        repository: Repository,
        packs: dict[bytes, Pack],
        live: set[bytes],
        *,
        doomed: Collection[bytes],
    ) -> Survey:
        """Find a home for every chunk in `live` among `packs`."""
        survey = cls(packs)
        found = 0

        def look(db: sqlite3.Connection) -> None:
            nonlocal found
            db.execute("BEGIN")  # both passes must see the same data
            try:
                for pack in packs.values():
                    pack.holds = pack.used = 0
                survey.homeless.clear()
                survey.unreadable.clear()
                survey.unlisted.clear()
                own = survey._own_indexes(db, repository, live)
                for _chunk, pack_name, stored, _plain in survey._rows(db, live, own):
                    packs[pack_name].holds += _OVERHEAD + stored
                found = survey._settle(survey._rows(db, live, own), frozenset(doomed))
            finally:
                db.execute("ROLLBACK")

        repository.cache.run(look)
        survey.lost = len(live) - found
        return survey

    def needed(self, repository: Repository, pack: bytes, live: set[bytes]) -> dict[bytes, int]:
        """Return the chunks (id -> plain size) whose home is this pack."""
        index = read_index(
            repository.store, object_name(pack), self.packs[pack].size, repository.sealer
        )
        return {chunk: plain for chunk, _offset, _stored, plain in index if chunk in live}

    def _settle(self, rows: Iterator[Row], doomed: frozenset[bytes]) -> int:
        found = 0
        for chunk, group in groupby(rows, key=lambda row: row[0]):
            places = list(group)
            found += 1
            homes = [row for row in places if row[1] not in doomed]
            # A damaged pack is no home while a sound one, even a doomed one, can be copied from.
            sound = any(not self.packs[row[1]].bad for row in homes)
            if not homes or (not sound and any(not self.packs[row[1]].bad for row in places)):
                self.homeless[chunk] = places[0][3]
                continue
            home = max(homes, key=lambda row: self._rank(row[1]))
            self.packs[home[1]].used += _OVERHEAD + home[2]
        return found

    def _rank(self, name: bytes) -> tuple[bool, bool, float, bytes]:
        pack = self.packs[name]
        return not pack.bad, not pack.marked, pack.holds / pack.size, name

    def _rows(
        self, db: sqlite3.Connection, live: set[bytes], own: dict[bytes, list[Row]]
    ) -> Iterator[Row]:
        """Yield every place of every needed chunk, those of one chunk in a row."""
        numbers = {
            n: name
            for n, name, size in db.execute("SELECT n, name, size FROM packs")
            if self._there(name, size)
        }
        listed: bytes | None = None
        seen: set[bytes] = set()
        for chunk, number, stored, plain in db.execute(
            "SELECT id, pack, stored, plain FROM chunks ORDER BY id, pack"
        ):
            pack = numbers.get(number)
            if pack is None or chunk not in live:
                continue
            if chunk in own and chunk != listed:
                yield from own[chunk]
                seen.add(chunk)
            listed = chunk
            yield chunk, pack, stored, plain
        for chunk, rows in own.items():
            if chunk not in seen:
                yield from rows

    def _there(self, name: bytes, size: int) -> bool:
        pack = self.packs.get(name)
        return pack is not None and pack.size == size

    def _own_indexes(
        self, db: sqlite3.Connection, repository: Repository, live: set[bytes]
    ) -> dict[bytes, list[Row]]:
        """Read the indexes of the packs that no segment lists."""
        listed = db.execute(
            "SELECT name, size, name IN (SELECT name FROM distrusted) FROM packs"
        ).fetchall()
        known = {name for name, size, _bad in listed if self._there(name, size)}
        for name, _size, bad in listed:
            if name in self.packs:
                self.packs[name].bad = bool(bad)
        rows: dict[bytes, list[Row]] = {}
        for name, pack in self.packs.items():
            if name in known:
                continue
            try:
                index = read_index(
                    repository.store, object_name(name), pack.size, repository.sealer
                )
            except (DataError, ObjectMissing) as error:
                if isinstance(error, UnsupportedFormat):
                    raise
                self.unreadable.add(name)
                continue
            self.unlisted.add(name)
            for chunk, _offset, stored, plain in index:
                if chunk in live:
                    rows.setdefault(chunk, []).append((chunk, name, stored, plain))
        return rows


def packs_of(infos: Iterator[ObjectInfo]) -> dict[bytes, Pack]:
    """Return the packs of a listing."""
    return {
        name: Pack(name, info.size, info.modified)
        for info in infos
        if (name := pack_of(info.name)) is not None
    }
