"""Whatever happens to a stored object, it is met as damage: never as other content, never as a
hang.

Every object of a small store is damaged in every region of it; reading everything then raises a
`DataError` or `ObjectMissing` that says so, or, where the damaged byte is redundant, still gives
exactly what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import gclists, leases, objects
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.manifest import Manifest
from criuctl.checkpoint.packs import (
    FOOTER,
    HEADER,
    RECORD,
    mask_footer,
    object_name,
    pack_of,
    read_index,
)
from criuctl.checkpoint.repository import Repository
from criuctl.errors import (
    Damaged,
    DataError,
    KeyMissing,
    NoSuchCheckpoint,
    ObjectMissing,
    StoreNotInitialised,
    StoreUnreachable,
    UnsupportedFormat,
    WrongKey,
)
from criuctl.report import Reporter
from criuctl.store.memory import MemoryStore

both = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


class Scene:
    """A store with one small checkpoint; tests damage copies of it."""

    def __init__(self, path: Path, encrypted: bool) -> None:
        # so that there is one pack
        self.repo = kit.repository(path, encrypted=encrypted, workers=1)
        kit.write(self.repo)
        self.objects = {
            info.name: self.repo.store.get(info.name) for info in self.repo.store.list()
        }

    def one(self, prefix: str) -> str:
        return next(name for name in self.objects if name.startswith(prefix))

    def read(self, changed: dict[str, bytes | None]) -> Manifest:
        """Open and read all of a copy of the store in which these objects are others, or gone."""
        store = MemoryStore()
        for name, data in {**self.objects, **changed}.items():
            if data is not None:
                store.put(name, data)
        with Repository.open(store, self.repo.config) as repo:
            return kit.check(repo, "web")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "encrypted"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), request.param)


KINDS = ("config", "packs/", "index/", "checkpoints/")


def positions(data: bytes) -> Iterator[int]:
    """Every byte of the small parts, and some of the large ones."""
    yield from range(min(len(data), 140))
    yield from range(max(140, len(data) - 140), len(data))
    yield from range(140, max(140, len(data) - 140), max(1, len(data) // 60))


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_anywhere_is_met(scene: Scene, kind: str) -> None:
    name = scene.one(kind)
    data = scene.objects[name]
    harmless = 0
    for position in positions(data):
        wrong = bytearray(data)
        wrong[position] ^= 0x80 if position % 2 else 0x01
        try:
            scene.read({name: bytes(wrong)})
        except (DataError, ObjectMissing):
            continue
        except KeyMissing:
            assert kind == "config"  # the id by which the key is found is another one
            continue
        harmless += 1
    # A pack's own header, footer and index are only read when the store's index is lost.
    assert harmless <= (HEADER.size + FOOTER.size + 150 * 48 if kind == "packs/" else 0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_other_content_is_met(scene: Scene, kind: str, data: st.DataObject) -> None:
    name = scene.one(kind)
    whole = scene.objects[name]
    cut = data.draw(st.integers(0, len(whole) - 1), label="cut")
    tail = data.draw(st.binary(max_size=80), label="tail")
    wrong = whole[:cut] + tail
    if wrong.strip() == whole:
        return
    try:
        scene.read({name: wrong})
    except (DataError, ObjectMissing, KeyMissing):
        return
    assert kind == "packs/" and cut > len(whole) - FOOTER.size - 150 * 48


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_object_is_met(scene: Scene, kind: str) -> None:
    name = scene.one(kind)
    data = scene.objects[name]
    for cut in {
        0,
        1,
        7,
        8,
        9,
        27,
        28,
        32,
        40,
        len(data) // 2,
        len(data) - 500,
        len(data) - 33,
        len(data) - 25,
        len(data) - 1,
    }:
        if kind == "packs/" and cut > len(data) // 2:
            continue  # the chunks may all be there: see the test of packs below
        with pytest.raises((DataError, ObjectMissing)):
            scene.read({name: data[: max(cut, 0)]})


def test_a_missing_object_is_met(scene: Scene) -> None:
    with pytest.raises(StoreNotInitialised):
        scene.read({"config": None})
    with pytest.raises(NoSuchCheckpoint):
        scene.read({scene.one("checkpoints/"): None})
    with pytest.raises(ObjectMissing):
        scene.read({scene.one("packs/"): None})


def test_a_damaged_index_is_no_obstacle_to_a_restore(scene: Scene) -> None:
    store = MemoryStore()
    for name, data in scene.objects.items():
        store.put(name, data[:-1] if name.startswith("index/") else data)
    with Repository.open(store, scene.repo.config) as repo:
        reporter = Reporter()
        data = repo.reader(reporter).read(repo.manifest("web").memory[0].data)
        assert data == kit.SMALL.memory
        assert len(reporter.warnings) == 1 and "index/" in reporter.warnings[0]


def test_packs_describe_themselves(scene: Scene) -> None:
    """With every index segment lost, the checkpoint is read by the packs' own indexes."""
    scene.read({name: None for name in scene.objects if name.startswith("index/")})
    name = scene.one("packs/")
    data = scene.objects[name]
    lost: dict[str, bytes | None] = {n: None for n in scene.objects if n.startswith("index/")}
    for wrong in (
        data[:-1],
        data[: -FOOTER.size],
        data + b"\0",
        data[:8] + b"\3\0" + data[10:],
        b"",
        data[:40],
    ):
        with pytest.raises(DataError):
            scene.read({**lost, name: wrong})
    pack = pack_of(name)
    assert pack is not None
    index = FOOTER.unpack(mask_footer(data[-FOOTER.size :], scene.repo.sealer.pack(pack)))[2]
    for position in [
        *range(HEADER.size),
        *range(index, index + 200),
        *range(len(data) - FOOTER.size - 20, len(data)),
    ]:
        bad = bytearray(data)
        bad[position] ^= 4
        with pytest.raises(DataError):
            scene.read({**lost, name: bytes(bad)})


def test_an_object_under_another_name_is_met(scene: Scene) -> None:
    manifest, segment = scene.one("checkpoints/"), scene.one("index/")
    moved = manifest[:-1] + ("0" if manifest[-1] != "0" else "1")
    with pytest.raises(Damaged):
        scene.read({manifest: None, moved: scene.objects[manifest]})
    with pytest.raises(Damaged):
        scene.read({segment: None, "index/" + "0" * 32: scene.objects[segment]})
    with pytest.raises(DataError):
        scene.read({manifest: scene.objects[segment]})


def test_what_is_newer_is_refused_by_name(scene: Scene) -> None:
    for kind in ("index/", "checkpoints/"):
        name = scene.one(kind)
        data = scene.objects[name]
        with pytest.raises(UnsupportedFormat, match="format 2; this criuctl reads up to 1"):
            scene.read({name: data[:8] + b"\2\0" + data[10:]})
        words = b"telepathy hovering"
        with pytest.raises(UnsupportedFormat, match="hovering, telepathy"):
            scene.read({name: data[:10] + bytes([len(words), 0]) + data[12:28] + words + data[28:]})
    config = scene.objects["config"].decode()
    with pytest.raises(UnsupportedFormat, match="format 9"):
        scene.read({"config": config.replace('"version": 1', '"version": 9').encode()})
    with pytest.raises(UnsupportedFormat, match="telepathy"):
        scene.read(
            {"config": config.replace('"features": []', '"features": ["telepathy"]').encode()}
        )
    with pytest.raises(UnsupportedFormat):
        scene.read({"config": b'{"hello": 1}'})
    changed = config.replace('"aes-256-gcm"', '"rot13"').replace('"none"', '"rot13"')
    with pytest.raises(UnsupportedFormat, match="rot13"):
        scene.read({"config": changed.encode()})


@both
def test_one_damaged_manifest_hides_no_other(tmp_path: Path, encrypted: bool) -> None:
    repo = kit.repository(tmp_path, encrypted=encrypted)
    good, bad = kit.write(repo, session="good"), kit.write(repo, session="bad")
    data = bytearray(repo.store.get(bad.object))
    data[60] ^= 1
    repo.store.put(bad.object, bytes(data))
    with Repository.open(repo.store, repo.config) as again:
        unreadable: list[DataError] = []
        assert again.list(unreadable=unreadable) == [good]
        assert len(unreadable) == 1 and unreadable[0].details["object"] == bad.object
        assert again.resolve("good") == good
        for ref in ("bad", "bad@1", bad.id):
            with pytest.raises(Damaged):
                again.resolve(ref)


def test_names_with_huge_numbers_prevent_no_dump(tmp_path: Path) -> None:
    """An attacker who can put objects can use such names. If one of them counted, a session whose
    record was removed could not be dumped again.
    """
    repo = kit.repository(tmp_path, workers=1)
    token, forged = repo.sealer.token("web"), 10**20 - 1
    repo.store.put(f"numbers/{token}/{forged:020d}", b"used\n")
    assert kit.write(repo).number == 1
    repo.store.put(f"checkpoints/{token}/{forged:020d}-{7:032x}", b"nothing")
    assert kit.write(repo).number == 2
    repo.remove(repo.resolve_damaged("web"))
    assert [kit.write(repo).number, repo.resolve("web").number] == [3, 3]


def test_nothing_is_read_whole_without_a_bound(tmp_path: Path) -> None:
    """An attacker who can put objects cannot use up the memory of the hosts that read them."""

    asked: set[str] = set()

    class Bounded(MemoryStore):
        def get(self, name: str, limit: int | None = None) -> bytes:
            asked.add(name.partition("/")[0])
            assert name == "config" or limit is not None, name
            return super().get(name, limit)

    store = Bounded()
    repo = kit.repository(tmp_path, encrypted=True, store=store, workers=1)
    leases.claim(repo, "web", "ab" * 16, 1, host="f" * 32).keep()
    repo.remove(kit.write(repo, session="gone"))
    gclists.put(store, repo.sealer, gclists.MARKED, [])
    with Repository.open(store, repo.config) as other:
        kit.check(other, kit.write(other))
        Collection(other, Reporter(), grace=0).run()
    assert asked == {"config", "sessions", "checkpoints", "index", "gc"}


def test_compressed_content_cannot_claim_more_than_it_should(tmp_path: Path) -> None:
    """Decompression is bounded by the sizes that were checked, so a bomb is damage, not memory."""
    import zstandard

    from criuctl.checkpoint.codec import ZSTD, Decompressor, SealBroken

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    for payload, size in (
        (bomb, 1 << 20),
        (unsized, 100),
        (b"", 10),
        (b"\x28\xb5\x2f\xfd", 4),
        (bomb[:-3], 64 << 20),
    ):
        with pytest.raises(SealBroken):
            Decompressor()(ZSTD, payload, size)
    with pytest.raises(SealBroken):
        Decompressor()(7, b"abc", 3)
    with pytest.raises(ValueError, match="too large"):
        objects.encode(objects.LEASE, "x", b"", bytes(2 << 20), kit.repository(tmp_path).sealer)


@both
def test_pack_indexes_match_what_was_published(tmp_path: Path, encrypted: bool) -> None:
    repo = kit.repository(tmp_path, encrypted=encrypted)
    kit.write(repo)
    for info in repo.store.list("packs/"):
        inner = read_index(repo.store, info.name, info.size, repo.sealer)
        assert inner.pack == pack_of(info.name) and inner.size == info.size
        listed = [
            p
            for s in repo.store.list("index/")
            for p in repo.index.read_segment(s.name)
            if p.pack == inner.pack
        ]
        assert listed == [inner]
        ends = [offset + RECORD.size + stored for _c, offset, stored, _p in inner]
        assert [offset for _c, offset, _s, _p in inner] == [HEADER.size, *ends[:-1]]


def test_damage_found_once_is_not_relied_on_again(tmp_path: Path) -> None:
    """A pack in which damage was found counts as unknown: the next dump stores its content again,
    and is whole.
    """
    repo = kit.repository(tmp_path)
    kit.write(repo)
    for info in list(repo.store.list("packs/")):
        data = bytearray(repo.store.get(info.name))
        data[HEADER.size + RECORD.size + 3] ^= 1
        repo.store.put(info.name, bytes(data))
    with pytest.raises(Damaged, match="packs/"):
        repo.verify(repo.manifest("web"), Reporter())
    for name in list(repo.index.pack_sizes()):
        repo.index.distrust([name])
    again = kit.write(repo)
    kit.check(repo, again)


def trusted(repo: Repository) -> bool:
    """Whether the next dump relies on all packs, as far as this host knows."""
    return not repo.index.distrusted(repo.index.pack_sizes())


def test_a_pack_that_was_healed_is_relied_on_again(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    manifest = repo.manifest(kit.write(repo))
    (name,) = (info.name for info in repo.store.list("packs/"))
    whole = repo.store.get(name)
    repo.store.delete(name)
    with pytest.raises(ObjectMissing):
        repo.verify(manifest, Reporter())
    repo.preflight_write()
    assert not trusted(repo)
    repo.store.put(name, whole)  # from a backup
    repo.preflight_write()
    assert trusted(repo)
    damaged = bytearray(whole)
    damaged[HEADER.size + RECORD.size + 3] ^= 1
    repo.store.put(name, bytes(damaged))
    with pytest.raises(Damaged):
        repo.verify(manifest, Reporter())
    repo.store.put(name, whole)
    repo.preflight_write()
    assert not trusted(repo)  # a listing does not tell
    repo.verify(manifest, Reporter())
    assert trusted(repo)


def test_what_is_distrusted_is_not_forgotten_when_a_store_fails(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    repo = kit.repository(tmp_path, store=store)
    kit.write(repo)
    packs = list(repo.index.pack_sizes())
    repo.index.distrust(packs)
    store.faults["list"] = "E*"
    with pytest.raises(StoreUnreachable):
        repo.index.reload()
    del store.faults["list"]
    repo.index.sync()
    assert set(repo.index.distrusted(repo.index.pack_sizes())) == set(packs) != set()


def test_what_is_sound_in_another_pack_is_read_there(tmp_path: Path) -> None:
    """Two hosts that stored the same at once; a verification tells the damage all the same."""
    repo = kit.repository(tmp_path, workers=1)
    other = Repository.open(repo.store, repo.config)
    other.preflight_write()
    summary = kit.write(repo)
    kit.write(other, session="same")

    def host() -> Repository:
        return Repository.open(repo.store, repo.config)

    def damage(pack: bytes) -> None:
        name = object_name(pack)
        data = bytearray(repo.store.get(name))
        data[HEADER.size + RECORD.size + 3] ^= 1
        repo.store.put(name, bytes(data))

    def read(opened: Repository, reporter: Reporter) -> list[bytes]:
        reader = opened.reader(reporter)
        return [reader.read(stream) for stream in opened.manifest(summary).streams()]

    whole = read(host(), Reporter())
    one = host()
    one.index.sync()
    manifest = one.manifest(summary)
    chunks = [
        chunk
        for stream in manifest.streams()
        for chunk, _size in one.reader(Reporter()).entries(stream)
    ]
    (used,) = {place.pack for place in one.index.find(chunks).values()}
    (spare,) = one.index.pack_sizes().keys() - {used}
    damage(used)
    reporter = Reporter()
    assert read(one, reporter) == whole
    assert len(reporter.warnings) == 1 and "is damaged" in reporter.warnings[0]
    with pytest.raises(Damaged, match=object_name(used)):
        host().verify(manifest, Reporter())
    damage(spare)
    for opened in (one, host()):
        with pytest.raises(Damaged):
            read(opened, Reporter())


@pytest.mark.parametrize("which", [0, 1])
def test_of_copies_that_are_all_distrusted_each_is_tried(tmp_path: Path, which: int) -> None:
    repo = kit.repository(tmp_path, workers=1)
    other = Repository.open(repo.store, repo.config)
    other.preflight_write()
    manifest = repo.manifest(kit.write(repo))
    kit.write(other, session="same")
    repo.index.sync()
    packs = list(repo.index.pack_sizes())
    repo.index.distrust(packs)
    whole = [repo.reader(Reporter()).read(stream) for stream in manifest.streams()]
    repo.store.delete(object_name(packs[which]))
    reader = repo.reader(Reporter())
    assert [reader.read(stream) for stream in manifest.streams()] == whole
    repo.store.delete(object_name(packs[1 - which]))
    with pytest.raises(ObjectMissing):
        reader.read(next(stream for stream in manifest.streams() if stream.size))


def test_no_secret_is_readable_in_an_encrypted_store(tmp_path: Path) -> None:
    from criuctl.store.local import LocalStore

    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    secret = b"the canary sings at midnight"
    summary = kit.write(
        repo,
        kit.Content(secret * 20_000, {"canary.img": secret}, secret),
        session="canary-session",
        labels={"canary": "canary-label"},
    )
    repo.list()
    repo.remove(summary)
    kit.write(
        repo,
        kit.Content(secret * 20_000, {"canary.img": secret}, secret),
        session="canary-session",
        labels={"canary": "yes"},
    )
    repo.close()
    files = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    assert len(files) > 5 and any(p.suffix == ".sqlite" for p in files)
    for path in files:
        assert b"canary" not in path.read_bytes().lower() and "canary" not in str(
            path.relative_to(tmp_path)
        )
    (tmp_path / "keys" / f"{repo.id}.key").write_text("criuctl key 1\n" + "A" * 43 + "=\n")
    with pytest.raises(WrongKey):
        Repository.open(store, repo.config)
