"""Which store a host expects where: what is compared, when, and what is said; by whose word that
changes.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint import configobject, key_files, key_slots, keys, storepins
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.storepins import Pinning
from criuctl.config import Config
from criuctl.errors import (
    Conflict,
    Damaged,
    StoreChanged,
    StoreNotInitialised,
    StoreNotTrusted,
    WrongKey,
)
from criuctl.store import open_store
from criuctl.store.base import Store
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore


class Bucket(MemoryStore):
    """A store in memory that stands for one in S3: what is tested asks where it lies, and nothing
    else.
    """

    def place(self) -> str:
        return "s3://bucket/prefix at https://s3.example.org"


def pins(config: Config) -> list[dict[str, Any]]:
    """All that this host expects."""
    return [
        json.loads(path.read_text())
        for path in sorted((Path(config.state_dir) / "stores").iterdir())
    ]


def replaced(store: Store, **changes: Any) -> None:
    """Change what the config says, past criuctl."""
    body = json.loads(store.get("config"))
    store.put("config", json.dumps(body | changes).encode())


@pytest.mark.parametrize("encrypted", [False, True])
def test_made_or_met_first_is_pinned_once(tmp_path: Path, encrypted: bool) -> None:
    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=encrypted, store=store)
    (pin,) = pins(repo.config)
    assert (pin["place"], pin["id"], pin["encrypted"], pin["how"]) == (
        store.url,
        repo.id,
        encrypted,
        "init",
    )
    assert bool(pin["key"]) is encrypted and len(pin["since"]) == 24
    (file,) = (tmp_path / "state" / "stores").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    another = replace(repo.config, state_dir=str(tmp_path / "another"))
    first = Repository.open(store, another).about.pin
    assert first is not None and first.how == "first-use" and first.key == pin["key"]
    assert Repository.open(store, another).about.pin == first


def test_no_secret_is_in_a_pin(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True, store=LocalStore(str(tmp_path / "store")))
    assert repo.opened is not None
    (file,) = (tmp_path / "state" / "stores").iterdir()
    assert (
        repo.opened.master.hex() not in file.read_text()
        and repo.opened.key.key.hex() not in file.read_text()
    )


@pytest.mark.parametrize(
    "changes", [{"id": "0" * 32}, {"encryption": "none"}, {"id": "0" * 32, "encryption": "none"}]
)
def test_another_config_is_refused_before_a_key_is_looked_for(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    store = LocalStore(str(tmp_path / "store"))
    asked = tmp_path / "asked"
    config = kit.config(tmp_path, passphrase_command=f"sh -c 'echo >> {asked}; echo secret'")
    Repository.init(store, encryption=True, passphrase=b"secret", config=config)
    Repository.open(store, config)
    asked.unlink()
    replaced(store, **changes)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    with pytest.raises(StoreChanged, match="is not the store that it was") as error:
        Repository.open(store, config)
    assert error.value.exit_code == 9 and store.url in error.value.hint
    assert ("--no-encrypt" in error.value.hint) is (changes.get("encryption") == "none")
    assert not asked.exists()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_a_plain_one_that_became_encrypted_has_changed_too(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, store=store)
    replaced(store, encryption="aes-256-gcm")
    with pytest.raises(StoreChanged):
        Repository.open(store, repo.config)


def test_generations_of_other_stores_are_passed_over(tmp_path: Path) -> None:
    """What anyone can put next to the config: together with it or, when the config is gone,
    alone.
    """
    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    other = kit.repository(
        tmp_path / "other", encrypted=True, store=LocalStore(str(tmp_path / "theirs"))
    )
    body = json.loads(other.store.get("config")) | {"generation": 7}
    store.put(f"keys/{7:020d}", configobject.text(body, other.sealer))
    assert Repository.open(store, repo.config).id == repo.id
    own = json.loads(store.get("config")) | {"generation": 3}
    del own["mac"]
    store.put(f"keys/{3:020d}", configobject.text(own, repo.sealer))
    store.delete("config")
    assert Repository.open(store, repo.config).id == repo.id
    store.delete(f"keys/{3:020d}")
    with pytest.raises(StoreChanged):
        Repository.open(store, repo.config)


def test_a_write_only_host_pins_what_it_sees_and_the_key_follows(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    from criuctl.ops.storing.keyring import Keyring, NewKey

    config = replace(repo.config, store=store.url)
    file = tmp_path / "writer.key"
    with Keyring.of(config) as ring:
        slot, _path, _made = ring.make(NewKey(file=file, write_only=True))
        ring.changer.change(lambda slots: [*slots, slot])
    host = replace(
        config,
        state_dir=str(tmp_path / "writer"),
        key_dir=str(tmp_path / "none"),
        key_file=str(file),
    )
    assert Repository.open(store, host).write_only
    assert [pin["key"] for pin in pins(host)] == [""]
    full = replace(host, key_dir=config.key_dir, key_file="")
    Repository.open(store, full)
    assert [pin["key"] for pin in pins(host)] == [pin["key"] for pin in pins(config)]
    replaced(store, id="0" * 32)
    with pytest.raises(StoreChanged):
        Repository.open(store, host)


def test_another_master_key_under_the_same_id(tmp_path: Path) -> None:
    """Sealed by the very key file of this host, which the attacker may have from another store of
    its.
    """
    store = LocalStore(str(tmp_path / "store"))
    repo = kit.repository(tmp_path, encrypted=True, store=store)
    assert repo.opened is not None
    key, master = repo.opened.key, os.urandom(32)
    from criuctl.checkpoint.codec import Sealer

    body = {k: v for k, v in json.loads(store.get("config")).items() if k != "mac"}
    body["slots"] = [key_slots.file_slot(master, key, repo.id)]
    store.put("config", configobject.text(body, Sealer(master, encrypted=True)))
    with pytest.raises(StoreChanged, match="another master key"):
        Repository.open(store, repo.config)
    body["slots"] = [key_slots.file_slot(master, key_files.KeyText(os.urandom(32)), repo.id)]
    store.put("config", configobject.text(body, Sealer(master, encrypted=True)))
    with pytest.raises(WrongKey):  # which this host has no key for, as before
        Repository.open(store, repo.config)


def test_one_spelling_is_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kit.config(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    urls = [
        "store",
        "./store",
        "sub/../store",
        f"{tmp_path}/store/",
        f"{tmp_path}//store",
        f"file://{tmp_path}/store",
    ]
    assert {open_store(url, config).place() for url in urls} == {str(tmp_path / "store")}
    (tmp_path / "link").symlink_to(tmp_path / "store")  # where it leads may change
    assert open_store("link", config).place() == str(tmp_path / "link")
    s3 = [
        replace(config, s3_endpoint=one)
        for one in ("https://H:443", "https://h/", "https://user:secret@h", "https://h.")
    ]
    assert {
        open_store(url, one).place() for one in s3 for url in ("s3://buck/p", "s3://buck/p/")
    } == {"s3://buck/p at https://h"}
    others = [
        replace(config, s3_endpoint=one)
        for one in ("http://h", "https://h:444", "https://h/path", "https://g", "http://[::1]:9")
    ]
    assert len({open_store("s3://buck/p", one).place() for one in others}) == len(others)
    regions = [
        replace(config, s3_endpoint=f"https://s3.{region}.amazonaws.com")
        for region in ("us-east-1", "eu-west-3")
    ]
    assert {open_store("s3://buck/p", one).place() for one in regions} == {
        "s3://buck/p at https://s3.amazonaws.com"
    }


def test_a_plain_bucket_needs_the_operators_word(tmp_path: Path) -> None:
    config, store = kit.config(tmp_path), Bucket()
    Repository.init(store, encryption=False, config=config)
    assert Repository.open(store, config).about.pin is not None
    another = replace(config, state_dir=str(tmp_path / "another"))
    with pytest.raises(StoreNotTrusted, match="neither made it nor pinned it") as error:
        Repository.open(store, another)
    assert error.value.exit_code == 9 and not (tmp_path / "another").exists()
    sealed = Bucket()
    Repository.init(
        sealed, encryption=True, config=replace(config, state_dir=str(tmp_path / "third"))
    )
    assert Repository.open(sealed, another).encrypted


def test_a_plain_folder_where_a_passphrase_is_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Met for the first time it may have been replaced; made here, it was meant."""
    config, store = kit.config(tmp_path), LocalStore(str(tmp_path / "store"))
    Repository.init(store, encryption=False, config=config)
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "secret")
    assert not Repository.open(store, config).encrypted
    with pytest.raises(StoreNotTrusted, match=keys.PASSPHRASE_VARIABLE):
        Repository.open(store, replace(config, state_dir=str(tmp_path / "another")))


def test_first_uses_at_once_have_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees another store there, as while it is being replaced; those that lose are refused."""
    config = kit.config(tmp_path)
    repos = [
        kit.repository(
            tmp_path / str(n), encrypted=n % 2 == 0, store=LocalStore(str(tmp_path / f"s{n}"))
        )
        for n in range(8)
    ]
    monkeypatch.setattr(LocalStore, "place", lambda self: "/the/place")
    both, found, errors = threading.Barrier(len(repos)), [], []

    def use(repo: Repository) -> None:
        pinning = Pinning.of(repo.store, config)
        both.wait()
        try:
            pinning.met(repo.id, repo.opened, encrypted=repo.encrypted, url="/the/place")
            found.append(repo.id)
        except StoreChanged as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(repo,)) for repo in repos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == len(repos) - 1
    assert [pin["id"] for pin in pins(config)] == found


@pytest.mark.parametrize("text", ["", "{", "[]", '{"place": "elsewhere"}', '{"id": 3}'])
def test_a_pin_that_cannot_be_understood_is_an_error(tmp_path: Path, text: str) -> None:
    repo = kit.repository(tmp_path, encrypted=True, store=LocalStore(str(tmp_path / "store")))
    (file,) = (tmp_path / "state" / "stores").iterdir()
    file.write_text(text)
    with pytest.raises(Damaged, match="cannot be understood"):
        Repository.open(repo.store, repo.config)


def test_a_pin_that_cannot_be_written(tmp_path: Path) -> None:
    """The store is used as before, with a warning; but a key that could not be used afterwards is
    an error.
    """
    (tmp_path / "file").touch()
    config = kit.config(tmp_path, state_dir=str(tmp_path / "file" / "state"))
    repo = Repository.init(LocalStore(str(tmp_path / "store")), encryption=True, config=config)
    again = Repository.open(repo.store, config)
    assert again.about.pin is None and str(tmp_path / "file") in again.about.unpinned
    from criuctl.errors import PlatformError

    with pytest.raises(PlatformError, match="could not be pinned"):
        Repository.init(Bucket(), encryption=False, config=config)


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    repo = kit.repository(tmp_path, encrypted=True, store=LocalStore(str(tmp_path / "store")))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storepins, "_write", full)
    assert (
        "No space"
        in Repository.open(
            repo.store, replace(repo.config, state_dir=str(tmp_path / "new"))
        ).about.unpinned
    )


def test_what_is_gone_is_made_again_by_itself_only_if_it_was_plain(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    first = kit.repository(tmp_path, store=store)
    mounted = store.get("config")
    store.delete("config")
    second = Repository.open(store, first.config, create_local=True)
    assert second.id != first.id and [pin["id"] for pin in pins(first.config)] == [second.id]
    store.put("config", mounted)  # the disk is back
    assert Repository.open(store, first.config).id == first.id
    store.delete("config")
    third = Repository.init(store, encryption=True, config=first.config)
    assert [pin["id"] for pin in pins(first.config)] == [third.id]
    store.delete("config")
    with pytest.raises(StoreNotInitialised, match="is gone") as error:
        Repository.open(store, first.config, create_local=True)
    assert "criuctl store init" in error.value.hint
    assert not (tmp_path / "store" / "config").exists()


def test_neither_memory_nor_an_archive_is_a_place(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    assert repo.store.place() == "" and repo.about.pin is None and repo.about.unpinned == ""
    assert not (tmp_path / "state").exists()
    with pytest.raises(Conflict):
        kit.repository(tmp_path, store=repo.store)
