"""Garbage collection: freeing what no checkpoint needs, while others dump, restore and collect.

Packs and index segments are shared, and hosts do not know of each other. One run does:

    1  look    find the chunks that the manifests need, and so the needed packs (`liveness`)
    2  copy    copy what is needed of packs that are mostly garbage into new ones (`repack`), after
               which those packs are not needed.  Small packs (every snapshot of an idle tree
               leaves one) are copied too once there are many.
    3  mark    packs that are not needed: put gc/marked-X.  Writers that begin later do not rely on
               them.  Without a grace time they are doomed at once instead.
    4  doom    packs marked at least the grace time ago and still not needed: put gc/doomed-X
    5  look    again, at manifests that came since; copy what is needed and is in doomed packs only
    6  index   replace segments that list doomed packs, or packs that are gone, by segments that do
               not, and many small ones by a few; remove damaged ones
    7  delete  doomed packs, but those that a writer's intent names
    8  forget  lists whose packs are all gone

Why no chunk is lost. *Doom is final*: once the list is put, its packs will be deleted, no chunk has
its home there, and the list stays until the last of them is gone.

- A writer puts its intent, then looks for doomed lists, then at its packs, then puts its manifest
  (`gclists.Intent`).  A collection puts its doomed list, then looks at intents, then at manifests
  (step 5).  The store shows at once what was put.  So either the writer sees its pack doomed (or
  gone) and gives up, while its tree runs on; or the collection sees the intent, and spares the
  pack this time; or it sees the manifest, and copies what it needs before deleting.
- Two collections may doom the two packs that hold one chunk.  Each looks at doomed lists after it
  has put its own, and at the packs after that: the later one sees the other's list, or that its
  packs are gone, and copies the chunk.
- A collection that finds the list of another one, dead or only slow, continues it: steps 5 to 8
  are the same for all lists, and deleting a pack twice does no harm, since its name is never used
  again.
- An interrupted run leaves packs that are not needed, or lists that the next run continues.
  Nothing is ever undone.
- Where there is no room, nothing is copied, and segments are not put together: the list of doomed
  packs is the only object that is added.
- A reader may have looked up its places before.  When a pack is gone it looks in the index again
  and finds the new place, since segments that list a pack are removed before the pack is.  A host
  that lists segments while they are replaced may miss the content of both: a reader that lacks a
  chunk lists them once more, and a writer stores the chunk once more.

Time, by the store's clock, decides only how soon packs go: how long a mark must stand, and after a
week an intent counts as a dead writer's (a writer whose commit takes more than a day gives up). A
grace time shorter than a dump makes that dump fail, with its tree running on. It never makes a
checkpoint that lacks something.

Requirements: the store lists and reads at once what was put, and deletes for good. S3, radosgw and
folders do; no conditional writes are needed. A server without conditional writes usually caches
listings as well: there a collection is safe only while no other host writes, and criuctl warns of
it. What the store refuses to delete (object lock) stays doomed, is reported, and is tried again by
the next run. Where a bucket keeps versions, its lifecycle rules decide when the space is free.

A manifest that cannot be read ends the run before anything is removed, because it is not known what
it needs.

Packs and segments of write-only hosts (`domains`) are collected like all others, by hosts that have
the store's key; such a host itself cannot collect. `gclists` explains why it never relies on a pack
whose doom it cannot read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..errors import DataError, ObjectMissing, StoreDenied, StoreFull
from . import gclists, step_replica
from .gc_result import Collected, Removal
from .gclists import ABANDONED, DOOMED, MARKED, WRITING, PackList
from .gcsegments import Segments
from .liveness import Live, Pack, Survey, packs_of
from .packs import object_name
from .repack import copy

if TYPE_CHECKING:
    from ..report import Reporter
    from .repository import Repository

THRESHOLD = 0.5  # a pack is copied when less than this part of its size is needed
SMALL_PACK = 1 << 20  # bytes; smaller packs are put together once there are
MANY = 64  # this many of them
_FETCHERS = 8
_PACKS_AT_ONCE = 256  # packs whose indexes are read ahead
_COPIED_AT_ONCE = 50_000  # chunks
_SWEEP_AGE = 86400.0  # seconds after which unfinished objects of writers are removed


class Collection:
    """One run; see the module's docstring for its steps."""

    def __init__(
        self, repository: Repository, reporter: Reporter, *, grace: float, dry_run: bool = False
    ) -> None:
        self._repository = repository
        self._store, self._sealer = repository.store, repository.sealer
        self._reporter = reporter
        self._grace = grace
        self._live = Live(repository, reporter)
        self._now = 0.0
        self._marked: dict[bytes, float] = {}  # pack -> time of its mark
        self._lists: list[PackList] = []
        self._doomed: list[PackList] = []
        self._stale: list[PackList] = []  # marks that are no longer in force
        self._writing: set[bytes] = set()
        self.done = Collected(dry_run=dry_run)
        self._removal = Removal(self._store, reporter, self.done)
        self._segments = Segments(repository, reporter, self._removal, self.done)

    def run(self) -> Collected:
        """Run all steps. Errors of the store, `Damaged` and `UnsupportedFormat` end the run, and it
        can be run again.
        """
        done = self.done
        self._reporter.step("gc-look")
        survey = self._look()
        done.packs, done.bytes = len(survey.packs), sum(pack.size for pack in survey.packs.values())
        done.checkpoints, done.chunks, done.lost = (
            self._live.checkpoints,
            len(self._live.chunks),
            survey.lost,
        )
        self._now = time.time() if done.dry_run else gclists.store_time(self._store)
        unneeded = self._unneeded(survey)
        young = [
            pack
            for name, pack in survey.packs.items()
            if not pack.used and not self._old(name, pack)
        ]
        done.young, done.young_bytes = len(young), sum(pack.size for pack in young)
        if done.dry_run:
            done.repacked = len(self._to_copy(survey))
        elif packs := self._to_copy(survey):
            self._reporter.step("gc-copy")
            try:
                unneeded += self._repack(survey, packs)
            except StoreFull as error:
                self._reporter.warning(
                    f"there is no room for copies: {error.message}", "only whole packs are freed"
                )
        if not done.dry_run:
            self._segments.restore_segments(survey, self._all_doomed(), self._now, self._grace)
            self._segments.remove_damaged(self._repository.index.unreadable)
        done.unneeded, done.unneeded_bytes = (
            len(unneeded),
            sum(survey.packs[pack].size for pack in unneeded),
        )
        ripe = [
            pack
            for pack in unneeded
            if pack in self._marked and self._now - self._marked[pack] >= self._grace
        ]
        if done.dry_run:
            done.waiting = len(unneeded) - len(ripe)
            self._warn(survey)
            return done
        self._reporter.step("gc-mark")
        ripe += self._mark(survey, unneeded)
        done.waiting = len(unneeded) - len(ripe)
        if ripe:
            self._reporter.step("gc-doom")
            self._doom(ripe)
        if ripe or self._doomed:
            survey = self._finish()
        else:
            self._segments.replace(self._absent(survey))
        self._tidy()
        self._warn(survey)
        return done

    # -- looking
    # ---------------------------------------------------------------------------------------

    def _look(self) -> Survey:
        """Find what is needed now. The proof in the module's docstring rests on the order of these
        readings.
        """
        lists = list(gclists.found(self._store, self._sealer, "gc/"))
        self._doomed = [entry for entry in lists if entry.name.startswith(DOOMED)]
        self._lists = [entry for entry in lists if entry.name.startswith(MARKED)]
        self._marked = {}
        for entry in self._lists:
            for pack in entry.packs:
                self._marked[pack] = min(entry.modified, self._marked.get(pack, entry.modified))
        packs = packs_of(self._store.list("packs/"))
        for name in self._marked.keys() & packs.keys():
            packs[name].marked = True
        self._repository.index.sync()
        self._writing = self._intents()
        self._live.look()
        survey = Survey.take(self._repository, packs, self._live.chunks, doomed=self._all_doomed())
        # Checkpoints that came between the two listings have new packs as well; or this host's
        # cache is damaged.
        for learn in (self._repository.index.sync, self._repository.index.reload):
            if not survey.lost:
                break
            packs = {**packs_of(self._store.list("packs/")), **packs}
            learn()
            survey = Survey.take(
                self._repository, packs, self._live.chunks, doomed=self._all_doomed()
            )
        return survey

    def _all_doomed(self) -> set[bytes]:
        return set().union(*(entry.packs for entry in self._doomed))

    def _intents(self) -> set[bytes]:
        found = list(gclists.found(self._store, self._sealer, WRITING))
        living = [
            entry for entry in found if not (self._now and self._now - entry.modified >= ABANDONED)
        ]
        self.done.writers = len(living)
        return set().union(*(entry.packs for entry in living))

    def _unneeded(self, survey: Survey) -> list[bytes]:
        """Return the packs that may go: no chunk has its home there, no writer names them, and they
        are too old for a dump under way.
        """
        passed = self._all_doomed() | self._writing | survey.unreadable
        return [
            name
            for name, pack in survey.packs.items()
            if not pack.used and name not in passed and self._old(name, pack)
        ]

    def _old(self, name: bytes, pack: Pack) -> bool:
        return name in self._marked or self._now - pack.modified >= self._grace

    def _to_copy(self, survey: Survey) -> list[bytes]:
        """Return the packs that are needed but are mostly garbage, or small and many."""
        passed = self._all_doomed() | self._writing
        needed = [
            (name, pack)
            for name, pack in survey.packs.items()
            if pack.used
            and not pack.bad
            and name not in passed
            and self._now - pack.modified >= self._grace
        ]
        found = [name for name, pack in needed if pack.used < pack.size * THRESHOLD]
        small = [
            name
            for name, pack in needed
            if pack.size < SMALL_PACK and pack.used >= pack.size * THRESHOLD
        ]
        return found + small if len(small) >= MANY else found

    # -- steps
    # -----------------------------------------------------------------------------------------

    def _repack(self, survey: Survey, packs: list[bytes]) -> list[bytes]:
        """Copy what is needed of these packs; return those that are no longer needed."""
        freed: list[bytes] = []
        members: dict[bytes, dict[bytes, int]] = {}
        chunks_there = 0
        with ThreadPoolExecutor(_FETCHERS, "criuctl-gc") as pool:
            for start in range(0, len(packs), _PACKS_AT_ONCE):
                some = packs[start : start + _PACKS_AT_ONCE]
                for pack, chunks in zip(
                    some, pool.map(lambda pack: self._needed(survey, pack), some), strict=True
                ):
                    if chunks is None:
                        continue
                    members[pack] = chunks
                    chunks_there += len(chunks)
                    if chunks_there >= _COPIED_AT_ONCE:
                        freed += self._copy(members)
                        members, chunks_there = {}, 0
                self._reporter.progress("packs", start + len(some), len(packs), "packs")
        freed += self._copy(members)
        self.done.repacked += len(freed)
        return freed

    def _needed(self, survey: Survey, pack: bytes) -> dict[bytes, int] | None:
        """Return what is needed of one pack; None if that cannot be found out."""
        try:
            return survey.needed(self._repository, pack, self._live.chunks)
        except (DataError, ObjectMissing) as error:
            self._reporter.warning(error.message, error.hint)
            return None

    def _copy(self, members: Mapping[bytes, Mapping[bytes, int]]) -> list[bytes]:
        """Copy the chunks of these packs; return the packs that are not needed any more."""
        sizes = {chunk: size for chunks in members.values() for chunk, size in chunks.items()}
        stored, failed = copy(self._repository, sizes, self._reporter) if sizes else (0, set())
        self.done.copied_bytes += stored
        return [pack for pack, chunks in members.items() if not failed.intersection(chunks)]

    def _mark(self, survey: Survey, unneeded: list[bytes]) -> list[bytes]:
        """Mark the packs that have no mark yet; return those that can be doomed at once, without a
        grace time.
        """
        wanted = set(unneeded)
        fresh = dict.fromkeys(pack for pack in unneeded if pack not in self._marked)
        doomed = self._all_doomed()
        for entry in self._lists:
            there = {pack for pack in entry.packs if pack in survey.packs and pack not in doomed}
            if there <= wanted and there:
                continue
            # Some packs are needed again and writers may rely on them: the rest gets a new mark.
            self._stale.append(entry)
            fresh |= dict.fromkeys(
                pack for pack in there & wanted if self._now - self._marked[pack] < self._grace
            )
        self.done.marked = len(fresh)
        if self._grace <= 0:
            # doomed at once, so no mark is needed
            return [pack for pack in fresh if pack not in self._marked]
        if fresh:
            gclists.put(self._store, self._sealer, MARKED, fresh)
        return []

    def _doom(self, packs: list[bytes]) -> None:
        try:
            gclists.put(self._store, self._sealer, DOOMED, packs)
        except StoreFull:
            self._repository.cache.leave_disk()  # it may be on the same disk
            gclists.put(self._store, self._sealer, DOOMED, packs)

    def _finish(self) -> Survey:
        """Do steps 5 to 8 for all packs that are doomed."""
        done = self.done
        survey = self._look()
        doomed = self._all_doomed()
        failed: set[bytes] = set()
        if survey.homeless:
            self._reporter.step("gc-rescue")
            stored, failed = copy(self._repository, survey.homeless, self._reporter)
            done.copied_bytes += stored
        kept = (self._writing | survey.unreadable) & doomed
        for pack in doomed & survey.packs.keys() if failed else ():
            try:
                if failed.intersection(survey.needed(self._repository, pack, self._live.chunks)):
                    kept.add(pack)
            except ObjectMissing:
                continue  # another collection was faster, and has copied what was needed
            except DataError:
                kept.add(pack)
        going = sorted((doomed & survey.packs.keys()) - kept)
        done.spared = len(doomed & survey.packs.keys()) - len(going)
        self._reporter.step("gc-index")
        self._segments.replace((doomed - kept) | self._absent(survey))
        self._reporter.step("gc-delete")
        refused = self._removal.delete(map(object_name, going))
        done.refused = len(refused)
        gone = [pack for pack in going if object_name(pack) not in refused]
        done.deleted, done.freed_bytes = len(gone), sum(survey.packs[pack].size for pack in gone)
        self._reporter.step("gc-forget")
        left = survey.packs.keys() - set(gone)
        self._removal.delete_others(
            entry.name for entry in self._doomed + self._lists if not entry.packs & left
        )
        return survey

    def _absent(self, survey: Survey) -> set[bytes]:
        """Return packs that segments list but that are gone: another collection deleted them before
        their segments were replaced.

        While chunks are lost, the segments stay as they are: they name the pack, which may be
        restored from a backup.
        """
        listed = [pack for pack in self._repository.index.pack_sizes() if pack not in survey.packs]
        if not listed or survey.lost:
            return set()

        def absent(pack: bytes) -> bool:
            try:
                # it may have been put after the packs were listed
                self._store.stat(object_name(pack))
            except ObjectMissing:
                return True
            return False

        with ThreadPoolExecutor(_FETCHERS, "criuctl-gc") as pool:
            return {
                pack for pack, gone in zip(listed, pool.map(absent, listed), strict=True) if gone
            }

    def _tidy(self) -> None:
        """Remove what is not needed any more: old marks, intents of dead writers, pins of
        checkpoints that are gone, steps of sessions that are gone, unfinished uploads.
        """
        found = gclists.found(self._store, self._sealer, WRITING)
        dead = [entry.name for entry in found if self._now - entry.modified >= ABANDONED]
        clocks = gclists.clocks(self._store, self._now - _SWEEP_AGE)
        dead += self._doom_for_all()
        dead += step_replica.abandoned(self._repository, self._now - max(self._grace, _SWEEP_AGE))
        pins = self._repository.catalog.idle_pins()
        pins += self._repository.groups.broken(self._now - max(self._grace, _SWEEP_AGE))
        self._removal.delete_others([*(entry.name for entry in self._stale), *dead, *clocks, *pins])
        try:
            self._store.sweep(max(self._grace, _SWEEP_AGE))
        except StoreDenied as error:
            self._reporter.warning(
                f"unfinished objects of writers stay: {error.message}", error.hint
            )

    def _doom_for_all(self) -> list[str]:
        """Put doomed lists that write-only hosts cannot read again, readable for them; return the
        old ones.
        """
        found = gclists.found(self._store, self._sealer, DOOMED) if self._sealer.divided else ()
        old = [entry for entry in found if not entry.shared]
        for entry in old:
            gclists.put(self._store, self._sealer, DOOMED, entry.packs)
        return [entry.name for entry in old]

    def _warn(self, survey: Survey) -> None:
        reporter = self._reporter
        if survey.lost:
            reporter.warning(
                f"{survey.lost} chunks that checkpoints need are in no pack",
                "`criuctl verify --all` shows which ones",
            )
        for pack in sorted(survey.unreadable)[:3]:
            reporter.warning(
                f"{object_name(pack)} cannot be read, and no index lists it", "it was left alone"
            )
        if not self._repository.capabilities.conditional_create:
            reporter.warning(
                "the store guarantees nothing about concurrent writers",
                "run `criuctl gc` there only while no other host writes to it",
            )
        self.done.warnings = list(reporter.warnings)
