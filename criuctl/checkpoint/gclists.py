"""What writers and garbage collections tell each other: short lists of packs in the store.

    writing/<32 hex>      a writer is about to publish a manifest that relies on these packs
    gc/marked-<32 hex>    nothing needed these packs: new checkpoints do not rely on them any more
    gc/doomed-<32 hex>    these packs will be deleted, whatever comes: nothing may rely on them, for ever

Lists are sealed, have random names, are put once and never changed.  What they are for, and why it is safe, is told in
`criuctl.checkpoint.gc`; the whole of a writer's part is `Intent`:

    put writing/X  ->  look at doomed lists  ->  look at the packs themselves  ->  put the manifest  ->  delete writing/X

Whoever looks at lists does so *after* having put its own.  A store that shows at once what was put (S3, radosgw, a
local folder do) then guarantees that of a writer and a garbage collection at least one sees the other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ..errors import Conflict, CriuctlError, Damaged, ObjectMissing, StoreDenied
from . import objects
from .catalog import load_json
from .packs import NAME_SIZE, object_name

if TYPE_CHECKING:
    from ..store import Store
    from .codec import Sealer

WRITING: Final = "writing/"
MARKED: Final = "gc/marked-"
DOOMED: Final = "gc/doomed-"
_CLOCK = "gc/now-"
KIND = objects.Kind("list of packs", b"CRIUCTLG", 1, 64 << 20)

ABANDONED = 7 * 86400.0  # seconds after which a writer that has neither committed nor given up is dead
_COMMIT_LIMIT = 86400.0  # a writer that takes longer for its commit gives up, long before others think it dead
_WHOLE_SECOND = 1.0  # S3 tells one object's time without the fraction that it tells in listings
_ATTEMPTS = 3  # readings of a list that a weak store shows half written

Prefix = Literal["writing/", "gc/marked-", "gc/doomed-"]
_KINDS = (WRITING, MARKED, DOOMED)


@dataclass(frozen=True, slots=True)
class PackList:
    """One list as it was found."""

    name: str
    packs: frozenset[bytes]
    modified: float  # by the store's clock


def put(store: Store, sealer: Sealer, prefix: Prefix, packs: Iterable[bytes]) -> str:
    """Put a list under a new name, which is returned."""
    name = prefix + secrets.token_hex(16)
    body = json.dumps({"packs": sorted(pack.hex() for pack in packs)}).encode("ascii")
    store.put(name, objects.encode(KIND, name, b"", body, sealer))
    return name


def found(store: Store, sealer: Sealer, prefix: str) -> Iterator[PackList]:
    """The lists that are there under names with `prefix`; one that is removed meanwhile is left out."""
    for info in list(store.list(prefix)):
        if not info.name.startswith(_KINDS):
            continue
        with suppress(ObjectMissing):
            yield PackList(info.name, _read(store, sealer, info.name), info.modified)


def store_time(store: Store) -> float:
    """What the store's clock says, which dates all objects: hosts need not agree on the time."""
    name = _CLOCK + secrets.token_hex(16)
    store.put(name, b"now")
    try:
        return store.stat(name).modified + _WHOLE_SECOND
    finally:
        with suppress(StoreDenied):  # one more of those that `clocks` finds
            store.delete(name)


def clocks(store: Store, before: float) -> list[str]:
    """What collections that died while they looked at the clock have left since before that time."""
    return [info.name for info in store.list(_CLOCK) if info.modified < before]


def avoided(store: Store, sealer: Sealer) -> frozenset[bytes]:
    """The packs on which a checkpoint that begins now must not rely."""
    return frozenset().union(*(entry.packs for entry in found(store, sealer, "gc/")))


def _read(store: Store, sealer: Sealer, name: str) -> frozenset[bytes]:
    for attempt in range(_ATTEMPTS):
        data = store.get(name)
        try:
            outline = objects.layout(KIND, name, data, len(data))
            listed = load_json(objects.open_body(name, outline, data, sealer), name).get("packs")
            break
        except Damaged:
            if attempt + 1 == _ATTEMPTS:
                raise
    try:
        packs = frozenset(bytes.fromhex(text) for text in listed or ())
        if listed is None or any(len(pack) != NAME_SIZE for pack in packs):
            raise ValueError
    except (TypeError, ValueError):
        raise Damaged(f"{name} holds no list of packs", object=name) from None
    return packs


@dataclass(slots=True)
class Intent:
    """A writer's word that it is about to publish a manifest which relies on `packs`; `begin`, `check`, `end`."""

    store: Store
    sealer: Sealer
    packs: Collection[bytes]
    name: str = field(default="", init=False)
    _begun: float = field(default=0.0, init=False)

    def begin(self) -> None:
        """Say it, and see that no garbage collection has decided otherwise; `Conflict` if one has."""
        self._begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.name = put(self.store, self.sealer, WRITING, self.packs)
        for entry in found(self.store, self.sealer, DOOMED):
            if gone := sorted(entry.packs.intersection(self.packs)):
                raise Conflict(
                    f"a garbage collection is deleting {object_name(gone[0])}, which this checkpoint relies on",
                    hint="Dump again: what the pack holds is stored anew. A longer --grace for `criuctl gc` avoids this.",
                    object=object_name(gone[0]),
                )

    def check(self) -> None:
        """Raise `Conflict` if so much time has passed (a suspended host, say) that others may think this writer dead."""
        if time.clock_gettime(time.CLOCK_BOOTTIME) - self._begun > _COMMIT_LIMIT:
            raise Conflict("the commit took longer than a day; the store may have been cleaned meanwhile", hint="Dump again.")

    def end(self) -> None:
        """The manifest is there, or surely never will be.  What cannot be removed is taken for dead in a week."""
        if self.name:
            with suppress(CriuctlError):
                self.store.delete(self.name)
            self.name = ""
