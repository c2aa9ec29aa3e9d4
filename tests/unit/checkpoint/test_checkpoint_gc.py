"""Garbage collection: what is freed, what is kept, interrupted at any step, and next to dumps and
other collections.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import gc, gclists, gcsegments, objects, pipeline
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.gc_result import Collected
from criuctl.checkpoint.packs import object_name, pack_of
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged, ObjectMissing, StoreFull, UnsupportedFormat
from criuctl.report import Reporter
from criuctl.store import Store
from criuctl.store.base import Data
from criuctl.store.memory import MemoryStore

DAY = 86400.0


def noise(seed: int, windows: int = 4) -> bytes:
    return random.Random(seed).randbytes(windows * kit.WINDOW)


def content(*seeds: int) -> kit.Content:
    """A checkpoint whose memory is made of these pieces, a MiB each."""
    return kit.Content(
        b"".join(noise(seed) for seed in seeds),
        {"a.img": b"image %d" % seeds[0]},
        b"file %d" % seeds[0],
    )


def collect(repo: Repository, grace: float = 0.0, **options: bool) -> Collected:
    return Collection(repo, Reporter(), grace=grace, **options).run()


def packs(repo: Repository) -> set[bytes]:
    return {pack for info in repo.store.list("packs/") if (pack := pack_of(info.name)) is not None}


def left(repo: Repository) -> list[str]:
    """What writers and collections have left lying about."""
    return [
        info.name
        for info in repo.store.list()
        if info.name.startswith(("gc/marked-", "gc/doomed-", "writing/"))
    ]


def again(repo: Repository, store: Store | None = None) -> Repository:
    """Another host's view of the same store."""
    return Repository.open(store or repo.store, repo.config)


class Aged(MemoryStore):
    """A store whose clock the test sets."""

    now = 1000.0

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        super().put(name, data, if_absent=if_absent)
        with self._lock:
            self._objects[name] = (self._objects[name][0], self.now)


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_no_checkpoint_needs_goes(tmp_path: Path, encrypted: bool) -> None:
    repo = kit.repository(tmp_path, workers=1, encrypted=encrypted)
    first, second = (
        kit.write(repo, content(1), session="a"),
        kit.write(repo, content(2), session="b"),
    )
    before = packs(repo)
    assert collect(repo).deleted == 0 and packs(repo) == before
    repo.remove(first)
    plan = collect(again(repo), dry_run=True)
    # the other one shares a small chunk with it
    assert (plan.repacked, plan.deleted, packs(repo)) == (1, 0, before)
    done = collect(again(repo))
    assert (done.deleted, done.checkpoints, done.refused, done.spared, done.lost) == (1, 1, 0, 0, 0)
    assert done.freed_bytes > 1 << 20 and len(packs(repo)) == 2
    kit.check(again(repo), second, content(2))
    assert left(repo) == []
    # No segment lists what is gone; its content is stored again when it comes again.
    indexed = {p.pack for s in repo.store.list("index/") for p in repo.index.read_segment(s.name)}
    assert indexed == packs(repo)
    host = again(repo)
    kit.check(host, kit.write(host, content(1, 2)), content(1, 2))
    assert collect(again(repo)).deleted == 0


def test_a_mark_stands_for_the_grace_time(tmp_path: Path) -> None:
    store = Aged()
    repo = kit.repository(tmp_path, workers=1, store=store)
    first = kit.write(repo, content(1))
    repo.remove(first)
    done = collect(repo, DAY)
    # it may belong to a dump under way
    assert (done.marked, done.unneeded, done.young) == (0, 0, 1)
    store.now += DAY
    done = collect(repo, DAY)
    assert (done.marked, done.waiting, done.deleted) == (1, 1, 0)
    store.now += DAY / 2
    assert collect(repo, DAY).waiting == 1
    store.now += DAY / 2
    assert (collect(repo, DAY).deleted, packs(repo), left(repo)) == (1, set(), [])


def test_new_checkpoints_do_not_rely_on_what_is_marked(tmp_path: Path) -> None:
    store = Aged()
    repo = kit.repository(tmp_path, workers=1, store=store)
    running = again(repo).writer(Reporter())
    repo.remove(kit.write(repo, content(1)))
    old = again(repo)  # knows the pack, and not that it will be marked
    store.now += DAY
    with old.writer(Reporter()) as writer:
        assert collect(repo, DAY).marked == 1
        fresh = kit.write(again(repo), content(1), session="fresh")
        relies = writer.commit(kit.fill(writer, content(1), session="old"))
        assert writer.stats.bytes_new == 0
    running.close()
    kit.check(again(repo), fresh, content(1))
    store.now += DAY
    done = collect(repo, DAY)
    kit.check(again(repo), relies, content(1))
    repo.remove(relies)
    store.now += 3 * DAY
    done = collect(repo, DAY)
    store.now += 2 * DAY
    done = collect(repo, DAY)
    assert len(packs(repo)) == 1, done
    kit.check(again(repo), fresh, content(1))


def test_a_pack_that_is_mostly_garbage_is_copied(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    first = kit.write(repo, content(1, 2, 3, 4), session="a")
    second = kit.write(repo, content(3), session="b")
    repo.remove(first)
    done = collect(repo)
    assert (done.repacked, done.deleted) == (
        1,
        1 + done.deleted - 1,
    ) and done.copied_bytes > 1 << 20
    sizes = sum(info.size for info in repo.store.list("packs/"))
    assert sizes < 2 << 20
    kit.check(again(repo), second, content(3))
    done = collect(again(repo))
    assert (done.repacked, done.deleted, done.unneeded) == (0, 0, 0)


def test_who_began_to_read_before_packs_went_finds_what_was_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks are of no concern to readers: who begins when the grace time is over may find chunks in
    packs that go at once.
    """
    # so that a host that has just come learns the oldest segments last
    names = iter(range(1 << 20, 0, -1))
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(names):0{2 * size}x}")
    monkeypatch.setattr(pipeline, "_FIRST", 16 << 20)  # all of it in one pack
    store = Aged()
    repo = kit.repository(tmp_path, workers=1, store=store)
    first, second = (
        kit.write(repo, content(1, 2, 3, 4), session="a"),
        kit.write(repo, content(3), session="b"),
    )
    repo.remove(first)
    store.now += DAY
    done = collect(repo, DAY)
    assert (done.repacked, done.marked, done.deleted) == (1, 1, 0)
    store.now += DAY
    host = again(repo)
    manifest, reader = host.manifest(second), host.reader(Reporter())
    assert reader.read(manifest.image_data) == b"image 3"
    assert collect(again(repo), DAY).deleted == 1
    assert kit.placed(reader, manifest.memory[0].data) == content(3).memory
    for pack in packs(repo):
        store.delete(object_name(pack))  # lost, and not moved
    with pytest.raises(ObjectMissing):
        again(repo).reader(Reporter()).read(manifest.memory[0].data)


class Cut(BaseException):
    """What kill -9 is to a thread: nothing is cleaned up after it."""


class CutStore(FaultyStore):
    """Dies at the n-th call that changes something: before it is done, or right after."""

    def __init__(self, inner: Store, after: int, *, done: bool) -> None:
        super().__init__(inner)
        self.after, self.done, self.changes, self.dead = after, done, 0, False

    def _change(self, call: Callable[[], None]) -> None:
        if self.dead:
            raise Cut
        with self._lock:
            self.changes += 1
            here = self.changes == self.after
        if here and not self.done:
            self.dead = True
            raise Cut
        call()
        if here:
            self.dead = True
            raise Cut

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        self._change(lambda: self.inner.put(name, data, if_absent=if_absent))

    def delete(self, name: str) -> None:
        self._change(lambda: self.inner.delete(name))


def busy(tmp_path: Path) -> tuple[Repository, dict[str, kit.Content]]:
    """A store with something for each step: garbage, a half-empty pack, a marked pack that is
    needed, an orphan.
    """
    repo = kit.repository(tmp_path, workers=1)
    wanted = {"a": content(3), "b": content(5, 6), "c": content(8)}
    gone = [
        kit.write(repo, content(1, 2, 3, 4), session="x"),
        kit.write(repo, content(7), session="y"),
    ]
    for name, what in wanted.items():
        kit.write(repo, what, session=name)
    for summary in gone:
        repo.remove(summary)
    doomed = next(place.pack for place in repo.index.find(_chunks(repo, "c")).values())
    # of a collection that died; what is in it must be copied
    gclists.put(repo.store, repo.sealer, gclists.DOOMED, [doomed])
    return repo, wanted


def _chunks(repo: Repository, session: str) -> list[bytes]:
    reader = repo.reader(Reporter())
    return [chunk for chunk, _size in reader.entries(repo.manifest(session).memory[0].data)]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_cut_off_anywhere_nothing_is_lost_and_the_next_run_goes_on(
    tmp_path: Path, done: bool
) -> None:
    step, ends = 0, False
    while not ends:
        step += 1
        repo, wanted = busy(tmp_path / str(step))
        cut = CutStore(repo.store, step, done=done)
        try:
            collect(again(repo, cut))
            ends = True
        except Cut:
            pass
        for name, what in wanted.items():
            kit.check(again(repo), name, what)
        fresh = kit.write(again(repo), content(1, 8), session="fresh")
        collect(again(repo))
        for name, what in {**wanted, "fresh": content(1, 8)}.items():
            kit.check(again(repo), name, what)
        repo.remove(fresh)
        for name in wanted:
            repo.remove(repo.resolve(name))
        collect(again(repo))
        collect(again(repo))
        assert (packs(repo), left(repo), list(repo.store.list("index/"))) == (set(), [], [])
    assert step > 10


def test_dumps_and_collections_at_once(tmp_path: Path) -> None:
    """Every checkpoint that was committed can be restored, whatever was collected meanwhile,
    without any grace time.
    """
    repo = kit.repository(tmp_path, workers=1, buffers_mib=8)
    committed: dict[str, kit.Content] = {}
    refused, errors = [0], list[BaseException]()
    ended = threading.Event()

    def dump(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(12):
                name = f"s{number}-{turn}"
                what = kit.Content(
                    b"".join(noise(rng.randrange(6), 1) for _ in range(3)), {"a.img": b"i"}, b"f"
                )
                host = again(repo)
                try:
                    summary = kit.write(host, what, session=name)
                except (Conflict, Damaged):
                    refused[0] += 1
                    continue
                if rng.random() < 0.6:
                    host.remove(summary)
                else:
                    committed[name] = what
        except BaseException as error:
            errors.append(error)

    def sweep() -> None:
        try:
            while not ended.is_set():
                collect(again(repo))
        except BaseException as error:
            errors.append(error)

    dumps = [threading.Thread(target=dump, args=(number,)) for number in range(3)]
    sweeps = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in dumps + sweeps:
        thread.start()
    for thread in dumps:
        thread.join()
    ended.set()
    for thread in sweeps:
        thread.join()
    assert errors == []
    assert len(committed) + refused[0] >= 5
    for _ in range(2):
        done = collect(again(repo))
        assert done.lost == 0
        for name, what in committed.items():
            kit.check(again(repo), name, what)
    assert left(repo) == []


def test_a_writer_is_seen_or_sees(tmp_path: Path) -> None:
    """Between a writer's intent and its manifest no collection deletes its packs. The writer sees a
    collection that started before it.
    """
    repo = kit.repository(tmp_path, workers=1)
    repo.remove(kit.write(repo, content(1)))
    with again(repo).writer(Reporter()) as writer:
        manifest = kit.fill(writer, content(1))
        writer.flush()
        assert writer.stats.bytes_new == 0
        held = FaultyStore(
            repo.store, put=".H", hook=lambda _verb, _name: spared.append(collect(again(repo)))
        )
        spared: list[Collected] = []
        writer._repository.store = held
        summary = writer.commit(manifest)
    assert [done.writers for done in spared] == [1] and [done.deleted for done in spared] == [0]
    kit.check(again(repo), summary, content(1))
    repo.remove(summary)
    with again(repo).writer(Reporter()) as writer:
        manifest = kit.fill(writer, content(1))
        writer.flush()
        gclists.put(repo.store, repo.sealer, gclists.DOOMED, packs(repo))
        with pytest.raises(Conflict, match="deleting packs/"):
            writer.commit(manifest)
    assert repo.list() == [] and not list(repo.store.list("writing/"))
    assert collect(repo).deleted and not packs(repo)


def test_an_unreadable_manifest_ends_it_before_anything_goes(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    repo.remove(kit.write(repo, content(1), session="a"))
    kept = kit.write(repo, content(2), session="b")
    data = repo.store.get(kept.object)
    before = packs(repo)
    repo.store.put(kept.object, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Damaged):
        collect(again(repo))
    assert packs(repo) == before
    newer = objects.encode(objects.MANIFEST, kept.object, b"{}", b"{}", repo.sealer, ("telepathy",))
    repo.store.put(kept.object, newer)  # of a newer criuctl
    with pytest.raises(UnsupportedFormat, match="telepathy"):
        collect(again(repo))
    assert packs(repo) == before
    repo.store.put(kept.object, data)
    collect(again(repo))
    kit.check(again(repo), kept, content(2))


def test_refused_deletes_are_reported_and_tried_again(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    repo.remove(kit.write(repo, content(1)))
    before = packs(repo)
    locked = FaultyStore(repo.store, delete="." + "D*")  # all but the clock's
    done = collect(again(repo, locked))
    assert done.refused == len(before) and done.deleted == 0
    assert sum("refuses to delete" in warning for warning in done.warnings) == 1
    assert packs(repo) == before
    done = collect(again(repo))
    assert done.deleted == len(before) and packs(repo) == set() and left(repo) == []


def test_lost_index_segments_are_written_again(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    kept = kit.write(repo, content(1))
    for info in list(repo.store.list("index/")):
        repo.store.delete(info.name)
    done = collect(again(repo))
    assert (done.deleted, done.lost) == (0, 0)
    host = again(repo)
    with host.writer(Reporter()) as writer:
        writer.commit(kit.fill(writer, content(1)))
        assert writer.stats.bytes_new == 0
    kit.check(again(repo), kept, content(1))


@pytest.mark.parametrize(("put", "number"), [("F", 2), ("F*", 1)])
def test_a_checkpoint_can_be_removed_from_a_store_that_is_full(
    tmp_path: Path, put: str, number: int
) -> None:
    """Nothing else makes room there. Its number is used again only if there is no room even then to
    note it.
    """
    repo = kit.repository(tmp_path, workers=1)
    only = kit.write(repo)
    full = again(repo, FaultyStore(repo.store, put=put))
    full.remove(only)
    assert full.list() == [] and kit.write(again(repo)).number == number


@pytest.mark.parametrize("known", [False, True])
def test_a_damaged_index_segment_is_replaced(tmp_path: Path, known: bool) -> None:
    """Else every check of every checkpoint would end with its damage, for ever; also where this
    host has learned it before.
    """
    repo = kit.repository(tmp_path, workers=1)
    kept, gone = kit.write(repo, content(1)), kit.write(repo, content(2), session="gone")
    host = repo if known else again(repo)
    for info in list(repo.store.list("index/")):
        repo.store.put(info.name, repo.store.get(info.name)[:-1])
    with pytest.raises(Damaged, match="index/") as caught:
        again(host).verify(host.manifest(kept), Reporter())
    assert "criuctl gc" in caught.value.hint
    host.remove(gone)
    done = collect(host)
    assert done.lost == 0 and any("index/" in text for text in done.warnings)
    collect(again(host))
    assert {
        p.pack for s in host.store.list("index/") for p in host.index.read_segment(s.name)
    } == packs(host)
    fresh = again(host)
    assert fresh.verify(fresh.manifest(kept), Reporter()) and collect(fresh).warnings == []
    there = [info.name for info in host.store.list("index/")]
    on_its_way = FaultyStore(host.store, get=".T")  # cut off there, and not in the store
    assert any("index/" in text for text in collect(again(host, on_its_way)).warnings)
    assert there and set(there) <= {info.name for info in host.store.list("index/")}


def test_damaged_marks_are_made_again_and_damaged_lists_are_errors_with_a_hint(
    tmp_path: Path,
) -> None:
    """A mark is only advice, so damage to it does not stop a dump or a collection. The lists of
    doomed or written packs are needed, and damage to them is an error.
    """
    store = Aged()
    repo = kit.repository(tmp_path, workers=1, store=store)
    repo.remove(kit.write(repo, content(1)))
    store.now += DAY
    assert collect(repo, DAY).marked == 1
    (mark,) = (info.name for info in store.list("gc/marked-"))
    store.put(mark, store.get(mark)[:-1])
    kept = kit.write(again(repo), content(2))
    store.now += DAY
    assert (collect(again(repo), DAY).marked, mark in left(repo)) == (1, False)
    store.now += DAY
    assert collect(again(repo), DAY).deleted == 1
    kit.check(again(repo), kept, content(2))
    for prefix in (gclists.DOOMED, gclists.WRITING):
        name = gclists.put(store, repo.sealer, prefix, [])
        store.put(name, store.get(name)[:-1])
        with pytest.raises(Damaged, match=name) as caught:
            collect(again(repo), DAY)
        assert "remove it" in caught.value.hint
        store.delete(name)


def test_intents_of_dead_writers_count_for_a_week(tmp_path: Path) -> None:
    store = Aged()
    repo = kit.repository(tmp_path, workers=1, store=store)
    repo.remove(kit.write(repo, content(1)))
    gclists.put(store, repo.sealer, gclists.WRITING, packs(repo))
    store.put("gc/now-" + "0" * 32, b"")
    store.now += 6 * DAY
    assert collect(repo).deleted == 0
    store.now += DAY
    collect(repo)
    assert collect(repo).deleted + len(packs(repo)) <= 1 and packs(repo) == set()
    assert not list(store.list("gc/")) and not list(store.list("writing/"))


def test_pins_hold_on_every_host_and_go_with_their_checkpoint(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    first = kit.write(repo)
    other = again(repo)
    other.catalog.pin(first.id)
    assert repo.resolve("web").pinned and repo.list()[0].pinned and repo.manifest("web").pinned
    with pytest.raises(Conflict, match="pinned"):
        repo.remove(first)
    repo.catalog.unpin(first.id)
    repo.catalog.unpin(first.id)
    assert not other.resolve("web").pinned
    other.catalog.pin(first.id)
    repo.store.delete(first.object)
    collect(repo)
    assert repo.catalog.pins() == set()


def test_a_writer_that_came_just_before_the_doom_is_spared(tmp_path: Path) -> None:
    """It looked at doomed lists before this one was put, so the collection must see its intent, and
    what it commits.
    """
    repo = kit.repository(tmp_path, workers=1)
    repo.remove(kit.write(repo, content(1)))
    writer = again(repo).writer(Reporter())
    manifest = kit.fill(writer, content(1))
    writer.flush()
    before = packs(repo)
    intent = gclists.Intent(repo.store, repo.sealer, before)

    def hook(_verb: str, name: str) -> None:
        if name.startswith(gclists.DOOMED):
            intent.begin()

    done = collect(again(repo, FaultyStore(repo.store, put="H" * 40, hook=hook)))
    assert (done.deleted, done.spared, packs(repo)) == (0, len(before), before)
    summary = repo.publish(manifest)
    intent.end()
    writer.close()
    # goes on with the list that stands: what is needed now is copied first
    done = collect(again(repo))
    assert done.deleted == len(before) and not before & packs(repo) and left(repo) == []
    kit.check(again(repo), summary, content(1))


def test_many_small_packs_and_segments_become_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every snapshot of an idle tree leaves is put together once there is much of it, and not
    again and again.
    """
    monkeypatch.setattr(gc, "MANY", 6)
    monkeypatch.setattr(gcsegments, "MANY", 6)
    repo = kit.repository(tmp_path, workers=1)
    wanted = {
        f"s{number}": kit.Content(bytes([number]) * 5000, {"a.img": b"%d" % number})
        for number in range(6)
    }
    summaries = {}
    for number, (name, what) in enumerate(wanted.items()):
        if number == 5:
            done = collect(again(repo))
            assert (done.repacked, done.segments, len(packs(repo))) == (0, 0, 5)  # not many yet
        summaries[name] = kit.write(repo, what, session=name)
    old = again(repo)  # a host that knows the old places
    old.index.sync()
    assert collect(again(repo), dry_run=True).repacked == 6
    done = collect(again(repo))
    assert (done.repacked, done.deleted, done.lost) == (6, 6, 0)
    for host in (old, again(repo)):
        for name, what in wanted.items():
            kit.check(host, name, what)
    assert len(packs(repo)) == 1 and left(repo) == []
    segments = [info.name for info in repo.store.list("index/")]
    assert {pack.pack for name in segments for pack in repo.index.read_segment(name)} == packs(
        repo
    ) and len(segments) == 1
    again_done = collect(again(repo))
    assert (again_done.repacked, again_done.segments, again_done.deleted) == (0, 0, 0)
    fresh = again(repo)
    with fresh.writer(Reporter()) as writer:
        kit.fill(writer, wanted["s3"])
        writer.flush()
        assert writer.stats.bytes_new == 0  # a writer knows what was put together


def test_segments_of_packs_deleted_before_their_publication_go(tmp_path: Path) -> None:
    """A collection puts a pack, another one deletes it because no checkpoint needs it any more, and
    the first one publishes a segment that lists it.
    """
    repo = kit.repository(tmp_path, workers=1)
    first, second = (
        kit.write(repo, content(1, 2, 3, 4), session="a"),
        kit.write(repo, content(3), session="b"),
    )
    kept = kit.write(repo, content(5), session="c")
    repo.remove(first)
    others: list[Collected] = []

    def hook(_verb: str, name: str) -> None:
        if name.startswith("index/") and not others:
            repo.remove(second)
            others.append(collect(again(repo)))

    collect(again(repo, FaultyStore(repo.store, put="H" * 40, hook=hook)))
    assert [done.deleted >= 2 for done in others] == [True]
    # the first one has read what the removed checkpoint needed, and cannot tell that from what is
    # lost
    collect(again(repo))
    indexed = {
        pack.pack
        for info in repo.store.list("index/")
        for pack in repo.index.read_segment(info.name)
    }
    assert indexed == packs(repo)
    kit.check(again(repo), kept, content(5))


def test_segments_go_on_telling_of_a_lost_pack_that_is_needed(tmp_path: Path) -> None:
    """`verify` can name it then, and an operator can bring it back."""
    repo = kit.repository(tmp_path, workers=1)
    kept = kit.write(repo, content(1))
    (pack,) = repo.store.list("packs/")
    data = repo.store.get(pack.name)
    repo.store.delete(pack.name)
    before = [info.name for info in repo.store.list("index/")]
    assert collect(again(repo)).lost and [info.name for info in repo.store.list("index/")] == before
    repo.store.put(pack.name, data)
    kit.check(again(repo), kept, content(1))
    repo.store.delete(pack.name)
    repo.remove(kept)
    collect(again(repo))
    assert list(repo.store.list("index/")) == []


def test_segments_that_cannot_be_deleted_are_put_together_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcsegments, "MANY", 4)
    monkeypatch.setattr(gc, "SMALL_PACK", 0)
    repo = kit.repository(tmp_path, workers=1)
    for number in range(5):
        kit.write(repo, kit.Content(bytes([number]) * 5000, {"a.img": b"i"}), session=f"s{number}")
    locked = FaultyStore(repo.store, delete="." + "D*")
    counts = []
    for _ in range(4):
        collect(again(repo, locked))
        counts.append(len(list(repo.store.list("index/"))))
    assert counts == [6, 6, 6, 6]
    collect(again(repo))
    assert len(list(repo.store.list("index/"))) == 1
    for number in range(5):
        kit.check(again(repo), f"s{number}", kit.Content(bytes([number]) * 5000, {"a.img": b"i"}))


def test_a_segment_that_could_not_be_written_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another segment that tells of the same packs stays then."""
    monkeypatch.setattr(pipeline, "_FIRST", 16 << 20)  # each of them in one pack
    monkeypatch.setattr(gcsegments, "MANY", 2)
    monkeypatch.setattr(gcsegments, "_LISTED_AT_ONCE", 1)
    # three segments are looked at before the fourth
    monkeypatch.setattr("criuctl.checkpoint.index._AT_ONCE", (4 << 20, 3))
    repo = kit.repository(tmp_path, workers=1)
    for session, what in {"twice": content(5), "one": content(6, 7), "two": content(8, 9)}.items():
        kit.write(repo, what, session=session)
    gone = kit.write(repo, content(1, 2, 3, 4), session="gone")
    # by how much there is in the packs
    before = sorted(repo.store.list("index/"), key=lambda info: info.size)
    twice, one, two, dead = ((*repo.index.read_segment(info.name),) for info in before)
    repo.index.publish([*dead, *twice], [])
    for info in before[3:]:
        repo.store.delete(info.name)
    repo.remove(gone)

    def full(_verb: str, name: str) -> None:
        if name.startswith("index/"):
            raise StoreFull("no room")

    done = collect(again(repo, FaultyStore(repo.store, put="H*", hook=full)))
    indexed = [
        pack.pack
        for info in repo.store.list("index/")
        for pack in repo.index.read_segment(info.name)
    ]
    assert done.deleted == 1
    assert sorted(indexed) == sorted(pack.pack for pack in (*twice, *one, *two)) and set(
        indexed
    ) == packs(repo)
