"""Index segments in a collection: none tells of packs that go, small ones are put together, damaged
ones are replaced.
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
_TOLD_AT_ONCE = 1 << 18  # records of segments that are put together


class Segments:
    """Those of one store, in one collection."""

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
        """See that no index segment tells of dead packs, or only of what others tell, or is one of
        many small ones.

        What such segments tell beside stands in new ones before they go.
        """
        index = self._index
        sizes = {info.name: info.size for info in self._store.list(PREFIX)}
        if not dead and sum(size < SMALL_SEGMENT for size in sizes.values()) < MANY:
            return
        told: set[bytes] = set()
        old: list[str] = []
        rest: dict[bytes, PackIndex] = {}  # what is to be told anew
        small: dict[str, list[PackIndex]] = {}  # told of by small segments alone
        unreadable: list[DataError] = []

        def put_together() -> None:
            merged: list[str] = []
            if len(small) >= MANY:
                moved = {pack.pack: pack for packs in small.values() for pack in packs}
                told.difference_update(moved)
                rest.update(moved)
                merged.extend(small)
                small.clear()
            try:
                if fresh := [pack for name, pack in rest.items() if name not in told]:
                    index.publish(fresh, [])
                told.update(rest)
            # dead packs must not be told of all the same; what else they were told with the next
            # run tells
            except StoreFull:
                merged.clear()
            rest.clear()
            self._done.segments += (
                len(old) + len(merged) - self._removal.delete_others(old + merged)
            )
            old.clear()

        # The largest first: where the store refuses to delete, what was put together is not put
        # together again.
        for batch in in_batches(dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))):
            for name, packs in index.read_segments(batch, unreadable):
                if packs is None:
                    continue
                here = {pack.pack for pack in packs}
                if here & dead:
                    old.append(name)
                    rest.update((pack.pack, pack) for pack in packs if pack.pack not in dead)
                    continue
                if here <= told:
                    old.append(name)
                elif sizes[name] < SMALL_SEGMENT:
                    small[name] = packs
                told |= here
            if (
                len(small) >= MANY
                and sum(len(pack) for packs in small.values() for pack in packs) >= _TOLD_AT_ONCE
            ):
                put_together()
        put_together()
        self.remove_damaged(unreadable)

    def remove_damaged(self, unreadable: Sequence[DataError]) -> None:
        """Remove index segments that are damaged: packs tell themselves what they hold, and
        `tell_again` tells it anew.
        """
        for error in unreadable:
            self._reporter.warning(error.message, "the packs tell themselves what they hold")
        damaged = {
            str(error.details.get("object", ""))
            for error in unreadable
            if isinstance(error, Damaged)
        }
        # Else it is what opens it that is damaged.
        gone = [name for name in sorted(damaged) if name.startswith(PREFIX) and self._damaged(name)]
        self._done.segments += len(gone) - self._removal.delete_others(gone)

    def _damaged(self, segment: str) -> bool:
        """Whether it is so in the store, and was not on its way here."""
        try:
            self._index.read_segment(segment)
        except (DataError, ObjectMissing) as error:
            return isinstance(error, Damaged)
        return False

    def tell_again(self, survey: Survey, passed: set[bytes], now: float, grace: float) -> None:
        """Put index segments for needed packs whose own were lost, so that writers know what is in
        them.
        """
        for pack in sorted(survey.untold - passed):
            known = survey.packs[pack]
            if not known.used or now - known.modified < grace:
                continue
            # another collection was faster; or this has to free some room first
            with suppress(ObjectMissing, StoreFull):
                index = read_index(self._store, object_name(pack), known.size, self._sealer)
                self._index.publish([index], [])
