"""The checkpoints in a store: names, summaries, and the resolution of references.

Manifests are ``checkpoints/<token>/<20-digit number>-<checkpoint id>``; the token stands for the
session's name. So one session's checkpoints are one listing, in the order of their numbers, and an
id is found without reading anything. Heads of manifests are fetched once per host and kept as the
store has them, sealed (`cache.Cache`): a manifest never changes under its name.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from ..errors import AmbiguousRef, Damaged, DataError, NoSuchCheckpoint, ObjectMissing
from ..proc import jsontext
from ..proc.threads import in_parallel
from ..store import Store
from . import bounds, objects
from .cache import Cache
from .codec import Sealer
from .summary import CheckpointSummary

_NAME = re.compile(r"checkpoints/([0-9a-f]{32})/([0-9]{20})-([0-9a-f]{32})")
_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")
_TOO_SHORT = (
    "It is no session's name there, and an id is looked for by four of its digits at least: see "
    "`criuctl list`."
)
_PINS = "pins/"
_FETCHERS = 8
_ASKED = 200  # sessions of a store whose names are compared with a mistyped one
_LOOKED_UP = 1000  # more heads than this are read in one query
# a session's numbers stay below; a name with a higher one was put to block the session, and is
# ignored
_COUNTED = 10**18
_SPARE = 1000  # kept heads of manifests that are gone, before they are removed

ManifestHead = tuple[int, bytes]  # size of the object, its first bytes up to the end of its head


def manifest_name(token: str, number: int, checkpoint: str) -> str:
    """Return the name of a manifest in the store."""
    return f"checkpoints/{token}/{number:020d}-{checkpoint}"


def parse_name(name: str) -> tuple[str, int, str]:
    """Return (token, number, checkpoint id) of a manifest's name; raise `NoSuchCheckpoint` for
    another name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise NoSuchCheckpoint(f"{name[:80]!r} is not the name of a manifest")
    return match[1], int(match[2]), match[3]


def load_json(data: bytes, name: str, stored: int) -> dict[str, Any]:
    """Return the JSON object in `data`, which the object `name` holds in `stored` bytes; raise
    `Damaged`.
    """
    try:
        loaded = jsontext.decoded(data, bounds.most_values(stored))
    except jsontext.TooManyValues:
        raise Damaged(
            f"{name} holds more values than anything that criuctl stores in so few bytes",
            object=name,
        ) from None
    except ValueError:
        raise Damaged(f"{name} does not hold JSON", object=name) from None
    if not isinstance(loaded, dict):
        raise Damaged(f"{name} does not hold a JSON object", object=name)
    return loaded


class Catalog:
    """The checkpoints of one store."""

    def __init__(self, store: Store, sealer: Sealer, cache: Cache) -> None:
        self._store = store
        self._sealer = sealer
        self._cache = cache
        # checkpoint -> the domain of the write-only host that has stored it
        self.domains: dict[str, bytes] = {}
        # the names that the last listing of all sessions found
        self._everything: frozenset[str] | None = None

    def names(self, session: str | None = None) -> dict[str, int]:
        """Return manifest -> size, of one session or all, by token, number and id."""
        prefix = (
            "checkpoints/" if session is None else f"checkpoints/{self._sealer.token(session)}/"
        )
        found = {
            info.name: info.size for info in self._store.list(prefix) if _NAME.fullmatch(info.name)
        }
        if session is None:
            self._everything = frozenset(found)
        return found

    def summaries(
        self, names: Mapping[str, int], unreadable: list[DataError]
    ) -> list[CheckpointSummary]:
        """Return the summaries of these manifests; those removed meanwhile are left out."""
        found = []
        pinned = self.pins() if names else set()
        for name, (size, data) in self._heads(names, unreadable).items():
            try:
                outline = objects.layout(objects.MANIFEST, name, data, size)
                summary = CheckpointSummary.from_dict(
                    load_json(objects.open_head(name, outline, data, self._sealer), name, size)
                )
                if summary.object != name or (summary.number, summary.id) != parse_name(name)[1:]:
                    raise Damaged(f"{name} holds the summary of another checkpoint", object=name)
            except DataError as error:
                unreadable.append(error)
            else:
                if outline.domain:
                    self.domains[summary.id] = outline.domain
                found.append(summary.with_use(pinned=True) if summary.id in pinned else summary)
        return found

    # -- pins
    # ------------------------------------------------------------------------------------------

    def pins(self) -> set[str]:
        """Return the ids of checkpoints that were pinned after they were made."""
        return {info.name[len(_PINS) :] for info in self._store.list(_PINS)}

    def pin(self, checkpoint: str) -> None:
        """Pin the checkpoint of this id; pinning it again is fine."""
        self._store.put(_PINS + checkpoint, b"")

    def unpin(self, checkpoint: str) -> None:
        """Take the pin away; absent is fine."""
        self._store.delete(_PINS + checkpoint)

    def is_pinned(self, checkpoint: str) -> bool:
        """Return whether there is a pin now, whatever a summary said."""
        try:
            self._store.stat(_PINS + checkpoint)
        except ObjectMissing:
            return False
        return True

    def idle_pins(self) -> list[str]:
        """Return the objects that pin checkpoints which are gone."""
        pins = self.pins()
        return (
            sorted(_PINS + pin for pin in pins - {parse_name(name)[2] for name in self.names()})
            if pins
            else []
        )

    # -- references
    # ------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> CheckpointSummary:
        """Resolve ``NAME`` (its newest), ``NAME@N`` or the beginning of an id; see
        `Repository.resolve`.
        """
        return self._one(self.locate(ref))

    def locate(self, ref: str) -> dict[str, int]:
        """Return the manifest that `ref` names, and its size, without reading it."""
        name, at, number = ref.rpartition("@")
        if at:
            if re.fullmatch(r"-?[0-9]{1,18}", number) is None:
                raise NoSuchCheckpoint(
                    f"{ref!r} names no checkpoint",
                    hint="Write NAME, NAME@N or the beginning of an id.",
                )
            return self._numbered(self.names(name), int(number), ref)
        if names := self.names(ref):
            return dict([names.popitem()])
        if _ID_PREFIX.fullmatch(ref):
            everything = self.names()
            matching = {parse_name(n)[2]: n for n in everything if parse_name(n)[2].startswith(ref)}
            if len(matching) > 1:
                some = ", ".join(sorted(matching)[:8])
                raise AmbiguousRef(
                    f"{len(matching)} checkpoints have ids that begin with {ref}",
                    hint=f"They are {some}.",
                )
            for found in matching.values():
                return {found: everything[found]}
        raise self._missing(
            ref, _TOO_SHORT if re.fullmatch("[0-9a-f]{1,3}", ref) else self._near(ref)
        )

    def next_number(self, token: str) -> int:
        """Return the number of the next checkpoint of the session behind `token`; numbers of
        removed ones are not used again.
        """
        places = (f"numbers/{token}/", f"checkpoints/{token}/")
        removed, there = in_parallel(
            lambda place: [info.name for info in self._store.list(place)],
            places,
            2,
            "criuctl-number",
        )
        used = [int(name[-20:]) for name in removed if name[-20:].isdigit()]
        used += [int(match[2]) for name in there if (match := _NAME.fullmatch(name))]
        return max((number for number in used if number < _COUNTED), default=0) + 1

    # -- inside
    # ----------------------------------------------------------------------------------------

    def _numbered(self, names: Mapping[str, int], number: int, ref: str) -> dict[str, int]:
        if number < 0:
            matching = list(names)[number : number + 1 or None] if -number <= len(names) else []
        else:
            matching = [n for n in names if parse_name(n)[1] == number]
        if len(matching) > 1:
            ids = ", ".join(parse_name(n)[2] for n in matching)
            raise AmbiguousRef(
                f"{ref} was dumped by two hosts at once", hint=f"Name one by its id: {ids}."
            )
        if not matching:
            raise self._missing(ref, "" if names else self._near(ref.rpartition("@")[0]))
        return {matching[0]: names[matching[0]]}

    def _missing(self, ref: str, hint: str = "") -> NoSuchCheckpoint:
        return NoSuchCheckpoint(f"the store {self._store.url} has no checkpoint {ref!r}", hint=hint)

    def _near(self, ref: str) -> str:
        """Return a hint with the sessions whose names are like `ref`, if there are any."""
        everything = self.names()
        newest = {parse_name(name)[0]: name for name in everything}
        if len(newest) > _ASKED:
            return ""
        heads = self.summaries({name: everything[name] for name in newest.values()}, [])
        alike = difflib.get_close_matches(ref, {head.session for head in heads}, 3)
        return f"It has checkpoints of {', '.join(alike)}." if alike else ""

    def _one(self, names: Mapping[str, int]) -> CheckpointSummary:
        unreadable: list[DataError] = []
        found = self.summaries(names, unreadable)
        if unreadable:
            raise unreadable[0]
        if not found:
            raise NoSuchCheckpoint("the checkpoint was removed")
        return found[0]

    def _heads(
        self, names: Mapping[str, int], unreadable: list[DataError]
    ) -> dict[str, ManifestHead]:
        kept = self._cache.run(lambda db: self._kept(db, names))
        found = {
            name: kept[name]
            for name, size in names.items()
            if name in kept and kept[name][0] == size
        }
        missing = [name for name in names if name not in found]
        if not missing:
            return found
        fetched: dict[str, ManifestHead] = {}

        def fetch(name: str) -> None:
            try:
                fetched[name] = self._fetch(name, names[name])
            except ObjectMissing:
                return  # removed since it was listed
            except DataError as error:
                unreadable.append(error)

        in_parallel(fetch, missing, _FETCHERS, "criuctl-heads")

        def keep(db: sqlite3.Connection) -> None:
            if self._everything is not None:
                gone = [
                    row
                    for row in db.execute("SELECT name FROM heads").fetchall()
                    if row[0] not in self._everything
                ]
                if len(gone) > _SPARE:
                    db.executemany("DELETE FROM heads WHERE name = ?", gone)
            rows = [(name, size, head) for name, (size, head) in fetched.items()]
            db.executemany("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", rows)

        self._cache.run(keep, write=True)
        return {**found, **fetched}

    @staticmethod
    def _kept(db: sqlite3.Connection, names: Mapping[str, int]) -> dict[str, ManifestHead]:
        """Return the kept heads of these: looked up one by one, or in one query where that is
        faster.
        """
        if len(names) > _LOOKED_UP:
            return {
                name: (size, head)
                for name, size, head in db.execute("SELECT name, size, head FROM heads")
                if name in names
            }
        rows = (
            db.execute("SELECT name, size, head FROM heads WHERE name = ?", (name,)).fetchone()
            for name in names
        )
        return {row[0]: (row[1], row[2]) for row in rows if row is not None}

    def _fetch(self, name: str, size: int) -> ManifestHead:
        data = self._store.get_range(name, 0, min(size, objects.FIRST_READ))
        outline = objects.layout(objects.MANIFEST, name, data, size)
        if outline.head.stop > len(data):
            data += self._store.get_range(name, len(data), outline.head.stop - len(data))
        return size, data[: outline.head.stop]
