"""Lists of packs in the store by which writers and garbage collections coordinate.

    writing/<32 hex>      a writer is about to publish a manifest that relies on these packs
    gc/marked-<32 hex>    nothing needed these packs: new checkpoints do not rely on them any more
    gc/doomed-<32 hex>    these packs will be deleted in any case: nothing may ever rely on them

Lists are sealed, have random names, are put once and never changed. `criuctl.checkpoint.gc`
explains their use, and why it is safe. A writer's part is `Intent`:

    put writing/X  ->  look at doomed lists  ->  look at the packs themselves
                   ->  put the manifest  ->  delete writing/X

In a store that has write-only hosts all lists are sealed by the lists key, with the feature
``lists``, because every writer must be able to read them; an older criuctl refuses them. A
collection that does not know of the first such host yet (it began before, or is an older criuctl)
seals its lists by the store's own keys. A write-only host cannot read those, and they may name its
packs. So it treats *any doomed list that it cannot read* as one that names its packs, and gives up
its commit. An unreadable marked list is ignored, since marks only advise. Collections put the
unreadable doomed lists that they find again, readable for all.

A process looks at lists *after* it has put its own. A store that shows at once what was put (S3,
radosgw and a local folder do) then guarantees that of a writer and a garbage collection at least
one sees the other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from ..errors import Conflict, CriuctlError, Damaged, Foreign, ObjectMissing, StoreDenied
from . import objects
from .catalog import load_json
from .packs import NAME_SIZE, object_name

if TYPE_CHECKING:
    from ..store import ObjectInfo, Store
    from .codec import Sealer

WRITING: Final = "writing/"
MARKED: Final = "gc/marked-"
DOOMED: Final = "gc/doomed-"
_CLOCK = "gc/now-"
SHARED: Final = "lists"  # the feature of objects that are sealed by the lists key
KIND = objects.Kind("list of packs", b"CRIUCTLG", 1, 64 << 20, frozenset({SHARED}), domains=False)

# seconds after which a writer that has neither committed nor given up is dead
ABANDONED = 7 * 86400.0
# seconds; a writer whose commit takes longer gives up, long before other hosts think it dead
_COMMIT_LIMIT = 86400.0
_WHOLE_SECOND = 1.0  # S3 reports an object's time without the fraction that its listings contain
_ATTEMPTS = 3  # readings of a list that a weak store shows half written
_DAMAGED = (
    "It lists packs, and is needed only while a dump or a garbage collection runs. While neither "
    "is at it anywhere, remove it: `criuctl gc` then finds out again what it listed."
)

Prefix = Literal["writing/", "gc/marked-", "gc/doomed-"]
_KINDS = (WRITING, MARKED, DOOMED)


class PackList(Struct, frozen=True):
    """One list as it was found."""

    name: str
    packs: frozenset[bytes]
    modified: float  # unix time, by the store's clock
    shared: bool = False  # write-only hosts can read it, too


def put(store: Store, sealer: Sealer, prefix: Prefix, packs: Iterable[bytes]) -> str:
    """Put a list under a new name, and return the name."""
    name = prefix + secrets.token_hex(16)
    body = json.dumps({"packs": sorted(pack.hex() for pack in packs)}).encode("ascii")
    own, shared = sealer.for_lists()
    store.put(name, objects.encode(KIND, name, b"", body, own, (SHARED,) if shared else ()))
    return name


def found(store: Store, sealer: Sealer, prefix: str) -> Iterator[PackList]:
    """Return the lists under names with `prefix`; one that is removed meanwhile is left out.

    Raise `Foreign` for one that a write-only host cannot read.
    """
    for info in list(store.list(prefix)):
        if not info.name.startswith(_KINDS):
            continue
        with suppress(ObjectMissing):
            yield _read(store, sealer, info)


def store_time(store: Store) -> float:
    """Return the time by the store's clock, which dates all objects: hosts need not agree on the
    time.
    """
    name = _CLOCK + secrets.token_hex(16)
    store.put(name, b"")  # an empty object, which needs no space on a full disk
    try:
        return store.stat(name).modified + _WHOLE_SECOND
    finally:
        with suppress(StoreDenied):  # if it stays, `clocks` finds it later
            store.delete(name)


def clocks(store: Store, before: float) -> list[str]:
    """Return the clock objects older than that time that dead collections have left."""
    return [info.name for info in store.list(_CLOCK) if info.modified < before]


def avoided(store: Store, sealer: Sealer) -> frozenset[bytes]:
    """Return the packs on which a checkpoint that begins now must not rely."""
    packs: frozenset[bytes] = frozenset()
    for info in list(store.list("gc/")):
        if info.name.startswith(_KINDS):
            # a list that a write-only host cannot read is reported at its commit, if it matters
            with suppress(ObjectMissing, Foreign):
                packs |= _read(store, sealer, info).packs
    return packs


def _read(store: Store, sealer: Sealer, info: ObjectInfo) -> PackList:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _open(sealer, info, store.get(info.name, KIND.limit))
        except Damaged as error:
            if attempt < _ATTEMPTS:
                continue
            # it only advises: a collection removes it, and marks its packs again
            if info.name.startswith(MARKED):
                return PackList(info.name, frozenset(), info.modified)
            error.hint = _DAMAGED
            raise
    raise AssertionError("unreachable")


def _open(sealer: Sealer, info: ObjectInfo, data: bytes) -> PackList:
    name = info.name
    outline = objects.layout(KIND, name, data, len(data))
    shared = SHARED in outline.features
    listed = load_json(
        objects.open_body(name, outline, data, sealer.of_list(name, shared=shared)), name, len(data)
    ).get("packs")
    try:
        packs = frozenset(bytes.fromhex(text) for text in listed or ())
        if listed is None or any(len(pack) != NAME_SIZE for pack in packs):
            raise ValueError
    except (TypeError, ValueError):
        raise Damaged(f"{name} holds no list of packs", object=name) from None
    return PackList(name, packs, info.modified, shared)


class Intent(Struct, eq=False):
    """A writer's announcement that it will publish a manifest which relies on `packs`; `begin`,
    `check`, `end`.
    """

    store: Store
    sealer: Sealer
    packs: Collection[bytes]
    name: str = ""
    begun: float = 0.0

    def begin(self) -> None:
        """Put the announcement, and check that no garbage collection has doomed these packs; raise
        `Conflict` if one has.
        """
        self.begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.name = put(self.store, self.sealer, WRITING, self.packs)
        for entry in self._doomed():
            if gone := sorted(entry.packs.intersection(self.packs)):
                raise Conflict(
                    f"a garbage collection is deleting {object_name(gone[0])}, which this "
                    "checkpoint relies on",
                    hint=(
                        "Dump again, which stores the pack's content again. A longer --grace for "
                        "`criuctl gc` avoids this."
                    ),
                    object=object_name(gone[0]),
                )

    def _doomed(self) -> Iterator[PackList]:
        try:
            yield from found(self.store, self.sealer, DOOMED)
        except Foreign as error:
            raise Conflict(
                "a garbage collection is deleting packs, and this write-only host cannot see "
                f"which: {error.details['object']} is of a criuctl that is older, or that began "
                "before this host was enrolled",
                hint=(
                    "Dump again after `criuctl gc` on a host with the store's key, which needs "
                    "this criuctl or a newer one."
                ),
                object=error.details["object"],
            ) from None

    def check(self) -> None:
        """Raise `Conflict` if so much time has passed (on a suspended host, for example) that other
        hosts may think this writer dead.
        """
        if time.clock_gettime(time.CLOCK_BOOTTIME) - self.begun > _COMMIT_LIMIT:
            raise Conflict(
                "the commit took longer than a day; the store may have been cleaned meanwhile",
                hint="Dump again.",
            )

    def end(self) -> None:
        """Remove the announcement: the manifest is there, or certainly never will be. If it cannot
        be removed, it counts as dead after a week.
        """
        if self.name:
            with suppress(CriuctlError):
                self.store.delete(self.name)
            self.name = ""
