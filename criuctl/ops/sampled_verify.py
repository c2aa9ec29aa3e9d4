"""Checking a part of a store: every manifest, and packs that are chosen at random.

Damage by a disk or a server is independent of checkpoints, so packs are sampled: each pack that a
checkpoint needs has the same chance. Every record of the chosen packs is opened and checked. All
manifests, and all lists of chunks, are always read; every chunk must be in some pack, and every
such pack must exist, whole. The same seed chooses the same packs of the same store.

Where something is damaged, the checkpoints are read once more, to find out whose chunks these are.
A chunk that is sound in another pack is no loss, since a restore finds it there. So memory holds
the names of all chunks, but not per checkpoint.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from ..checkpoint.codec import Decompressor
from ..checkpoint.manifest import Manifest
from ..checkpoint.packs import Place, object_name, open_record, read_index
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import CriuctlError, Damaged, DataError, NoSuchCheckpoint, ObjectMissing
from ..report import Reporter
from .inspect import Verified, opened

_BATCH = 4096  # chunks that are looked up at once
_READERS = 4


class BadPack(Struct, frozen=True):
    """A pack that was read and is damaged, and the checkpoints that need the damaged part."""

    object: str
    error: CriuctlError
    needed_by: tuple[CheckpointSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON."""
        names = [{"id": s.id, "session": s.session, "number": s.number} for s in self.needed_by]
        return {"object": self.object, "error": self.error.to_dict(), "needed_by": names}


class Sample(Struct, frozen=True):
    """The extent of the sample, and its findings."""

    percent: float
    seed: int
    packs: int  # that were read,
    of_packs: int  # of those that checkpoints need
    bytes: int
    of_bytes: int
    checkpoints: tuple[Verified, ...]
    damaged: tuple[BadPack, ...]

    @property
    def errors(self) -> list[CriuctlError]:
        """Return all errors."""
        return [v.error for v in self.checkpoints if v.error is not None] + [
            d.error for d in self.damaged
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``verify --all --sample``."""
        verdicts = [v.to_dict() for v in self.checkpoints]
        for verdict in verdicts:
            del verdict["bytes"]  # not counted
        return {
            "ok": not self.errors,
            "sample": self.percent,
            "seed": self.seed,
            "packs": {"read": self.packs, "of": self.of_packs},
            "bytes": {"read": self.bytes, "of": self.of_bytes},
            "damaged": [pack.to_dict() for pack in self.damaged],
            "checkpoints": verdicts,
        }


def verify_sample(
    config: Config, percent: float, *, seed: int | None = None, reporter: Reporter
) -> Sample:
    """Read every manifest and `percent` of the packs that they need, at least one, and check
    them.
    """
    seed = secrets.randbits(32) if seed is None else seed
    with opened(config) as (_, repository):
        return _Sampling(repository, reporter).run(percent, seed)


class _Sampling:
    def __init__(self, repository: Repository, reporter: Reporter) -> None:
        self._repository, self._reporter = repository, reporter
        self._reader: CheckpointReader = repository.reader(reporter)

    def run(self, percent: float, seed: int) -> Sample:
        unreadable: list[DataError] = []
        summaries = self._repository.list(unreadable=unreadable)
        self._repository.index.sync()
        verdicts: dict[str, CriuctlError | None] = {}
        seen: set[bytes] = set()
        needed: dict[bytes, int] = {}  # pack -> its size
        for done, summary in enumerate(summaries, 1):
            try:
                self._survey(self._repository.manifest(summary), seen, needed)
                verdicts[summary.id] = None
            except (DataError, ObjectMissing) as error:
                verdicts[summary.id] = error
            except NoSuchCheckpoint:
                continue  # removed meanwhile
            self._reporter.progress("manifests", done, len(summaries), "checkpoints")
        del seen
        chance = random.Random(seed)  # noqa: S311 -- no secret
        chosen = chance.sample(sorted(needed), math.ceil(len(needed) * percent / 100))
        bad = self._absent(needed)
        missing = {pack for pack, _error, _chunks in bad}
        bad += self._read({pack: needed[pack] for pack in chosen if pack not in missing})
        there = [s for s in summaries if s.id in verdicts]
        damaged = [
            BadPack(object_name(pack), error, tuple(self._needing(there, pack, chunks)))
            for pack, error, chunks in bad
        ]
        for pack in damaged:
            verdicts |= {summary.id: pack.error for summary in pack.needed_by}
        found = [Verified(s, error=verdicts[s.id]) for s in there]
        return Sample(
            percent=percent,
            seed=seed,
            packs=len(chosen),
            of_packs=len(needed),
            bytes=sum(needed[pack] for pack in chosen),
            of_bytes=sum(needed.values()),
            checkpoints=(*found, *(Verified(None, error=error) for error in unreadable)),
            damaged=tuple(damaged),
        )

    def _survey(self, manifest: Manifest, seen: set[bytes], needed: dict[bytes, int]) -> None:
        """Record the packs that the checkpoint needs; read it in full where the index does not know
        a chunk.
        """
        for batch in self._chunks(manifest):
            fresh = [chunk for chunk in batch if chunk not in seen]
            places = self._repository.index.find(fresh, distrusted=True)
            if len(places) < len(set(fresh)):
                self._repository.verify(manifest, self._reporter)  # which looks into the packs
                return
            needed.update((place.pack, place.pack_size) for place in places.values())
            seen.update(fresh)

    def _chunks(self, manifest: Manifest) -> Iterator[list[bytes]]:
        """Yield the names of all its chunks, those of its lists of chunks included."""
        for stream in manifest.streams():
            for part in stream.parts:
                inner = part
                while inner.list is not None:
                    inner = inner.list
                    yield [chunk for chunk, _size in self._reader.entries(inner)]
                names = [chunk for chunk, _size in self._reader.entries(part)]
                for start in range(0, len(names), _BATCH):
                    yield names[start : start + _BATCH]
            if stream.runs is not None:
                self._reader.extents(stream)  # which checks them

    def _absent(
        self, needed: dict[bytes, int]
    ) -> list[tuple[bytes, CriuctlError, frozenset[bytes] | None]]:
        """Return packs that a listing shows as missing or cut off."""
        there = {info.name: info.size for info in self._repository.store.list("packs/")}
        bad: list[tuple[bytes, CriuctlError, frozenset[bytes] | None]] = []
        for pack, size in needed.items():
            name = object_name(pack)
            if name not in there:
                bad.append(
                    (pack, ObjectMissing(f"{name} is missing from the store", object=name), None)
                )
            elif there[name] != size:
                error = Damaged(
                    f"{name} is damaged: it has {there[name]} bytes and should have {size}",
                    object=name,
                )
                bad.append((pack, error, self._lost(pack, there[name])))
        self._repository.index.distrust([pack for pack, _error, _chunks in bad], damaged=False)
        return bad

    def _read(
        self, packs: dict[bytes, int]
    ) -> list[tuple[bytes, CriuctlError, frozenset[bytes] | None]]:
        """Open every record of these packs; of the damaged ones return the error and the lost
        chunks (None: all).
        """
        total, done = sum(packs.values()), 0
        bad: list[tuple[bytes, CriuctlError, frozenset[bytes] | None]] = []
        with ThreadPoolExecutor(_READERS, "criuctl-verify") as pool:
            for pack, error in zip(packs, pool.map(self._open, packs.items()), strict=True):
                done += packs[pack]
                self._reporter.progress("packs", done, total)
                if error is not None:
                    bad.append((pack, error, self._lost(pack, packs[pack])))
        self._repository.index.trust(list(packs.keys() - {pack for pack, _error, _chunks in bad}))
        return bad

    def _open(self, item: tuple[bytes, int]) -> CriuctlError | None:
        try:
            self._reader.open_pack(object_name(item[0]), item[1], lambda _place, _content: None)
        except (DataError, ObjectMissing) as error:
            self._repository.index.distrust([item[0]], damaged=isinstance(error, DataError))
            return error
        return None

    def _lost(self, pack: bytes, size: int) -> frozenset[bytes] | None:
        """Return the chunks of a damaged pack that cannot be read; None when all are lost."""
        store, lost = self._repository.store, set()
        try:
            sealer = self._repository.sealer.of_pack(pack)
            inner = read_index(store, object_name(pack), size, self._repository.sealer)
        except (DataError, ObjectMissing):
            return None
        seal, decompress = sealer.pack(pack), Decompressor()
        for chunk, offset, stored, plain in inner:
            place = Place(chunk, pack, offset, stored, plain)
            try:
                record = bytearray(place.end - place.offset)
                store.read_into(object_name(pack), place.offset, memoryview(record))
                open_record(place, memoryview(record), sealer, seal, decompress)
            except (Damaged, ObjectMissing):
                lost.add(chunk)
        return frozenset(lost)

    def _needing(
        self, summaries: Sequence[CheckpointSummary], pack: bytes, lost: frozenset[bytes] | None
    ) -> Iterator[CheckpointSummary]:
        """Yield the checkpoints that need the lost chunks of this pack."""
        for summary in summaries:
            try:
                manifest = self._repository.manifest(summary)
                for batch in self._chunks(manifest):
                    wanted = batch if lost is None else [chunk for chunk in batch if chunk in lost]
                    if any(
                        place.pack == pack
                        for place in self._repository.index.find(wanted, distrusted=True).values()
                    ):
                        yield summary
                        break
            except (DataError, ObjectMissing) as error:
                if error.details.get("object") == object_name(pack):
                    yield summary  # its list of chunks is in it
            except NoSuchCheckpoint:
                continue
