"""Index segments in a collection: segments that list deleted packs are replaced, small ones are put
together, damaged ones are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import Damaged, DataError, ObjectMissing, StoreFull
from .index import PREFIX, in_batches
from .packs import PackIndex, object_name, read_index

if TYPE_CHECKING:
    from ..report import Reporter
    from .gc_result import Collected, Removal
    from .liveness import Survey
    from .repository import Repository

SMALL_SEGMENT = 256 << 10  # bytes; smaller segments are put together, once there are
MANY = 64  # of them
_LISTED_AT_ONCE = 1 << 18  # records of segments that are put together


class Segments:
    """The index segments of one store, in one collection."""

    def __init__(
        self, repository: Repository, reporter: Reporter, removal: Removal, done: Collected
    ) -> None:
        self._store, self._sealer, self._index = (
            repository.store,
            repository.sealer,
            repository.index,
        )
        self._reporter, self._removal, self._done = reporter, removal, done

    def replace(self, dead: set[bytes]) -> None:
        """Replace the segments that list dead packs, that list only what others list, or that are
        among many small ones.

        What such segments list besides is written to new segments before they are removed.
        """
        index = self._index
        sizes = {info.name: info.size for info in self._store.list(PREFIX)}
        if not dead and sum(size < SMALL_SEGMENT for size in sizes.values()) < MANY:
            return
        listed: set[bytes] = set()
        old: list[str] = []
        rest: dict[bytes, PackIndex] = {}  # packs to write to new segments
        small: dict[str, list[PackIndex]] = {}  # packs that only small segments list
        unreadable: list[DataError] = []

        def put_together() -> None:
            merged: list[str] = []
            if len(small) >= MANY:
                moved = {pack.pack: pack for packs in small.values() for pack in packs}
                listed.difference_update(moved)
                rest.update(moved)
                merged.extend(small)
                small.clear()
            try:
                if fresh := [pack for name, pack in rest.items() if name not in listed]:
                    index.publish(fresh, [])
                listed.update(rest)
            # segments with dead packs must be removed anyway; the next run writes new segments for
            # the other packs in them
            except StoreFull:
                merged.clear()
            rest.clear()
            self._done.segments += (
                len(old) + len(merged) - self._removal.delete_others(old + merged)
            )
            old.clear()

        # The largest first: where the store refuses to delete, segments that were put together are
        # not put together again.
        for batch in in_batches(dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))):
            for name, packs in index.read_segments(batch, unreadable):
                if packs is None:
                    continue
                here = {pack.pack for pack in packs}
                if here & dead:
                    old.append(name)
                    rest.update((pack.pack, pack) for pack in packs if pack.pack not in dead)
                    continue
                if here <= listed:
                    old.append(name)
                elif sizes[name] < SMALL_SEGMENT:
                    small[name] = packs
                listed |= here
            if (
                len(small) >= MANY
                and sum(len(pack) for packs in small.values() for pack in packs) >= _LISTED_AT_ONCE
            ):
                put_together()
        put_together()
        self.remove_damaged(unreadable)

    def remove_damaged(self, unreadable: Sequence[DataError]) -> None:
        """Remove damaged index segments: packs describe themselves, and `restore_segments` writes
        new ones for them.
        """
        for error in unreadable:
            self._reporter.warning(error.message, "the packs describe their content themselves")
        damaged = {
            str(error.details.get("object", ""))
            for error in unreadable
            if isinstance(error, Damaged)
        }
        # Otherwise the object that opens it is damaged.
        gone = [name for name in sorted(damaged) if name.startswith(PREFIX) and self._damaged(name)]
        self._done.segments += len(gone) - self._removal.delete_others(gone)

    def _damaged(self, segment: str) -> bool:
        """Return whether it is damaged in the store, and not only in this reading."""
        try:
            self._index.read_segment(segment)
        except (DataError, ObjectMissing) as error:
            return isinstance(error, Damaged)
        return False

    def restore_segments(
        self, survey: Survey, passed: set[bytes], now: float, grace: float
    ) -> None:
        """Put index segments for needed packs that no segment lists, so that writers know what is
        in them.
        """
        for pack in sorted(survey.unlisted - passed):
            known = survey.packs[pack]
            if not known.used or now - known.modified < grace:
                continue
            # another collection was faster; or this one has to free some space first
            with suppress(ObjectMissing, StoreFull):
                index = read_index(self._store, object_name(pack), known.size, self._sealer)
                self._index.publish([index], [])
