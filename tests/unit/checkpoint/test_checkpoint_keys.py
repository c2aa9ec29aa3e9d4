"""Who may open a store: each way of giving the key, each way of getting it wrong, and what is never
shown.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import key_files, keys
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import (
    Conflict,
    CriuctlError,
    Damaged,
    KeyMissing,
    NoSuchBucket,
    StoreDenied,
    StoreNotInitialised,
    StoreUnreachable,
    UnsupportedFormat,
    WrongKey,
)
from criuctl.report import Reporter
from criuctl.store.base import Capabilities
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore


def test_the_key_file_is_private_and_durable_before_the_store(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    path = tmp_path / "keys" / f"{repo.id}.key"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    info = repo.key_info()
    assert (info["kind"], info["file"]) == ("file", str(path)) and len(info["fingerprint"]) == 16
    secret = path.read_text().splitlines()[1]
    config = repo.store.get("config").decode()
    assert (
        secret not in json.dumps(info) + config
        and key_files.KeyText.parse(path.read_bytes(), "").key.hex() not in config
    )


def test_a_store_whose_making_fails_leaves_no_key(tmp_path: Path) -> None:
    with pytest.raises(StoreDenied):
        kit.repository(tmp_path, encrypted=True, store=FaultyStore(MemoryStore(), put="D"))
    assert not list((tmp_path / "keys").glob("*"))
    # A lost answer that the store itself resolves is none, and a key that may be needed is kept.
    store = FaultyStore(MemoryStore(), put="A")
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    assert Repository.open(store, repo.config).id == repo.id


def test_an_existing_store_is_never_changed(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    before = repo.store.get("config")
    for encrypted in (True, False):
        with pytest.raises(Conflict):
            kit.repository(tmp_path, encrypted=encrypted, store=repo.store)
    assert repo.store.get("config") == before and len(list((tmp_path / "keys").iterdir())) == 1


@pytest.mark.parametrize("way", ["file", "command", "variable"])
def test_a_passphrase_opens_the_store(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.config(tmp_path)
    store = MemoryStore()
    Repository.init(store, encryption=True, passphrase=b"correct horse", config=config)
    assert not (tmp_path / "keys").exists()
    file = tmp_path / "phrase"
    for phrase, error in (("correct horse\n", None), ("wrong\n", WrongKey)):
        file.write_text(phrase)
        file.chmod(0o600)
        if way == "file":
            given = replace(config, passphrase_file=str(file))
        elif way == "command":
            given = replace(config, passphrase_command=f"cat '{file}'")
        else:
            given = config
            monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, phrase.strip())
        if error is None:
            repo = Repository.open(store, given)
            assert repo.key_info()["kind"] == "passphrase"
            kit.check(repo, kit.write(repo))
        else:
            with pytest.raises(error):
                Repository.open(store, given)
    monkeypatch.delenv(keys.PASSPHRASE_VARIABLE, raising=False)
    with pytest.raises(KeyMissing, match="was not found"):
        Repository.open(store, config)
    with pytest.raises(WrongKey, match="empty"):
        Repository.init(MemoryStore(), encryption=True, passphrase=b"", config=config)


@pytest.mark.parametrize("command", ["false", "cat '", "echo"])
def test_a_command_that_prints_no_passphrase_is_named(tmp_path: Path, command: str) -> None:
    store = MemoryStore()
    Repository.init(
        store, encryption=True, passphrase=b"correct horse", config=kit.config(tmp_path)
    )
    with pytest.raises((KeyMissing, WrongKey), match="passphrase_command"):
        Repository.open(store, replace(kit.config(tmp_path), passphrase_command=command))


@pytest.mark.parametrize("field", ["key_file", "passphrase_file"])
def test_a_folder_is_no_key(tmp_path: Path, field: str) -> None:
    store = MemoryStore()
    Repository.init(
        store, encryption=True, passphrase=b"correct horse", config=kit.config(tmp_path)
    )
    given: dict[str, Any] = {field: str(tmp_path)}
    with pytest.raises(KeyMissing, match="is no regular file"):
        Repository.open(store, replace(kit.config(tmp_path), **given))


def test_a_key_file_can_be_named_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "my.key"
    config = kit.config(tmp_path)
    stores = [MemoryStore(), MemoryStore()]
    for store in stores:
        Repository.init(store, encryption=True, key_file=path, config=config)
    for store in stores:
        assert Repository.open(store, replace(config, key_file=str(path))).encrypted
        with pytest.raises(KeyMissing, match="was not found"):
            Repository.open(store, config)


def test_an_exported_key_opens_the_store_and_no_other(tmp_path: Path) -> None:
    config = kit.config(tmp_path)
    store, other = MemoryStore(), MemoryStore()
    by_phrase = Repository.init(store, encryption=True, passphrase=b"p", config=config)
    kit.write(by_phrase)
    kit.repository(tmp_path, encrypted=True, store=other)
    exported = tmp_path / "copy.key"
    by_phrase.export_key(exported)
    assert exported.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict):
        by_phrase.export_key(exported)
    given = replace(config, key_file=str(exported))
    kit.check(Repository.open(store, given), "web")
    with pytest.raises(WrongKey):
        Repository.open(other, given)
    with pytest.raises(Conflict, match="no key"):
        kit.repository(tmp_path).export_key(tmp_path / "none.key")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", WrongKey),
        ("hello", WrongKey),
        ("criuctl key 1\n", WrongKey),
        ("criuctl key 1\nAAAA\n", WrongKey),
        ("criuctl key 1\n!!!\n", WrongKey),
        ("criuctl key 1\n" + "A" * 43 + "=\nmore\n", WrongKey),
        ("criuctl key 1\n" + "A" * 43 + "=\n", WrongKey),
        ("criuctl master key 1\n" + "A" * 43 + "=\n", WrongKey),
        ("criuctl key 2\nxyz\n", UnsupportedFormat),
    ],
)
def test_a_key_file_that_does_not_fit_is_reported(
    tmp_path: Path, text: str, error: type[CriuctlError]
) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    (tmp_path / "keys" / f"{repo.id}.key").write_text(text)
    with pytest.raises(error):
        Repository.open(repo.store, repo.config)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    path = tmp_path / "keys" / f"{repo.id}.key"
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(KeyMissing, match="others"):
            Repository.open(repo.store, repo.config)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(KeyMissing, match="no regular file"):
        Repository.open(repo.store, repo.config)


def test_the_five_errors_are_five(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    key = tmp_path / "keys" / f"{repo.id}.key"
    other = kit.repository(tmp_path / "other", encrypted=True)
    key_text, other_text = (
        key.read_bytes(),
        (tmp_path / "other" / "keys" / f"{other.id}.key").read_bytes(),
    )
    key.write_bytes(other_text)
    with pytest.raises(WrongKey, match="fingerprint"):
        Repository.open(repo.store, repo.config)
    key.unlink()
    with pytest.raises(KeyMissing):
        Repository.open(repo.store, repo.config)
    key_files.write_secret(key, key_text.decode())
    with pytest.raises(StoreDenied):
        Repository.open(FaultyStore(repo.store, check_writable="D"), repo.config).preflight_write()
    with pytest.raises(NoSuchBucket):
        Repository.open(LocalStore(str(tmp_path / "absent")), repo.config)
    with pytest.raises(StoreUnreachable):
        Repository.open(FaultyStore(repo.store, get="E"), repo.config)
    with pytest.raises(StoreNotInitialised):
        Repository.open(MemoryStore(), repo.config)


def test_a_local_store_is_made_only_where_nothing_is(tmp_path: Path) -> None:
    config = kit.config(tmp_path)
    for name in ("absent", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        store = LocalStore(str(tmp_path / name))
        repo = Repository.open(store, config, create_local=True)
        assert repo.encrypted and repo.about.made
        again = Repository.open(store, config)
        assert again.id == repo.id and not again.about.made
        assert keys.key_path(config, repo.id).stat().st_mode & 0o777 == 0o600
    full = tmp_path / "full"
    full.mkdir()
    (full / "Precious Letter.txt").write_text("dear")
    with pytest.raises(StoreNotInitialised):
        Repository.open(LocalStore(str(full)), config, create_local=True)
    assert [p.name for p in full.iterdir()] == ["Precious Letter.txt"]
    with pytest.raises(StoreNotInitialised):
        Repository.open(MemoryStore(), config, create_local=True)


def test_many_may_make_a_local_store_at_once(tmp_path: Path) -> None:
    """One of them makes it, and its key alone is left; all can open it."""
    named = tmp_path / "named.key"
    for key_file in ("", str(named)):
        config = kit.config(tmp_path / f"{bool(key_file)}", key_file=key_file)
        found = side_by_side(8, LocalStore(str(tmp_path / f"store{bool(key_file)}")), config)
        assert len({repo.id for repo in found}) == 1
        assert [repo.about.made for repo in found].count(True) == 1
        assert all(repo.encrypted for repo in found)
        made = [named] if key_file else [keys.key_path(config, found[0].id)]
        folder = Path(config.key_dir)
        assert [*folder.glob("*")] == ([] if key_file else made)
        assert key_files.KeyText.parse(made[0].read_bytes(), "it").slot == "file"


def side_by_side(count: int, store: LocalStore, config: Config) -> list[Repository]:
    """What so many threads get who open the store at the same moment, and may make it."""
    found: list[Repository] = []
    start = threading.Barrier(count)

    def open_it() -> None:
        start.wait()
        found.append(Repository.open(store, config, create_local=True))

    threads = [threading.Thread(target=open_it) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count
    return found


def test_the_loser_of_a_race_leaves_the_key_of_the_winner(tmp_path: Path) -> None:
    """Both find no key file where the configuration names one; the slower one finds the store made
    when it has read the key of the faster one.
    """
    config = kit.config(tmp_path, key_file=str(tmp_path / "named.key"))
    store = LocalStore(str(tmp_path / "store"))
    won: list[Repository] = []

    class Late(LocalStore):
        def probe(self) -> Capabilities:
            won.append(Repository.open(store, config, create_local=True))
            return super().probe()

    with pytest.raises(Conflict):
        Repository.init(Late(store.url), encryption=True, config=config)
    second = Repository.open(Late(store.url), config, create_local=True)
    assert second.id == won[0].id and (tmp_path / "named.key").exists()


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_store_without_a_place_for_its_key_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr("criuctl.checkpoint.key_files.os.geteuid", lambda: uid)
    (tmp_path / "keys").write_text("")  # no folder
    store = LocalStore(str(tmp_path / "store"))
    config = kit.config(tmp_path)
    makers: list[Callable[[], Repository]] = [
        lambda: Repository.open(store, config, create_local=True),
        lambda: Repository.init(store, encryption=True, config=config),
    ]
    for make in makers:
        with pytest.raises(KeyMissing, match="cannot be written") as error:
            make()
        assert "key_dir" in error.value.hint and "--no-encrypt" in error.value.hint
        assert ("as root" in error.value.hint) is (uid != 0)
    assert not (tmp_path / "store" / "config").exists()
    plain = kit.config(tmp_path, plain_store=True)
    assert not Repository.open(store, plain, create_local=True).encrypted


def test_no_encrypt_does_not_pass_over_an_encrypted_store(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    Repository.init(store, encryption=True, config=kit.config(tmp_path))
    with pytest.raises(Conflict, match="is encrypted") as error:
        Repository.open_or_make(store, kit.config(tmp_path, plain_store=True), Reporter())
    assert "store init --no-encrypt" in error.value.hint


def test_a_store_cannot_be_made_plain_behind_our_back(tmp_path: Path) -> None:
    """An attacker who can write to the store replaces its config by one that says: not
    encrypted.
    """
    repo = kit.repository(tmp_path, encrypted=True)
    fake = json.loads(kit.repository(tmp_path / "x").store.get("config"))
    fake["id"] = repo.id
    repo.store.put("config", json.dumps(fake).encode())
    with pytest.raises(Conflict, match="not encrypted"):
        Repository.open(repo.store, repo.config)


def test_a_changed_config_is_detected(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    body = json.loads(repo.store.get("config"))
    body["capabilities"]["conditional_create"] = False
    repo.store.put("config", json.dumps(body).encode())
    with pytest.raises(Damaged, match="checksum"):
        Repository.open(repo.store, repo.config)


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("mac", ["\ud800", "\xe9", "", 7, None])
def test_a_checksum_that_is_none_is_damage(tmp_path: Path, encrypted: bool, mac: object) -> None:
    repo = kit.repository(tmp_path, encrypted=encrypted)
    body = json.loads(repo.store.get("config"))
    repo.store.put("config", json.dumps({**body, "mac": mac}).encode())
    with pytest.raises(Damaged, match="checksum"):
        Repository.open(repo.store, repo.config)


def test_a_slot_cannot_ask_for_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, store = kit.config(tmp_path), MemoryStore()
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "p")
    Repository.init(store, encryption=True, passphrase=b"p", config=config)
    body = json.loads(store.get("config"))
    for change in (
        {"n": 1 << 40},
        {"n": float("inf")},
        {"n": float("nan")},
        {"r": 1 << 30},
        {"p": 1 << 20},
        {"n": -1},
        {"n": 3},
        {"salt": 7},
        {"kdf": "none"},
    ):
        wrong = {**body, "slots": [{**body["slots"][0], **change}]}
        store.put("config", json.dumps(wrong).encode())
        with pytest.raises(Damaged):
            Repository.open(store, config)


def test_preflight_reads_and_writes(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, store=LocalStore(str(tmp_path / "store")))
    before = {info.name for info in repo.store.list()}
    repo.preflight_write()
    assert {info.name for info in repo.store.list()} == before
    with repo.writer(Reporter()) as writer:
        assert writer.stats.chunks == 0


def test_an_unreadable_secret_is_reported() -> None:
    with pytest.raises(KeyMissing, match="cannot be read: Input/output error"):
        key_files.read_secret(Path("/proc/self/mem"))  # whose first page is not mapped
