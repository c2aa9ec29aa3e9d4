"""What goes into a checkpoint comes out of it, and what is there already is not stored again."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints as kit

from criuctl.checkpoint import chunks
from criuctl.checkpoint.repository import Repository
from criuctl.criu import pages
from criuctl.errors import AmbiguousRef, Conflict, NoSuchCheckpoint
from criuctl.report import Reporter
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore

MIB = 1 << 20
both = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@both
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_checkpoint_comes_back_whole(tmp_path: Path, encrypted: bool, kind: str) -> None:
    store = MemoryStore() if kind == "memory" else LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=encrypted, store=store)
    content = kit.Content(
        noise(9 * MIB + 4096) + bytes(3 * MIB) + b"text " * MIB,
        {"a.img": noise(700_000, 1), "b.img": b""},
        noise(70_000),
    )
    summary = kit.write(repo, content)
    again = Repository.open(store, repo.config)
    manifest = kit.check(again, "web", content)
    assert again.list() == [summary] and manifest.number == summary.number == 1
    assert kit.pipeline_threads() == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 70_000)), max_size=12
    ),
    st.sampled_from([1 << 12, 1 << 15, 1 << 18]),
)
def test_streams_keep_their_order_however_they_are_interleaved(
    pieces: list[tuple[str, int, int]], window: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        repo = kit.repository(Path(folder))
        expected: dict[str, bytes] = {}
        with repo.writer(Reporter()) as writer:
            for key, way, size in pieces:
                data = noise(size, size % 3)
                if way == 0:
                    kit.put_windows(writer, key, data, window)
                elif way == 3:
                    with tempfile.TemporaryFile() as file:
                        file.write(data)
                        file.flush()
                        assert writer.add_file(key, file.fileno(), size).size == size
                else:
                    writer.add_bytes(key, data)
                expected[key] = expected.get(key, b"") + data
            refs = {key: writer.stream(key) for key in expected}
            writer.commit(kit.fill(writer, kit.SMALL))
        reader = repo.reader(Reporter())
        for key, data in expected.items():
            assert reader.read(refs[key]) == data == kit.placed(reader, refs[key])


def test_memory_arrives_in_the_windows_that_the_format_expects() -> None:
    """The two packages may not import each other, so each has the numbers."""
    assert (chunks.WINDOW, chunks.PAGE) == (pages.WINDOW, pages.PAGE)


def test_in_a_hurry_packs_are_small(tmp_path: Path) -> None:
    """So that they are on their way while there is still something to read."""
    repo = kit.repository(tmp_path, workers=2)

    def packs(seed: int, *, hurry: bool) -> int:
        before = len(list(repo.store.list("packs/")))
        content = kit.Content(noise(12 * MIB, seed), {})
        with repo.writer(Reporter()) as writer:
            if hurry:
                writer.hurry()
            summary = writer.commit(kit.fill(writer, content))
        kit.check(repo, summary, content)
        return len(list(repo.store.list("packs/"))) - before

    assert packs(1, hurry=False) <= 4 < packs(2, hurry=True)


def test_packs_grow(tmp_path: Path) -> None:
    """The first is on its way soon, and a large checkpoint is not many of them."""
    repo = kit.repository(tmp_path, workers=1)
    content = kit.Content(noise(80 * MIB, 1), {})
    with repo.writer(Reporter()) as writer:
        summary = writer.commit(kit.fill(writer, content))
    kit.check(repo, summary, content)
    sizes = [round(info.size / MIB) for info in repo.store.list("packs/")]
    assert {2, 4, 8, 16} <= set(sizes) and len(sizes) <= 10


def test_a_stream_of_many_chunks_keeps_its_list_outside_the_manifest(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    content = kit.Content(noise(20_000 * 512), {})
    with repo.writer(Reporter()) as writer:
        kit.put_windows(writer, "m", content.memory, 512)
        ref = writer.stream("m")
        writer.commit(kit.fill(writer, kit.SMALL))
    assert ref.list is not None and ref.list.size == 20_000 * 36
    assert kit.placed(repo.reader(Reporter()), ref) == content.memory


@both
def test_what_the_store_has_is_not_stored_again(tmp_path: Path, encrypted: bool) -> None:
    repo = kit.repository(tmp_path, encrypted=encrypted)
    content = noise(8 * MIB)
    with repo.writer(Reporter()) as writer:
        kit.put_windows(writer, 1, content)
        kit.put_windows(writer, 2, content)  # as a forked child's copy
        writer.commit(kit.fill(writer, kit.SMALL))
        assert 8 * MIB < writer.stats.bytes_new < 9 * MIB and writer.stats.bytes_in > 16 * MIB
    for fresh in (repo, Repository.open(repo.store, repo.config)):
        with fresh.writer(Reporter()) as writer:
            kit.put_windows(writer, 1, content)
            kit.put_windows(writer, 3, noise(kit.WINDOW, 9))
            writer.flush()
            assert writer.stats.bytes_new == kit.WINDOW
            assert kit.WINDOW < writer.stats.bytes_stored < kit.WINDOW + 300


def test_few_new_windows_do_not_hold_the_whole_pool(tmp_path: Path) -> None:
    """A leave-running dump with sparse changes ends its freeze though no pack can be stored."""
    gate = threading.Event()

    class Gated(MemoryStore):
        def put(self, name: str, data: object, *, if_absent: bool = False) -> None:
            if name.startswith("packs/") and shut:
                gate.wait(60)
            super().put(name, data, if_absent=if_absent)  # type: ignore[arg-type]

    shut = False
    repo = kit.repository(tmp_path, store=Gated(), buffers_mib=48, workers=1, uploads=1)
    base = [noise(kit.WINDOW, n) for n in range(16)]
    with repo.writer(Reporter()) as writer:
        for piece in base:
            kit.put_windows(writer, 1, piece)
        writer.commit(kit.fill(writer, kit.SMALL))
    shut = True
    with repo.writer(Reporter()) as writer:
        # 80 MiB, one window in 16 new: one pack buffer and the pool hold all of the new ones
        for n in range(20):
            kit.put_windows(writer, 1, b"".join([*base[:15], noise(kit.WINDOW, 100 + n)]))
        writer.wait_hashed()
        assert writer.stats.chunks_new == 20
        gate.set()
        ref = writer.stream(1)
        writer.commit(kit.fill(writer, kit.SMALL))
    assert len(kit.placed(repo.reader(Reporter()), ref)) == 80 * MIB


def test_files_are_taken_with_their_holes(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(40 * MIB + 123)
        os.pwrite(file.fileno(), b"data", 17 * MIB + 5)
    with repo.writer(Reporter()) as writer, path.open("rb") as file:
        file.seek(99)
        digest = writer.add_file("f", file.fileno(), path.stat().st_size)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 99
        ref = writer.stream("f")
        writer.commit(kit.fill(writer, kit.SMALL))
    from blake3 import blake3

    assert digest.digest == blake3(path.read_bytes()).hexdigest() and not digest.changed
    back = tmp_path / "back"
    with back.open("w+b") as file:
        repo.reader(Reporter()).write_to([(ref, file.fileno(), 0)])
    assert back.read_bytes() == path.read_bytes()
    assert back.stat().st_blocks * 512 <= 4 * MIB
    old = tmp_path / "old"
    old.write_bytes(b"x" * (41 * MIB))
    with old.open("r+b") as file:
        repo.reader(Reporter()).write_to([(ref, file.fileno(), 0)])
    assert old.read_bytes()[: path.stat().st_size] == path.read_bytes()


def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    path = tmp_path / "f"
    path.write_bytes(b"x" * 1000)
    with repo.writer(Reporter()) as writer, path.open("rb") as file:
        short = writer.add_file("f", file.fileno(), 2000)
        assert short.changed and short.size == 1000 and writer.stream("f").size == 1000


def test_one_chunk_goes_to_many_places(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    piece = noise(kit.WINDOW)
    with repo.writer(Reporter()) as writer:
        kit.put_windows(writer, 1, piece * 20)
        ref = writer.stream(1)
        writer.commit(kit.fill(writer, kit.SMALL))
    one, two = os.memfd_create("one"), os.memfd_create("two")
    try:
        repo.reader(Reporter()).write_to([(ref, one, 0), (ref, two, 12345), (ref, one, ref.size)])
        assert os.pread(one, 1 << 30, 0) == piece * 40
        assert os.pread(two, 1 << 30, 12345) == piece * 20
    finally:
        os.close(one)
        os.close(two)


def test_references_mean_what_they_say(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    ids = [f"{n:x}" * 32 for n in (10, 11, 12)]
    made = [kit.write(repo, session="web", checkpoint=ids[n]) for n in range(3)]
    other = kit.write(repo, session="abcd", checkpoint="a" * 8 + "0" * 24, labels={"k": "v"})
    assert [s.number for s in made] == [1, 2, 3]
    assert repo.resolve("web") == repo.resolve("web@3") == repo.resolve("web@-1") == made[2]
    assert repo.resolve("bbbb") == made[1] and repo.resolve("b" * 32) == made[1]
    assert repo.resolve("abcd") == other and repo.resolve("abcd@1").labels == {"k": "v"}
    with pytest.raises(AmbiguousRef):
        repo.resolve("aaaa")
    for absent in (
        "web@4",
        "web@0",
        "web@-4",
        "nosuch",
        "web@x",
        "ffff",
        "bbb",
        "@1",
        "",
        "../config",
    ):
        with pytest.raises(NoSuchCheckpoint):
            repo.resolve(absent)
    assert [(s.session, s.number) for s in repo.list()] == [
        ("abcd", 1),
        ("web", 1),
        ("web", 2),
        ("web", 3),
    ]
    assert repo.list("web") == made and repo.list("nosuch") == []


def test_a_number_is_never_used_twice(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    for expected in (1, 2, 3):
        summary = kit.write(repo)
        assert summary.number == expected
        repo.remove(summary)
        repo.remove(summary)  # absent is fine
    assert repo.list() == []
    pinned = kit.write(repo).with_use(pinned=True)
    with pytest.raises(Conflict):
        repo.remove(pinned)


def test_two_writers_at_once_both_commit(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    first = kit.repository(tmp_path, store=store)
    repos = [first, *(Repository.open(store, first.config) for _ in range(3))]
    shared, errors = noise(4 * MIB), []

    def dump(n: int) -> None:
        try:
            for turn in range(3):
                kit.write(
                    repos[n],
                    kit.Content(shared + noise(MIB, n * 10 + turn), {"a.img": b"x"}),
                    session=f"s{n}",
                )
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=dump, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for n in range(4):
        for turn in range(3):
            kit.check(
                first,
                f"s{n}@{turn + 1}",
                kit.Content(shared + noise(MIB, n * 10 + turn), {"a.img": b"x"}),
            )


@both
def test_what_is_sent_ahead_is_used_or_reported_as_unused(tmp_path: Path, encrypted: bool) -> None:
    # so that what is flushed at once is one pack
    repo = kit.repository(tmp_path, encrypted=encrypted, workers=1)
    used, unused, more = (
        noise(3 * kit.WINDOW, 1),
        noise(2 * kit.WINDOW, 2),
        noise(4 * kit.WINDOW, 3),
    )
    with repo.writer(Reporter()) as writer:
        for content in (used + unused, more):
            buffer = writer.acquire()
            buffer.view[: len(content)] = content
            for start in range(0, len(content), kit.WINDOW):
                writer.ahead(buffer, start, start + kit.WINDOW)
            writer.release(buffer)
            writer.flush()
        assert writer.stats.bytes_new == writer.stats.bytes_unused == 9 * kit.WINDOW
        stored = writer.stats.bytes_stored
        kit.put_windows(writer, "m", used)
        ref = writer.stream("m")
        assert (writer.stats.bytes_new, writer.stats.bytes_stored) == (9 * kit.WINDOW, stored)
        assert writer.stats.bytes_unused == len(unused) + len(more)
        writer.commit(kit.fill(writer, kit.SMALL))
    assert repo.reader(Reporter()).read(ref) == used
    # Packs without any used content are gone, and the index does not list them.
    left = sum(info.size for info in repo.store.list("packs/"))
    assert len(used + unused) < left < 7 * kit.WINDOW
    with repo.writer(Reporter()) as writer:
        kit.put_windows(writer, "m", unused + more)
        writer.wait_hashed()
        assert writer.stats.bytes_new == len(more)
