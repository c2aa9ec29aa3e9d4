"""A store that many hosts use: what a dump asks of it, and what is stored only once."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import checkpoints as kit
from support import writeonly

from criuctl.checkpoint import index as index_module
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged
from criuctl.report import Reporter
from criuctl.store.base import Capabilities, ObjectInfo
from criuctl.store.memory import MemoryStore


class Counting(MemoryStore):
    """A store whose requests are counted; hosts keep caches of it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.requests[f"list {prefix.partition('/')[0]}"] += 1
        return super().list(prefix)

    def get(self, name: str, limit: int | None = None) -> bytes:
        self.requests[f"get {name.partition('/')[0]}"] += 1
        return super().get(name, limit)

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=True, kind="counting")


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of a few objects counts as a large one."""
    monkeypatch.setattr(index_module, "_LISTED_AT_ONCE", 2)
    monkeypatch.setattr(index_module, "_FEW_PAGES", 0)


def opened(store: Counting, path: Path) -> Repository:
    """The store as a host with a cache of its own opens it."""
    keys = str(path.parent / "keys")
    return Repository.open(store, kit.config(path, key_dir=keys, workers=1))


def content(seed: int, size: int = 64 << 10) -> kit.Content:
    """Memory that no other seed has."""
    return kit.Content(seed.to_bytes(4, "little") * (size // 4), {"core-1.img": b"image"})


def dump(store: Counting, path: Path, what: kit.Content, session: str) -> tuple[str, int]:
    """One dump of the host in `path`, in a process of its own: its id and its new bytes."""
    repo = opened(store, path)
    try:
        with repo.writer(Reporter()) as writer:
            summary = writer.commit(kit.fill(writer, what, session=session))
            return summary.id, writer.stats.bytes_new
    finally:
        repo.close()


@pytest.fixture
def hosts(store: Counting, tmp_path: Path) -> tuple[Path, Path]:
    kit.repository(tmp_path, store=store, encrypted=True).close()
    return tmp_path / "a", tmp_path / "b"


def test_a_host_knows_what_others_have_stored(store: Counting, hosts: tuple[Path, Path]) -> None:
    a, b = hosts
    dump(store, a, content(1), "one")
    assert dump(store, b, content(1), "two")[1] == 0


@pytest.mark.usefixtures("small_pages")
def test_a_large_store_is_not_listed_for_each_dump(
    store: Counting, hosts: tuple[Path, Path]
) -> None:
    a, b = hosts
    for n in range(6):
        dump(store, a, content(n), f"s{n}")
    dump(store, b, content(100), "first")  # looks at everything
    store.requests.clear()
    dump(store, a, content(200), "other")
    for n in range(3):
        _, new = dump(store, b, content(5), f"again{n}")
        assert new == 0  # known since its first look
    assert store.requests["list index"] == 0
    assert store.requests["get index"] == 0
    assert dump(store, b, content(200), "later")[1] > 0  # stored twice, until the next look


@pytest.mark.usefixtures("small_pages")
def test_it_looks_again_when_time_has_passed(
    store: Counting, hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts
    for n in range(6):
        dump(store, a, content(n), f"s{n}")
    dump(store, b, content(100), "first")
    dump(store, a, content(200), "other")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3601)
    assert dump(store, b, content(200), "later")[1] == 0
    monkeypatch.setattr(time, "time", lambda: real() - 3601)  # the clock was set back
    store.requests.clear()
    dump(store, b, content(201), "then")
    assert store.requests["list index"] == 1


@pytest.mark.usefixtures("small_pages")
def test_packs_that_were_to_be_deleted_are_not_relied_on_later(
    store: Counting, hosts: tuple[Path, Path]
) -> None:
    """Between two looks of a host the collection marks, deletes and forgets."""
    a, b = hosts
    for n in range(6):
        dump(store, a, content(n), f"s{n}")
    repo = opened(store, a)
    repo.remove(repo.resolve("s5"))
    grace = 0.2  # less than the second by which a collection takes everything for older
    assert Collection(repo, Reporter(), grace=grace).run().marked > 0
    dump(store, b, content(100), "first")  # its look: the pack is marked
    assert Collection(repo, Reporter(), grace=grace).run().deleted > 0
    assert not list(store.list("gc/"))
    repo.close()
    found, new = dump(store, b, content(5), "same")
    assert new > 0
    repo = opened(store, a)
    repo.verify(repo.manifest(found), Reporter())
    repo.close()


@pytest.mark.usefixtures("small_pages")
def test_a_pack_that_went_without_a_mark_fails_one_dump(
    store: Counting, hosts: tuple[Path, Path]
) -> None:
    a, b = hosts
    for n in range(6):
        dump(store, a, content(n), f"s{n}")
    dump(store, b, content(100), "first")
    repo = opened(store, a)
    repo.remove(repo.resolve("s5"))
    Collection(repo, Reporter(), grace=0).run()
    with pytest.raises((Damaged, Conflict)) as refused:
        dump(store, b, content(5), "same")
    assert "Dump again" in refused.value.hint
    found, _ = dump(store, b, content(5), "same")
    repo.verify(repo.manifest(found), Reporter())
    repo.close()


def test_of_many_new_segments_the_largest_are_loaded(
    store: Counting, hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore finds the rest nevertheless."""
    a, b = hosts
    monkeypatch.setattr(index_module, "_MOST_SEGMENTS", 2)
    several = kit.Content(os.urandom(4 << 20), {"core-1.img": b""})
    large, _ = dump(store, a, several, "large")
    small = [dump(store, a, content(n), f"s{n}")[0] for n in range(4)]
    store.requests.clear()
    dump(store, b, content(100), "first")
    assert store.requests["get index"] == 2
    assert dump(store, b, several, "other")[1] == 0
    repo = opened(store, b)
    for checkpoint in (large, *small):
        repo.verify(repo.manifest(checkpoint), Reporter())
    repo.close()


@pytest.mark.usefixtures("small_pages")
def test_deduplication_with_write_only_hosts(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shares content among its own sessions, learns of no other's, and nothing is lost when
    all of it is collected.
    """
    owner = kit.repository(tmp_path, store=store, encrypted=True)
    hosts = [tmp_path / "one", tmp_path / "two"]
    for path in hosts:
        writeonly.enrol(owner, path, path.name)

    def stored(path: Path, what: kit.Content, session: str) -> int:
        repo = writeonly.host(store, path)
        try:
            with repo.writer(Reporter()) as writer:
                writer.commit(kit.fill(writer, what, session=session))
                return writer.stats.bytes_new
        finally:
            repo.close()

    every = {"plain": content(1)}
    with owner.writer(Reporter()) as writer:
        writer.commit(kit.fill(writer, content(1), session="plain"))
    for path in hosts:
        assert stored(path, content(1), f"{path.name}-0") > 0  # of its own keys
        for n in range(1, 4):
            assert stored(path, content(1), f"{path.name}-{n}") == 0
        every |= {f"{path.name}-{n}": content(1) for n in range(4)}
        assert stored(path, content(2), f"{path.name}-4") > 0
        every[f"{path.name}-4"] = content(2)
    owner.remove(owner.resolve("one-4"))
    del every["one-4"]
    done = Collection(owner, Reporter(), grace=0).run()
    assert done.checkpoints == len(every) and done.deleted > 0
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3601)
    for path in hosts:  # they go on, and rely on nothing that is gone
        assert stored(path, content(2), f"{path.name}-5") == (0 if path.name == "two" else 1 << 16)
        every[f"{path.name}-5"] = content(2)
    fresh = Repository.open(store, kit.config(tmp_path, cache_dir=str(tmp_path / "new")))
    for session, what in every.items():
        manifest = fresh.manifest(session)
        fresh.verify(manifest, Reporter())
        held = b"".join(fresh.reader(Reporter()).read(m.data) for m in manifest.memory)
        assert held == what.memory
    fresh.close()
    owner.close()
