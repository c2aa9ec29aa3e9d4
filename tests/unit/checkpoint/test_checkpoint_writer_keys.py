"""Write-only hosts: they add to a store and read their own checkpoints; a host with the store's key
reads everything.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.writeonly import enrol, host

from criuctl.checkpoint import (
    codec,
    configobject,
    gclists,
    key_files,
    leases,
    objects,
    packs,
    writer_keys,
)
from criuctl.checkpoint.codec import SealBroken, Sealer, derive
from criuctl.checkpoint.domains import StoreSealer, WriterSealer
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.gc_result import Collected
from criuctl.checkpoint.index import encode_segments
from criuctl.checkpoint.packs import PackBuilder, pack_of
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.errors import (
    Conflict,
    Damaged,
    DataError,
    Foreign,
    KeyMissing,
    UnsupportedFormat,
    WrongKey,
)
from criuctl.report import Reporter
from criuctl.store.memory import MemoryStore

SESSION = "ab" * 16


def content(*seeds: int) -> kit.Content:
    """A checkpoint whose memory is made of these pieces."""
    memory = b"".join(random.Random(seed).randbytes(2 * kit.WINDOW) for seed in seeds)
    return kit.Content(memory, {"a.img": b"image %d" % seeds[0]}, b"file %d" % seeds[0])


class Place:
    """A store with the key's owner and two write-only hosts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = MemoryStore()
        # opened before there was a writer
        self.early = kit.repository(path, encrypted=True, store=self.store, workers=1)
        for name in ("one", "two"):
            enrol(self.early, path / name, name)
        self.one, self.two = host(self.store, path / "one"), host(self.store, path / "two")

    @property
    def master(self) -> Repository:
        """A host with the store's key, that begins now."""
        return host(self.store, self.path)

    def packs(self) -> set[bytes]:
        return {
            pack for info in self.store.list("packs/") if (pack := pack_of(info.name)) is not None
        }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def collect(repo: Repository) -> Collected:
    return Collection(repo, Reporter(), grace=0).run()


def test_the_keys_owner_reads_everything_and_a_writer_its_own(place: Place) -> None:
    everything = content(1, 2)
    ours = kit.write(place.master, everything, session="db")
    mine = kit.write(place.one, everything)
    theirs = kit.write(place.two, everything)
    before = place.packs()
    again = kit.write(host(place.store, place.path / "one"), everything)
    # it knows what it has stored, and the numbers of all
    assert place.packs() == before and again.number == 3
    assert len({pack for pack in before if place.one.sealer.owns(pack)}) == 1
    for reader in (place.master, place.early):
        assert [(s.session, s.number) for s in reader.list()] == [
            ("db", 1),
            ("web", 1),
            ("web", 2),
            ("web", 3),
        ]
        for summary in (ours, mine, theirs, again):
            kit.check(reader, summary, everything)
    owner = place.master
    said = {s.id: owner.stored_by(s.id) for s in owner.list()}
    assert said[ours.id] is None and [
        status["label"] for s in (mine, theirs, again) if (status := said[s.id])
    ] == [
        "one",
        "two",
        "one",
    ]
    unreadable: list[DataError] = []
    hidden: list[DataError] = []
    one = host(place.store, place.path / "one")
    assert one.list(unreadable=unreadable, hidden=hidden) == [mine, again] and not unreadable
    assert {error.details["object"] for error in hidden} == {ours.object, theirs.object}
    kit.check(one, mine, everything)
    assert one.index.unreadable == []
    for ref in (ours.id[:8], theirs.id, "db", "web@2"):
        with pytest.raises(Foreign, match="no key for it"):
            one.resolve(ref)
    with pytest.raises(Foreign):  # the newest is another host's: never silently an older one
        place.two.resolve("web")
    with pytest.raises(Foreign):
        one.manifest_at(ours.object)
    with pytest.raises(Damaged):  # its manifest in hand, the chunks would still be nowhere
        one.verify(place.master.manifest(ours), Reporter())


def test_what_a_writer_keeps_opens_nothing_of_others(place: Place) -> None:
    ours, mine, theirs = (
        kit.write(repo, content(n)) for n, repo in enumerate((place.master, place.one, place.two))
    )
    file = next((place.path / "one" / "keys").glob("*.key"))
    key = writer_keys.WriterKey.parse(file.read_bytes(), "key")
    sealer = place.one.sealer
    assert isinstance(sealer, WriterSealer)
    (kept,) = (place.path / "one" / "keys").glob("*.domain")
    assert kept.stat().st_mode & 0o777 == 0o600
    secrets = [key.store * 2, key.public, key.id * 2, key.secret, key.names, key.lists]
    secrets += [
        derive(secret, context) for secret in list(secrets) for context in writer_keys.CONTEXTS
    ]
    for secret in secrets:
        for candidate in (
            Sealer(secret, encrypted=True),
            Sealer(secret, encrypted=True, domain=sealer.domain),
        ):
            for summary in (ours, theirs, mine):
                data = place.store.get(summary.object)
                outline = objects.layout(objects.MANIFEST, summary.object, data, len(data))
                prefix = b"\0".join((b"h", summary.object.encode(), outline.prefix))
                with pytest.raises(SealBroken):
                    candidate.open(data[outline.head], prefix)
            for info in place.store.list("packs/"):
                with pytest.raises(Damaged):
                    packs.read_index(place.store, info.name, info.size, candidate)
    for name in (info.name for info in place.store.list("writers/")):
        with pytest.raises(Damaged):
            writer_keys.unwrap(key.secret, place.one.id, name, place.store.get(name))


def test_without_its_domain_file_a_writer_begins_a_new_domain(place: Place) -> None:
    mine = kit.write(place.one)
    (kept,) = (place.path / "one" / "keys").glob("*.domain")
    copy = kept.read_bytes()
    kept.unlink()
    lost = host(place.store, place.path / "one")
    with pytest.raises(Foreign):
        lost.resolve("web")
    fresh = kit.write(lost, content(5))
    assert [s.number for s in place.master.list()] == [1, 2] and len(
        list(place.store.list("writers/"))
    ) == 2
    kit.check(place.master, fresh, content(5))
    kept.write_bytes(copy)
    kit.check(host(place.store, place.path / "one"), mine)
    kept.write_bytes(copy[:50])
    with pytest.raises(KeyMissing, match="damaged"):
        host(place.store, place.path / "one")


def test_processes_that_make_the_domain_at_once_agree(place: Place) -> None:
    hosts = [host(place.store, place.path / "one") for _ in range(8)]
    threads = [threading.Thread(target=one.sealer.prepare) for one in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        len({one.sealer.domain for one in hosts}) == 1
        and len(list(place.store.list("writers/"))) == 1
    )
    assert sorted(path.suffix for path in (place.path / "one" / "keys").iterdir()) == [
        ".domain",
        ".key",
    ]


def test_what_opens_a_domain_is_checked_and_put_again(place: Place) -> None:
    mine = kit.write(place.one)
    (info,) = place.store.list("writers/")
    data = place.store.get(info.name)
    for position in range(0, len(data), 5):
        place.store.put(
            info.name, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        )
        with pytest.raises((Damaged, UnsupportedFormat)) as caught:
            place.master.manifest_at(mine.object)
        assert caught.value.details["object"] == info.name
    place.store.put(info.name, data[:-1])
    with pytest.raises(Damaged):
        place.master.manifest_at(mine.object)
    place.store.delete(info.name)
    with pytest.raises(Damaged, match="is missing"):
        place.master.manifest_at(mine.object)
    kit.write(host(place.store, place.path / "one"), session="db")
    assert place.store.get(info.name) == data
    kit.check(place.master, mine)


def test_a_domain_of_a_host_that_is_not_enrolled_is_refused(place: Place) -> None:
    """An attacker with the public key and write access to the bucket lacks the writer's secret."""
    key = writer_keys.WriterKey.parse(
        next((place.path / "one" / "keys").glob("*.key")).read_bytes(), "key"
    )
    forged = writer_keys.WriterKey(key.store, key.public, key.id, bytes(32), key.names, key.lists)
    key_files.write_secret(place.path / "evil" / "keys" / f"{place.one.id}.key", forged.text())
    evil = host(place.store, place.path / "evil")
    bad = kit.write(evil)
    assert kit.write(place.one, session="db").number == 1
    with pytest.raises(Damaged, match="no host that was enrolled"):
        place.master.manifest_at(bad.object)
    unreadable: list[DataError] = []
    assert [s.session for s in place.master.list(unreadable=unreadable)] == ["db"] and len(
        unreadable
    ) == 1
    with pytest.raises(Damaged):  # it is unknown what it needs
        collect(place.master)


def test_a_writer_cannot_tell_of_what_it_has_not_made(place: Place) -> None:
    """Neither of others' packs, nor that others' chunks are in its own: their ids stand in packs
    for all to see.
    """
    ours = kit.write(place.master, content(1))
    mine = kit.write(place.one, content(2))
    indexes = {
        p.pack: p
        for s in place.store.list("index/")
        for p in place.master.index.read_segment(s.name)
    }
    (theirs,) = (index for pack, index in indexes.items() if not place.one.sealer.owns(pack))
    builder = PackBuilder(place.one.sealer, memoryview(bytearray(1 << 20)))
    for chunk, *_places in theirs:
        builder.add(chunk, 5, codec.RAW, b"false")
    lie, data = builder.finish()
    place.store.put(packs.object_name(lie.pack), data)
    for index in (theirs, lie):
        (body,) = encode_segments([index])
        name = "index/" + index.pack.hex()
        place.store.put(name, objects.encode(objects.INDEX, name, b"", body, place.one.sealer))
        with pytest.raises(Damaged, match="its writer has not made"):
            place.master.index.read_segment(name)
    with pytest.raises(Damaged, match="its writer has not made"):
        packs.read_index(place.store, packs.object_name(lie.pack), lie.size, place.master.sealer)
    owner = place.master
    again = kit.write(owner, content(1))
    assert {pack for pack in owner.index.pack_sizes() if pack == lie.pack} == set()
    assert collect(place.master).lost == 0
    for summary, wanted in ((ours, content(1)), (again, content(1)), (mine, content(2))):
        assert (
            place.master.reader(Reporter()).read(place.master.manifest(summary).memory[0].data)
            == wanted.memory
        )


@pytest.mark.parametrize("early", [False, True])
def test_gc_keeps_what_all_need_and_mixes_no_domains(place: Place, early: bool) -> None:
    collector: Callable[[], Repository] = (lambda: place.early) if early else (lambda: place.master)
    kept = [
        (kit.write(repo, content(n, 9), session=f"s{n}"), content(n, 9))
        for n, repo in enumerate((place.master, place.one, place.two))
    ]
    gone = [
        (repo, kit.write(repo, content(n + 20, n), session="x"))
        for n, repo in enumerate((place.master, place.one, place.two))
    ]
    for repo, summary in gone:
        repo.remove(summary)
    done = collect(collector())
    assert (done.lost, done.deleted, done.unneeded) == (0, 3, 3)
    # Only parts are needed now, so they are copied: each into a pack of its own domain.
    for repo in (place.master, place.one, place.two):
        kit.write(repo, content(40, 41, 42, 43), session="y")
        part = kit.write(repo, content(40), session="z")
        kept.append((part, content(40)))
    for summary in place.master.list("y"):
        place.master.remove(summary)
    done = collect(collector())
    assert done.repacked == 3 and done.deleted == 3 and done.lost == 0
    for summary, wanted in kept:
        kit.check(place.master, summary, wanted)
    for path in ("one", "two"):
        writer = host(place.store, place.path / path)
        mine = [(s, wanted) for s, wanted in kept if s in writer.list()]
        assert len(mine) == 2
        for summary, wanted in mine:
            kit.check(writer, summary, wanted)
        # it gets the list of all its packs
        assert sum(map(writer.sealer.owns, place.packs())) == len(writer.index.pack_sizes()) > 0
    assert collect(place.master).deleted == 0
    with pytest.raises(Conflict, match="write-only"):
        place.one.need_key("collect garbage")


def test_lists_are_read_by_all_hosts_and_an_older_doom_by_none(place: Place) -> None:
    kit.write(place.one, content(1))
    pack = next(iter(place.packs()))
    name = gclists.put(place.store, place.master.sealer, gclists.DOOMED, [pack])
    for reader in (place.one, place.two, place.master, place.early):
        (entry,) = gclists.found(place.store, reader.sealer, "gc/")
        assert entry.packs == {pack} and entry.shared
    with (
        pytest.raises(Conflict, match="which this checkpoint relies on"),
        place.one.writer(Reporter()) as writer,
    ):
        writer.commit(kit.fill(writer, content(1)))
    place.store.delete(name)
    # A collection that knew of no writers: only hosts with the key can read what it names.
    old = StoreSealer(place.early.opened.master, place.store, place.early.id, writers=False)  # type: ignore[union-attr]
    marked = gclists.put(place.store, old, gclists.MARKED, [pack])
    kit.write(place.one, content(1))
    place.store.delete(marked)
    gclists.put(place.store, old, gclists.DOOMED, [b"0" * 16])
    before = len(place.master.list())
    with pytest.raises(Conflict, match="cannot see which"), place.one.writer(Reporter()) as writer:
        writer.commit(kit.fill(writer, content(2)))
    assert len(place.master.list()) == before and not list(place.store.list("writing/"))
    assert collect(place.master).refused == 0 and not list(place.store.list("gc/"))
    kit.check(place.master, kit.write(place.one, content(3)), content(3))
    # A doomed pack that stays, as of an intent, stays doomed, and from then on for all.
    mine = place.packs()
    gclists.put(place.store, old, gclists.DOOMED, mine)
    gclists.put(place.store, place.one.sealer, gclists.WRITING, mine)
    assert collect(place.master).spared == len(mine)
    (entry,) = gclists.found(place.store, place.two.sealer, gclists.DOOMED)
    assert entry.packs == mine


def test_a_collection_sees_the_intent_of_a_writer_and_spares_its_packs(place: Place) -> None:
    with place.one.writer(Reporter()) as writer:
        manifest = kit.fill(writer, content(1))
        writer.flush()
        mine = place.packs()
        intent = gclists.Intent(place.store, place.one.sealer, mine)
        intent.begin()
        assert collect(place.master).deleted == 0 and mine <= place.packs()
        intent.end()
        summary = writer.commit(manifest)
    assert collect(place.master).deleted == 0
    kit.check(place.master, summary, content(1))


def test_a_lease_that_a_writer_cannot_read_is_anothers(place: Place) -> None:
    def claim(repo: Repository, host: str, *, take_over: bool = False) -> leases.Claim:
        return leases.claim(
            repo, "web", SESSION, 1, host=host * 32, host_name=f"host-{host}", take_over=take_over
        )

    claim(place.one, "a").keep()
    held = leases.read_head(place.master, "web")
    assert held is not None and held.host_name == "host-a"
    with pytest.raises(Conflict, match="held by host host-a"):
        claim(place.master, "b")
    with pytest.raises(Conflict, match="cannot see which"):
        claim(place.two, "c", take_over=True)
    ours = leases.renew(place.one, held.session, host="a" * 32, ttl=0)
    assert ours is not None and ours.beat == 1
    taken = claim(place.master, "b", take_over=True)
    assert taken.head.epoch == 2
    for attempt in (
        lambda: claim(place.one, "a"),
        lambda: leases.read_head(place.one, "web"),
        lambda: leases.release(place.one, "web", host="a" * 32),
        lambda: leases.renew(place.one, held.session, host="a" * 32, ttl=0),
    ):
        with pytest.raises(Conflict, match="cannot see which"):
            attempt()
    mine = leases.Claim(place.one, held, leased=True)
    with pytest.raises(Conflict):
        mine.check()
    mine.release_unless_kept()  # it is another's, and stays so
    assert leases.read_head(place.master, "web") == taken.head


def test_a_writer_that_was_removed_writes_no_more(place: Place) -> None:
    mine = kit.write(place.one)
    place.early.key_changer().change(
        lambda slots: [slot for slot in slots if slot.get("label") != "one"]
    )
    with pytest.raises(WrongKey, match="was removed"):
        host(place.store, place.path / "one")
    kit.check(place.master, mine)
    kit.write(place.two)
    place.early.key_changer().change(
        lambda slots: [slot for slot in slots if slot.get("type") != "writer"]
    )
    fresh = host(place.store, place.path)
    assert fresh.sealer.for_lists()[1]  # there were writers: what they wrote is still there
    kit.check(fresh, fresh.resolve("web@1"))
    # The slot in an older text, which a store may keep, does not count.
    config = json.loads(place.store.get("config"))
    key = writer_keys.WriterKey.parse(
        next((place.path / "one" / "keys").glob("*.key")).read_bytes(), "key"
    )
    old = {**config, "generation": config["generation"] - 1, "slots": [key.slot()]}
    place.store.put(f"keys/{config['generation']:020d}", place.store.get("config"))
    place.store.put("config", json.dumps(old).encode())
    with pytest.raises(WrongKey, match="was removed"):
        host(place.store, place.path / "one")


def test_what_a_writer_is_refused_and_what_its_key_is_not(place: Place) -> None:
    file = next((place.path / "one" / "keys").glob("*.key"))
    for refused in (
        place.one.key_changer,
        place.one.key_text,
        lambda: place.one.export_key(place.path / "x"),
    ):
        with pytest.raises(Conflict, match="write-only"):
            refused()
    assert (
        place.one.key_info()["kind"] == "writer"
        and place.one.write_only
        and not place.master.write_only
    )
    with pytest.raises(WrongKey, match="write-only host"):
        key_files.KeyText.parse(file.read_bytes(), "it")
    text = file.read_text()
    for wrong in (text[:60], text.replace("key 1", "key 1 "), text + "x"):
        file.write_text(wrong)
        with pytest.raises((WrongKey, UnsupportedFormat)):
            host(place.store, place.path / "one")
    file.write_text(text.replace("key 1", "key 2"))
    with pytest.raises(UnsupportedFormat, match="newer"):
        host(place.store, place.path / "one")
    other = kit.repository(place.path / "other", encrypted=True, store=MemoryStore())
    shutil.copyfile(enrol(other, place.path / "else"), file)
    with pytest.raises(WrongKey, match="another store"):
        host(place.store, place.path / "one")


def test_older_criuctls_refuse_what_a_writer_has_stored_by_name(place: Place) -> None:
    """What such a one would say: the features that it does not know."""
    mine = kit.write(place.one)
    for info in place.store.list():
        kind = {"checkpoints": objects.MANIFEST, "index": objects.INDEX}.get(
            info.name.partition("/")[0]
        )
        if kind is not None:
            old = objects.Kind(
                kind.word, kind.magic, kind.version, kind.max_body, kind.features, domains=False
            )
            data = place.store.get(info.name)
            with pytest.raises(UnsupportedFormat, match=f"writer:{place.one.sealer.domain.hex()}"):
                objects.layout(old, info.name, data, len(data))
    name = gclists.put(place.store, place.one.sealer, gclists.WRITING, [])
    data = place.store.get(name)
    old = objects.Kind("list of packs", gclists.KIND.magic, 1, 1 << 20)
    with pytest.raises(UnsupportedFormat, match="lists"):
        objects.layout(old, name, data, len(data))
    assert isinstance(mine, CheckpointSummary)


def test_a_plain_store_has_no_domains(tmp_path: Path, place: Place) -> None:
    mine = kit.write(place.one)
    plain = kit.repository(tmp_path / "plain", store=MemoryStore())
    plain.store.put(mine.object, place.store.get(mine.object))
    with pytest.raises(Damaged, match="write-only"):
        plain.manifest_at(mine.object)
    name = "index/" + "cd" * 16
    for words in (("writer:xy",), ("writer:" + "0" * 32, "writer:" + "1" * 32)):
        data = objects.encode(objects.INDEX, name, b"", b"", plain.sealer, words)
        with pytest.raises(Damaged, match="name the host that wrote it"):
            objects.layout(objects.INDEX, name, data, len(data))


def test_a_store_without_writers_is_asked_for_none(tmp_path: Path) -> None:
    class Listening(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        def list(self, prefix: str = "") -> object:  # type: ignore[override]
            self.asked.append(prefix)
            return super().list(prefix)

        def get(self, name: str, limit: int | None = None) -> bytes:
            self.asked.append(name)
            return super().get(name, limit)

    store = Listening()
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    kit.check(host(store, tmp_path), kit.write(repo))
    assert not any(name.startswith("writers") for name in store.asked)
    assert configobject.WRITERS not in json.loads(store.get("config"))
