"""What this host remembers of a store may be lost, damaged or shared; it never decides what is
true.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import catalog
from criuctl.checkpoint.cache import Cache
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.packs import HEADER, PACK_ENTRY, PackIndex
from criuctl.checkpoint.repository import Repository
from criuctl.report import Reporter
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore


def local(tmp_path: Path) -> tuple[Repository, Path]:
    repo = kit.repository(tmp_path, store=LocalStore(str(tmp_path / "store")))
    kit.write(repo)
    repo.close()
    (path,) = (tmp_path / "store" / ".cache").glob("*.sqlite")
    return repo, path


def new_bytes(repo: Repository) -> int:
    with repo.writer(Reporter()) as writer:
        kit.fill(writer, kit.SMALL)
        writer.flush()
        return writer.stats.bytes_new


def harms() -> dict[str, bytes]:
    return {"empty": b"", "noise": secrets.token_bytes(20_000), "text": b"hello\n"}


@pytest.mark.parametrize(
    "harm",
    ["empty", "noise", "text", "middle", "cut", "gone", "other-store", "no-table", "version"],
)
def test_a_damaged_cache_is_made_again(tmp_path: Path, harm: str) -> None:
    repo, path = local(tmp_path)
    whole = path.read_bytes()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "middle":
        path.write_bytes(whole[:4096] + secrets.token_bytes(len(whole) - 4096))
    elif harm in ("other-store", "no-table", "version"):
        db = sqlite3.connect(path)
        statement = {
            "other-store": "UPDATE meta SET store = 'x'",
            "no-table": "DROP TABLE chunks",
            "version": "PRAGMA user_version = 99",
        }
        db.execute(statement[harm])
        db.commit()
        db.close()
    else:
        path.write_bytes(harms()[harm])
    with Repository.open(repo.store, repo.config) as again:
        assert len(again.list()) == 1
        kit.check(again, "web")
        again.preflight_write()
        assert new_bytes(again) == 0
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_pack_is_known_for_as_long_as_one_segment_tells_of_it(tmp_path: Path) -> None:
    """Two collections at once may both tell of it; the next one takes one of these segments
    away.
    """
    repo = kit.repository(tmp_path, workers=1)
    kit.write(repo)
    (older,) = (info.name for info in repo.store.list("index/"))
    newer: list[str] = []
    repo.index.publish(repo.index.read_segment(older), newer)
    for name, known in ((newer[0], True), (older, False)):
        repo.store.delete(name)
        repo.index.sync()
        assert (new_bytes(repo) == 0) is known


def test_a_cache_damaged_under_a_running_dump_only_costs_time(tmp_path: Path) -> None:
    repo, path = local(tmp_path)
    with Repository.open(repo.store, repo.config) as again:
        again.preflight_write()
        again.list()
        path.write_bytes(secrets.token_bytes(path.stat().st_size))
        kit.check(again, kit.write(again, session="two"))
    with Repository.open(repo.store, repo.config) as again:
        kit.check(again, "two")


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM chunks",
        *(f"UPDATE chunks SET {name} = 99" for name in ("offset", "stored", "plain")),
    ],
)
def test_damage_that_the_database_does_not_see_fails_nothing(tmp_path: Path, harm: str) -> None:
    """Above all no collection takes a pack for garbage because its host has forgotten what is in
    it.
    """
    repo, path = local(tmp_path)
    db = sqlite3.connect(path)
    db.execute(harm)
    db.commit()
    db.close()
    harmed = path.read_bytes()

    def opened() -> Repository:
        path.write_bytes(harmed)  # what went before has mended it
        return Repository.open(repo.store, repo.config)

    with opened() as again:
        kit.check(again, "web")
    with opened() as again:
        again.verify(again.manifest("web"), Reporter())
    for _run in range(2):
        with opened() as again:
            assert Collection(again, Reporter(), grace=0).run().lost == 0
    with Repository.open(repo.store, repo.config) as again:
        kit.check(again, "web")


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    repo, path = local(tmp_path)
    path.unlink()
    path.parent.rename(tmp_path / "away")
    path.parent.write_text("in the way")
    with Repository.open(repo.store, repo.config) as again:
        kit.check(again, "web")
        assert new_bytes(again) == 0


def test_a_cache_that_others_may_change_is_not_used(tmp_path: Path) -> None:
    repo, path = local(tmp_path)
    path.parent.chmod(0o777)
    before = path.read_bytes()
    with Repository.open(repo.store, repo.config) as again:
        kit.check(again, "web")
        kit.write(again)
    assert path.read_bytes() == before


def test_segments_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    repo, _path = local(tmp_path)
    with Repository.open(repo.store, repo.config) as again:
        again.index.sync()
        known = len(again.index.pack_sizes())
        assert known
        for info in list(repo.store.list("index/")):
            repo.store.delete(info.name)
        again.index.sync()
        assert again.index.pack_sizes() == {}


_WORKER = """
import sys
from pathlib import Path
from support import checkpoints as kit
from criuctl.checkpoint.repository import Repository
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore
folder, name = Path(sys.argv[1]), sys.argv[2]
for turn in range(4):
    with Repository.open(LocalStore(str(folder / "store")), kit.config(folder)) as repo:
        repo.preflight_write()
        memory = b"shared" * 50000 + name.encode() * 50000 + bytes([turn]) * 5000
        content = kit.Content(memory, {"a.img": b"x"})
        kit.check(repo, kit.write(repo, content, session=name), content)
        repo.list()
"""


@pytest.mark.parametrize("looked_up", [0, 1000], ids=["in one go", "one by one"])
def test_a_list_of_one_session_forgets_no_other_and_a_full_one_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up: int
) -> None:
    monkeypatch.setattr(catalog, "_SPARE", 0)
    monkeypatch.setattr(catalog, "_LOOKED_UP", looked_up)
    read: list[str] = []
    store = FaultyStore(MemoryStore(), get_range="H*", hook=lambda _verb, name: read.append(name))
    repo = kit.repository(tmp_path, store=store)
    made = [kit.write(repo, session=name) for name in ("a", "b", "b", "c")]
    del read[:]
    assert len(repo.list()) == 4 and len(read) == 4
    fresh = kit.write(repo, session="a")
    repo.remove(made[3])
    del read[:]
    assert [s.id for s in repo.list("a")] == [made[0].id, fresh.id] and read == [fresh.object]
    assert len(repo.list()) == 4 and read == [fresh.object]
    last = kit.write(repo, session="d")
    del read[:]
    assert len(repo.list()) == 5 and read == [last.object]
    kept = repo.cache.run(lambda db: {name for (name,) in db.execute("SELECT name FROM heads")})
    assert kept == {s.object for s in repo.list()}


def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    local(tmp_path)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path), name],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two", "three")
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    with Repository.open(LocalStore(str(tmp_path / "store")), kit.config(tmp_path)) as repo:
        assert len(repo.list()) == 13


@pytest.mark.slow
def test_half_a_million_chunks_are_learned_in_seconds(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, store=LocalStore(str(tmp_path / "store")))
    packs = []
    for _ in range(125):
        entries = b"".join(
            PACK_ENTRY.pack(secrets.token_bytes(32), HEADER.size + n * 5000, 4000, 4096)
            for n in range(4000)
        )
        packs.append(PackIndex(secrets.token_bytes(16), 32 << 20, entries))
    published: list[str] = []
    repo.index.publish(packs, published)
    repo.close()
    for path in (tmp_path / "store" / ".cache").iterdir():
        path.unlink()
    began = time.process_time()
    with Repository.open(repo.store, repo.config) as again:
        again.index.sync()
        assert time.process_time() - began < 10
        wanted = [chunk for chunk, *_rest in packs[100]]
        began = time.process_time()
        found = again.index.find(wanted)
        assert len(found) == 4000 and found[wanted[7]].offset == HEADER.size + 7 * 5000
        assert time.process_time() - began < 1


def test_two_hundred_checkpoints_are_listed_at_once(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True, store=LocalStore(str(tmp_path / "store")))
    manifest = repo.manifest(kit.write(repo))
    for n in range(199):
        repo.publish(manifest.with_use(id=f"{n:032x}"))
    assert len(repo.list()) == 200
    repo.close()
    began = time.process_time()
    with Repository.open(repo.store, repo.config) as again:
        assert len(again.list()) == 200
    assert time.process_time() - began < 0.3


def test_another_process_that_starts_again_keeps_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the database is gone, files of its names are those of another one."""
    path = tmp_path / "cache" / "one.sqlite"
    mine, other, third = (Cache(path, "store") for _ in range(3))
    mine.run(lambda db: db.execute("INSERT INTO heads VALUES ('old', 1, x'00')"), write=True)
    unlink = os.unlink

    def unlink_and_begin(file: str) -> None:
        unlink(file)
        if file == str(path):
            other.run(
                lambda db: db.execute("INSERT INTO heads VALUES ('new', 1, x'00')"), write=True
            )

    monkeypatch.setattr(os, "unlink", unlink_and_begin)
    mine.leave_disk()
    monkeypatch.undo()
    assert third.run(lambda db: db.execute("SELECT name FROM heads").fetchall()) == [("new",)]
    for cache in (mine, other, third):
        cache.close()
