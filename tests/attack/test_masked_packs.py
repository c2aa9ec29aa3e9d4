"""What a reader of an encrypted store without its key sees of packs: their sizes, and no chunk."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint import key_slots, keys, objects
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.packs import CLEAR, HEADER, MASKED, RECORD, read_index
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Damaged, UnsupportedFormat, WrongKey
from criuctl.report import Reporter

NOISE = kit.Content(random.Random(42).randbytes(3 * kit.WINDOW), {"a.img": b"i" * 900}, b"f" * 900)


def test_nothing_of_a_chunk_is_in_the_clear(tmp_path: Path) -> None:
    """Neither ids nor sizes nor the number of chunks, of one that is found by its id elsewhere."""
    repo = kit.repository(tmp_path, encrypted=True, workers=1)
    kit.write(repo, NOISE)
    for info in repo.store.list("packs/"):
        data = repo.store.get(info.name)
        assert HEADER.unpack_from(data)[1] == MASKED
        index = read_index(repo.store, info.name, info.size, repo.sealer)
        assert len(index) >= 3
        end = index.size
        for chunk, offset, stored, plain in index:
            header = data[offset : offset + RECORD.size]
            assert chunk not in data and chunk[:8] not in data
            assert (
                struct.pack("<I", plain) not in header and struct.pack("<I", stored) not in header
            )
            end = offset + RECORD.size + stored
        footer = data[-24:]
        assert (
            struct.pack("<Q", end) not in footer and struct.pack("<II", len(index), 0) not in footer
        )


def test_a_plain_store_stays_readable_by_older_versions(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, workers=1)
    kit.write(repo, uid=1000)
    (pack,) = repo.store.list("packs/")
    assert HEADER.unpack_from(repo.store.get(pack.name))[1] == CLEAR


def test_an_older_version_refuses_the_index_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    kit.write(repo)
    monkeypatch.setattr(objects, "INDEX", replace(objects.INDEX, features=frozenset()))
    (segment,) = repo.store.list("index/")
    with pytest.raises(UnsupportedFormat, match=objects.MASKED):
        repo.index.read_segment(segment.name)


def test_users_do_not_find_out_what_others_have_stored(tmp_path: Path) -> None:
    """A guess of another user's memory takes as much space as anything new; one's own takes none.

    What was stored for a user is read, copied by a collection and found again as before.
    """
    repo = kit.repository(tmp_path, encrypted=True, workers=1)

    def stored(uid: int, session: str) -> int:
        before = set(repo.index.pack_sizes())
        kit.write(repo, NOISE, session=session, uid=uid)
        return sum(size for name, size in repo.index.pack_sizes().items() if name not in before)

    first = stored(1000, "alice")
    assert first > len(NOISE.memory)
    assert abs(stored(1001, "mallory") - first) < 2048
    assert abs(stored(0, "root") - first) < 2048
    assert stored(1000, "alice-2") == 0 == stored(1001, "mallory-2")
    assert Collection(repo, Reporter(), grace=0).run().lost == 0
    with Repository.open(repo.store, repo.config) as again:
        for summary in again.list():
            kit.check(again, summary, NOISE)


def test_another_user_s_id_is_no_id_of_the_content(tmp_path: Path) -> None:
    sealer = kit.repository(tmp_path, encrypted=True).sealer
    ids = {sealer.chunk_id(b"x" * 99, sealer.user_of(uid)) for uid in (0, 1, 1000, 1 << 31)}
    assert len(ids) == 4 and all(sealer.matches(b"x" * 99, chunk) for chunk in ids)
    for chunk in ids:
        assert not sealer.matches(b"y" * 99, chunk)
        assert not sealer.matches(b"x" * 99, chunk[:-1] + bytes([chunk[-1] ^ 1]))


# -- slots


def slot_of(**changes: object) -> tuple[dict[str, object], bytes]:
    master = bytes(range(32))
    return {**key_slots.passphrase_slot(master, b"words", "ab" * 16), **changes}, master


def test_a_new_slot_costs_scrypt_2_17_and_commits_to_its_key() -> None:
    slot, master = slot_of()
    assert slot["n"] == 1 << 17 and slot["r"] == 8
    assert key_slots.opened_by_passphrase([slot], "ab" * 16, b"words") == master
    other = {**slot, "commitment": "00" * 32}
    assert key_slots.opened_by_passphrase([other], "ab" * 16, b"words") is None
    without = {key: value for key, value in slot.items() if key != "commitment"}
    assert key_slots.opened_by_passphrase([without], "ab" * 16, b"words") == master  # an old one


@pytest.mark.parametrize("changes", [{"n": 1 << 10}, {"r": 1}, {"n": 1 << 22}, {"p": 17}])
def test_parameters_that_criuctl_never_chose_are_refused(changes: dict[str, object]) -> None:
    slot, _master = slot_of(**changes)
    with pytest.raises(Damaged, match="passphrase slot"):
        key_slots.opened_by_passphrase([slot], "ab" * 16, b"words")


def test_one_bound_holds_for_all_slots_of_all_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot, _master = slot_of(n=1 << 19, p=4)
    stretched: list[int] = []

    def scrypt(_phrase: bytes, *, n: int, **_others: object) -> bytes:
        stretched.append(n)
        return bytes(32)

    monkeypatch.setattr("hashlib.scrypt", scrypt)
    with key_slots.bounded():
        with pytest.raises(WrongKey):
            keys.open_by_passphrase([slot] * 3, "ab" * 16, b"other", "a test")
        with pytest.raises(Damaged, match="too much time"):
            keys.open_by_passphrase([slot] * 3, "ab" * 16, b"other", "a newer generation")
    assert len(stretched) == 4 and sum(stretched) * 8 * 4 == key_slots._WORK_LIMIT
