"""A store or a thread that fails in the middle: the error is reported, nothing is listed, nothing
is left running.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore
from support.keeper import wait_until

from criuctl.checkpoint.codec import Compressor
from criuctl.checkpoint.packs import object_name
from criuctl.checkpoint.repository import Repository
from criuctl.errors import (
    CriuctlError,
    Damaged,
    ObjectMissing,
    StoreDenied,
    StoreFull,
    StoreUnreachable,
)
from criuctl.report import Reporter
from criuctl.store.base import Data
from criuctl.store.memory import MemoryStore

BIG = kit.Content(
    b"".join(n.to_bytes(4, "little") * 65536 for n in range(104)), {"a.img": b"x" * 300_000}
)
ERRORS = {"E": StoreUnreachable, "D": StoreDenied, "F": StoreFull}


def faulty(repo: Repository) -> tuple[Repository, FaultyStore]:
    store = FaultyStore(repo.store)
    opened = Repository.open(store, repo.config)
    opened.preflight_write()
    return opened, store


@pytest.mark.parametrize("letter", ERRORS)
@pytest.mark.parametrize("nth", range(5))
def test_a_put_that_fails_fails_the_dump_and_leaves_nothing(
    tmp_path: Path, letter: str, nth: int
) -> None:
    repo = kit.repository(tmp_path, buffers_mib=24)
    kit.write(repo, session="before")
    before = {info.name for info in repo.store.list()}
    opened, store = faulty(repo)
    store.faults["put"] = "." * nth + letter
    try:
        kit.write(opened, BIG)
    except ERRORS[letter]:
        left = {info.name for info in repo.store.list()} - before
        assert not any(name.startswith("checkpoints/") for name in left)
        # Once an index segment is (or may be) published its packs may be in use: only then do they
        # stay.
        failed = next(name for verb, name, was in store.calls if was == letter)
        assert (
            not left
            or any(name.startswith("index/") for name in left)
            or (letter == "E" and failed.startswith("index/"))
        )
    else:
        assert nth >= 3
        kit.check(repo, "web", BIG)
    assert kit.pipeline_threads() == []
    assert repo.list()[0].session == "before"
    kit.write(repo, BIG, session="after")
    kit.check(repo, "after", BIG)


@pytest.mark.parametrize("nth", range(5))
def test_a_lost_answer_leaves_a_whole_checkpoint_or_none(tmp_path: Path, nth: int) -> None:
    repo = kit.repository(tmp_path)
    opened, store = faulty(repo)
    store.faults["put"] = "." * nth + "A"
    try:
        summary = kit.write(opened)
    except StoreUnreachable:
        assert repo.list() == []
    else:
        assert repo.list() == [summary]
        kit.check(repo, summary)
    assert kit.pipeline_threads() == []


def test_a_thread_that_fails_stops_a_producer_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: Compressor, _content: object) -> tuple[int, bytes]:
        raise MemoryError("no room in this test")

    def produce() -> None:
        with writer:
            for n in range(1000):
                kit.put_windows(writer, 1, n.to_bytes(4, "little") * 262144)

    repo = kit.repository(tmp_path, buffers_mib=24)
    monkeypatch.setattr(Compressor, "__call__", broken)
    writer = repo.writer(Reporter())
    with pytest.raises(MemoryError, match="in this test"):
        produce()
    assert kit.pipeline_threads() == []
    with pytest.raises(MemoryError):
        writer.wait_hashed()  # closed: reports the error and does not wait


def test_a_thread_that_cannot_begin_is_reported_and_ends(tmp_path: Path) -> None:
    """zstd refuses the level, as it does where there is no memory for it: once, not for ever."""

    def produce() -> None:
        with repo.writer(Reporter()) as writer:
            kit.put_windows(writer, 1, b"x" * 262144)
            writer.flush()

    repo = kit.repository(tmp_path, compression=99)
    with pytest.raises(Exception, match=r"(?i)zstd|level"):
        produce()
    assert kit.pipeline_threads() == []


@pytest.mark.parametrize("room", range(4))
def test_where_no_more_threads_can_be_started_nothing_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Those that could be are ended; what was handed over does not pass for stored."""
    repo = kit.repository(tmp_path)
    # Chunks of two checkpoints lie in two packs at least, however few of the writer's threads got
    # something to do: so a reader wants a second thread.
    kit.write(repo, kit.Content(BIG.memory[: len(BIG.memory) // 2], {}), session="half")
    summary = kit.write(repo, BIG)
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == room:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def produce() -> None:
        with repo.writer(Reporter()) as writer:
            for number in range(2):
                with suppress(RuntimeError):
                    kit.put_windows(writer, number, os.urandom(1 << 20))
            writer.wait_hashed()

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        produce()
    assert kit.pipeline_threads() == []
    if room < 1:
        started.clear()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            kit.check(Repository.open(repo.store, repo.config), summary, BIG)
        assert kit.pipeline_threads() == []
    monkeypatch.undo()
    kit.check(repo, summary, BIG)
    assert kit.pipeline_threads() == []


@pytest.mark.parametrize("step", ["content", "hashed", "flushed"])
def test_leaving_without_commit_leaves_nothing(tmp_path: Path, step: str) -> None:
    repo = kit.repository(tmp_path)
    before = [info.name for info in repo.store.list()]
    with repo.writer(Reporter()) as writer:
        kit.put_windows(writer, 1, BIG.memory)
        writer.add_bytes("i", b"x")
        if step != "content":
            writer.wait_hashed()
        if step == "flushed":
            writer.flush()
            assert writer.stats.bytes_stored and len(list(repo.store.list("packs/"))) >= 1
    assert [info.name for info in repo.store.list()] == before
    assert kit.pipeline_threads() == []
    writer.close()


def test_a_signal_while_the_index_is_published_leaves_no_segment_that_tells_of_deleted_packs(
    tmp_path: Path,
) -> None:
    """Other hosts may rely on those packs as soon as they see the segment."""

    class Interrupted(FaultyStore):
        def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
            super().put(name, data, if_absent=if_absent)
            if name.startswith("index/"):
                raise KeyboardInterrupt

    repo = kit.repository(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        kit.write(Repository.open(Interrupted(repo.store), repo.config), BIG)
    repo.index.sync()
    there = {info.name for info in repo.store.list("packs/")}
    assert {object_name(pack) for pack in repo.index.pack_sizes()} == there != set()
    assert repo.list() == [] and kit.pipeline_threads() == []


def test_an_error_of_the_caller_is_not_hidden(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)

    def produce() -> None:
        with repo.writer(Reporter()) as writer:
            kit.put_windows(writer, 1, BIG.memory)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        produce()
    assert kit.pipeline_threads() == []


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_pack_that_vanished_fails_the_commit_and_the_next_dump_mends_it(
    tmp_path: Path, harm: str
) -> None:
    repo = kit.repository(tmp_path)
    kit.write(repo)
    with repo.writer(Reporter()) as writer:
        manifest = kit.fill(writer, kit.SMALL)
        for info in list(repo.store.list("packs/")):
            data = repo.store.get(info.name)
            repo.store.delete(info.name)
            if harm == "cut":
                repo.store.put(info.name, data[:-1])
        with pytest.raises(Damaged, match="missing or cut off"):
            writer.commit(manifest)
    assert [s.number for s in repo.list()] == [1]
    summary = kit.write(repo)
    kit.check(repo, summary)


@pytest.mark.parametrize(
    ("packs", "listings", "looks"), [(3, True, 3), (20, True, 0), (20, False, 20)]
)
def test_many_packs_are_looked_at_by_one_listing(
    tmp_path: Path, packs: int, listings: bool, looks: int
) -> None:
    opened, store = faulty(kit.repository(tmp_path))
    sizes = {bytes([n]) * 16: 100 + n for n in range(packs)}
    for pack, size in sizes.items():
        store.put(object_name(pack), b"p" * size)
    assert opened.index.check_packs(sizes, 4, listings=listings) == []
    gone, cut, *_ = sizes
    store.delete(object_name(gone))
    store.put(object_name(cut), b"p")
    store.calls.clear()
    assert opened.index.check_packs(sizes, 4, listings=listings) == [
        object_name(gone),
        object_name(cut),
    ]
    assert [verb for verb, _name, _letter in store.calls].count("stat") == looks


def test_a_pack_that_is_gone_before_a_dump_is_not_relied_on(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    kit.write(repo)
    for info in list(repo.store.list("packs/")):
        repo.store.delete(info.name)
    opened, _store = faulty(repo)
    kit.check(opened, kit.write(opened))


@pytest.mark.parametrize(
    ("fault", "error"), [("E", StoreUnreachable), ("M", ObjectMissing), ("W", Damaged)]
)
@pytest.mark.parametrize("nth", range(3))
def test_a_read_that_fails_fails_the_restore(
    tmp_path: Path, fault: str, error: type[CriuctlError], nth: int
) -> None:
    repo = kit.repository(tmp_path)
    content = kit.Content(
        BIG.memory + b"".join(n.to_bytes(8, "big") * 512 for n in range(9000)), {}
    )
    kit.write(repo, content)
    opened, store = faulty(repo)
    manifest = opened.manifest("web")
    entries = opened.reader(Reporter()).read(manifest.memory[0].entries)
    assert entries == kit.ENTRIES
    store.faults["read_into"] = "." * (nth + 1) + fault
    try:
        got = kit.placed(opened.reader(Reporter()), manifest.memory[0].data)
    except error as raised:
        message = str(raised)
    else:
        message = "packs/"
        assert got == content.memory  # fewer reads than that were needed
        assert nth > 0
    assert "packs/" in message
    assert kit.pipeline_threads() == []


def test_writing_to_a_full_file_system_is_reported(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    kit.write(repo, BIG)
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError, match="No space"):
        repo.reader(Reporter()).write_to([(repo.manifest("web").memory[0].data, full.fileno(), 0)])
    assert kit.pipeline_threads() == []


def test_a_dump_ends_while_uploads_are_slow(tmp_path: Path) -> None:
    """Closing waits for the put in progress, and for nothing else."""
    entered, gate = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, name: str, data: object, *, if_absent: bool = False) -> None:
            if name.startswith("packs/"):
                entered.set()
                assert gate.wait(60)
            super().put(name, data, if_absent=if_absent)  # type: ignore[arg-type]

    repo = kit.repository(tmp_path, store=Slow(), buffers_mib=24)
    writer = repo.writer(Reporter())

    def flush() -> None:
        with pytest.raises(CriuctlError):
            writer.flush()

    flusher = threading.Thread(target=flush)
    kit.put_windows(writer, 1, BIG.memory[: 20 << 20])
    flusher.start()
    assert entered.wait(60)
    closer = threading.Thread(target=writer.close)
    closer.start()
    wait_until(lambda: writer._pipeline._error is not None, 60, "the closing has begun")
    gate.set()
    closer.join(60)
    flusher.join(60)
    assert kit.pipeline_threads() == [] and list(repo.store.list("packs/")) == []
