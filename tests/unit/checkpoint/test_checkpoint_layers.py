"""Memory in layers: of what was sent ahead only changed pages are stored again, and every reader
makes the last state of it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints as kit
from support.following import Memory

from criuctl.checkpoint import layers, objects
from criuctl.checkpoint.chunks import LAYERS, PAGE, RUN, StreamRef
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.liveness import Live
from criuctl.checkpoint.manifest import MemoryImage
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.errors import Damaged, StoreFull, UnsupportedFormat
from criuctl.report import Reporter
from criuctl.store.base import Data
from criuctl.store.memory import MemoryStore

FULL = 64  # pages of a window
State = dict[int, list[bytes]]  # windows: address -> pages


@pytest.fixture
def at_once() -> Iterator[None]:
    """No window that changed a little is stored whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "LITTLE", 0)
        yield


def page(seed: int) -> bytes:
    return random.Random(seed).randbytes(PAGE)


def state(windows: int, seed: int = 0) -> State:
    """So many full windows, no two pages alike."""
    return {
        n * kit.WINDOW: [page(seed + n * FULL + i) for i in range(FULL)] for n in range(windows)
    }


def changed(before: State, *places: tuple[int, int], seed: int = 1 << 20) -> State:
    """With other content in these pages: number of the window, number of the page."""
    after = {at: list(pages) for at, pages in before.items()}
    for n, (window, number) in enumerate(places):
        after[window * kit.WINDOW][number] = page(seed + n)
    return after


def joined(what: State) -> bytes:
    return b"".join(content for _at, pages in sorted(what.items()) for content in pages)


def put(
    writer: CheckpointWriter, key: object, what: State, *, ahead: bool = False, flush: bool = True
) -> None:
    """All windows, as the walk ahead or the page receiver hand them over."""
    buffer, fill = writer.acquire(), 0
    for at, pages in sorted(what.items()):
        size = len(pages) * PAGE
        if fill + size > len(buffer.view):
            writer.release(buffer)
            buffer, fill = writer.acquire(), 0
        buffer.view[fill : fill + size] = b"".join(pages)
        if ahead:
            writer.ahead(buffer, fill, fill + size, key, at)
        else:
            writer.window(key, buffer, fill, fill + size, at)
        fill += size
    writer.release(buffer)
    if ahead and flush:
        writer.flush()


def commit(
    repo: Repository, writer: CheckpointWriter, key: object, session: str = "web"
) -> StreamRef:
    """Commit a checkpoint whose memory is that stream."""
    manifest = kit.fill(writer, kit.SMALL, session=session)
    data = writer.stream(key)
    image = MemoryImage("task", 7, data.size // PAGE, manifest.memory[0].entries, data)
    features = (LAYERS,) if data.pages is not None else ()
    writer.commit(manifest.with_use(memory=(image,), features=features))
    return repo.manifest(session).memory[0].data


def stored(repo: Repository, *states: State, session: str = "web") -> StreamRef:
    """A checkpoint of the last of these states, the others sent ahead."""
    with repo.writer(Reporter()) as writer:
        for what in states[:-1]:
            put(writer, "m", what, ahead=True)
        put(writer, "m", states[-1])
        return commit(repo, writer, "m", session)


def check(repo: Repository, ref: StreamRef, content: bytes) -> None:
    """Every reader finds this."""
    reader = repo.reader(Reporter())
    assert reader.read(ref) == kit.placed(reader, ref) == content
    if not len(content) % PAGE:
        assert Memory(reader, ref).fill() == content
    assert reader.verify([ref]) == len(content)


SMALL_WINDOWS = st.lists(st.integers(1, 5), min_size=1, max_size=4)  # pages of each
CHANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6)), max_size=5)
PASSES = st.lists(st.tuples(CHANGES, st.sets(st.integers(0, 3))), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    SMALL_WINDOWS,
    PASSES,
    CHANGES,
    st.sampled_from([0, 2 * PAGE, 1 << 30]),
    st.sampled_from([1, 1 << 16]),
)
def test_whatever_changes_between_rounds_the_last_state_comes_back(
    sizes: list[int],
    passes: list[tuple[list[tuple[int, int, int]], set[int]]],
    final: list[tuple[int, int, int]],
    little: int,
    remembered: int,
) -> None:
    """Few different pages, so that they come back, move and are in several places; rounds that miss
    windows; two processes.
    """
    what = {n * kit.WINDOW: [page(n * 7 + i) for i in range(size)] for n, size in enumerate(sizes)}

    def change(changes: list[tuple[int, int, int]]) -> None:
        for window, number, seed in changes:
            pages = what.get(window * kit.WINDOW, [])
            if number < len(pages):
                pages[number] = page(seed)
            elif number == len(pages):
                pages.append(page(seed))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "LITTLE", little)
        patch.setattr(layers, "_REMEMBERED", remembered)
        repo = kit.repository(Path(folder), workers=2)
        with repo.writer(Reporter()) as writer:
            for changes, missed in passes:
                change(changes)
                put(
                    writer,
                    "m",
                    {at: pages for at, pages in what.items() if at // kit.WINDOW not in missed},
                    ahead=True,
                )
            # whose memory is that of the first, and at the same addresses
            put(writer, "other", what)
            other = joined(what)
            change(final)
            put(writer, "m", what)
            second = writer.stream("other")
            first = commit(repo, writer, "m")
        again = Repository.open(repo.store, repo.config)
        check(again, first, joined(what))
        check(again, second, other)
        assert again.verify(again.manifest("web"), Reporter()) > 0


@pytest.mark.usefixtures("at_once")
def test_single_pages_all_over_are_all_that_is_stored_again(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    first = state(40)
    second = changed(first, *((n, n) for n in range(40)), seed=10_000)
    third = changed(second, *((n, 63 - n) for n in range(40)), (0, 0), seed=20_000)
    last = changed(third, (5, 5), (5, 6), (39, 0), seed=30_000)
    with repo.writer(Reporter()) as writer:
        found = []
        for n, what in enumerate((first, second, third, last)):
            before = writer.stats.bytes_new
            put(writer, "m", what, ahead=n < 3)
            writer.flush()
            found.append(writer.stats.bytes_new - before)
        assert found == [40 * kit.WINDOW, 40 * PAGE, 41 * PAGE, 3 * PAGE]
        assert writer.stats.bytes_unused == 0
        ref = commit(repo, writer, "m")
    assert ref.pages is not None and ref.size == 40 * kit.WINDOW
    check(repo, ref, joined(last))
    assert repo.manifest("web").features == (LAYERS,)


@pytest.mark.usefixtures("at_once")
def test_forked_processes_go_on_from_what_is_at_the_same_address(tmp_path: Path) -> None:
    """A round reads what they share in one of them only; each then changes pages of its own."""
    repo = kit.repository(tmp_path)
    first = state(4)
    parent = changed(first, (0, 3), (0, 10), (2, 0))
    child = changed(parent, (0, 4), (3, 3), seed=5000)
    with repo.writer(Reporter()) as writer:
        put(writer, "parent", first, ahead=True)
        before = writer.stats.bytes_new
        put(writer, "parent", parent, ahead=True, flush=False)
        put(writer, "child", child, ahead=True)
        put(writer, "parent", parent)
        put(writer, "child", child)
        writer.wait_hashed()
        assert writer.stats.bytes_new - before == 5 * PAGE
        ref = writer.stream("child")
        other = commit(repo, writer, "parent")
    check(repo, ref, joined(child))
    check(repo, other, joined(parent))


def test_a_few_windows_are_stored_whole_as_without_layers(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    first = state(30)
    last = changed(first, *((n, 0) for n in range(10)))
    ref = stored(repo, first, last)
    assert ref.pages is None
    with repo.writer(Reporter()) as writer:
        put(writer, "m", last)
        assert writer.stream("m") == ref
        assert writer.stats.bytes_new == 0


@pytest.mark.usefixtures("at_once")
def test_what_changed_mostly_or_has_other_pages_is_stored_whole(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    first = state(3)
    mostly = changed(first, *((0, n) for n in range(57)))
    longer = {**mostly, 2 * kit.WINDOW: [*mostly[2 * kit.WINDOW][:63]]}
    ref = stored(repo, first, longer)
    assert ref.pages is None
    check(repo, ref, joined(longer))
    less = changed(first, *((0, n) for n in range(56)))
    assert stored(repo, first, less).pages is not None


@pytest.mark.usefixtures("at_once")
def test_memory_that_is_sent_faster_than_it_is_taken_waits(tmp_path: Path) -> None:
    """With the fewest buffers there are, patches of more than those, and packs that are slow to
    go.
    """
    repo = kit.repository(tmp_path, workers=1, uploads=1, buffers_mib=4)
    first = state(96)
    last = changed(first, *((n, m) for n in range(96) for m in range(0, 60, 2)))
    ref = stored(repo, first, last)
    assert ref.pages is not None
    check(repo, ref, joined(last))
    assert kit.pipeline_threads() == []


@pytest.mark.usefixtures("at_once")
def test_what_is_needed_of_a_layered_stream_is_not_collected(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    first = state(8)
    last = changed(first, *((n, 3) for n in range(8)))
    ref = stored(repo, first, last)
    gone = stored(repo, state(8, 5000), session="gone")
    assert gone.pages is None
    repo.remove(repo.resolve("gone"))
    live = Live(repo, Reporter())
    live.look()
    assert live.chunks >= {
        chunk for part in ref.parts for chunk, _size in repo.reader(Reporter()).entries(part)
    }
    for _ in range(2):
        Collection(repo, Reporter(), grace=0.0).run()
    assert sum(info.size for info in repo.store.list("packs/")) < 9.5 * kit.WINDOW + len(
        kit.SMALL.memory
    )
    check(Repository.open(repo.store, repo.config), ref, joined(last))


@pytest.mark.usefixtures("at_once")
def test_who_does_not_know_layers_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = kit.repository(tmp_path)
    first = state(2)
    stored(repo, first, changed(first, (0, 0)))
    old = objects.Kind("manifest", b"CRIUCTLM", 1, 256 << 20, frozenset({"carried-binaries"}))
    monkeypatch.setattr(objects, "MANIFEST", old)
    with pytest.raises(UnsupportedFormat, match="layers"):
        Repository.open(repo.store, repo.config).manifest("web")


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        (RUN.pack(1, 0, 1), PAGE),  # no such chunk
        (RUN.pack(0, 2, 1), PAGE),  # behind its end
        (RUN.pack(0, 1, 2), 2 * PAGE),
        (RUN.pack(0, 0, 0), 0),
        (RUN.pack(0, 0, 1), 2 * PAGE),
        (RUN.pack(0, 0, 2), PAGE),
        (b"1234567", PAGE),
    ],
)
def test_runs_that_do_not_fit_are_damage(tmp_path: Path, runs: bytes, size: int) -> None:
    repo = kit.repository(tmp_path)
    with repo.writer(Reporter()) as writer:
        writer.add_bytes("pages", os.urandom(2 * PAGE))
        writer.add_bytes("runs", runs)
        ref = StreamRef(size, pages=writer.stream("pages"), runs=writer.stream("runs"))
        writer.commit(kit.fill(writer, kit.SMALL))
    reader = repo.reader(Reporter())
    for read in (
        reader.read,
        reader.extents,
        lambda ref: kit.placed(reader, ref),
        lambda ref: reader.verify([ref]),
    ):
        with pytest.raises(Damaged):
            read(ref)


def test_layers_of_layers_are_refused() -> None:
    plain = {"size": PAGE, "chunks": [["00" * 32, PAGE]]}
    runs = {"size": RUN.size, "chunks": [["00" * 32, RUN.size]]}
    good = {"size": PAGE, "pages": plain, "runs": runs}
    assert StreamRef.from_dict(good).to_dict() == good
    bad = [
        {**good, "pages": good},
        {**good, "runs": {"size": RUN.size, "pages": plain, "runs": runs}},
        {**good, "runs": {"size": 7, "chunks": [["00" * 32, 7]]}},
        {**good, "chunks": plain["chunks"]},
        {"size": PAGE, "pages": plain},
        {"size": PAGE, "chunks": plain["chunks"], "runs": runs},
        {"size": PAGE, "list": {"size": 36, "pages": plain, "runs": runs}},
    ]
    for value in bad:
        with pytest.raises(Damaged):
            StreamRef.from_dict(value)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_store_that_is_full_ends_a_dump_that_waits_for_room(tmp_path: Path, left: int) -> None:
    """The hasher may be waiting for a buffer for changed pages, and we for it."""

    class Full(MemoryStore):
        left = 1000

        def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
            self.left -= name.startswith("packs/")
            if self.left < 0:
                raise StoreFull("no room")
            super().put(name, data, if_absent=if_absent)

    store = Full()
    repo = kit.repository(tmp_path, store=store, workers=1, uploads=1, buffers_mib=4)
    first = state(64)
    with repo.writer(Reporter()) as writer:
        put(writer, "m", first, ahead=True)
        store.left = left
        writer.hurry()
        with pytest.raises(StoreFull):
            put(
                writer,
                "m",
                changed(first, *((n, m) for n in range(64) for m in range(0, 60, 2))),
                ahead=True,
            )
    assert kit.pipeline_threads() == []


def test_whole_windows_for_readers_that_know_no_layers(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    repo.features -= {LAYERS}
    before = {0: [random.Random(1).randbytes(PAGE) for _ in range(64)]}
    after = {0: [b"x" * PAGE, *before[0][1:]]}
    ref = stored(repo, before, after)
    assert ref.pages is None
    check(repo, ref, b"".join(after[0]))
