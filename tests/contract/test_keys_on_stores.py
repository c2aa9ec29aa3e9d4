"""Keys that come and go on every kind of store; a bucket that keeps versions, and locks them,
included.
"""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

import pytest
from msgspec.structs import replace
from servers import RadosGateway
from support import checkpoints as kit
from support.places import Place

from criuctl.checkpoint.key_files import KeyText, write_secret
from criuctl.checkpoint.key_generations import described
from criuctl.checkpoint.key_slots import file_slot, slot_fingerprint
from criuctl.checkpoint.keys import open_by_file
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import CriuctlError, WrongKey
from criuctl.store import open_store
from criuctl.store.base import Store

pytestmark = pytest.mark.contract

KINDS = ["local", "linked", "radosgw", "apart", "rclone"]


def _slot(repository: Repository, path: Path, label: str) -> dict[str, object]:
    """A key in a new file, and its slot."""
    key = KeyText(path.name.encode().ljust(32, b"k"))
    write_secret(path, key.text())
    opened = repository.opened
    assert opened is not None
    return described(file_slot(opened.master, key, repository.id), label)


def _rotated(store: Store, config: Config, folder: Path) -> tuple[Config, Config, list[str]]:
    """A store with a checkpoint whose first key was replaced: configurations of the new and of the
    old key, and warnings.
    """
    with Repository.init(store, encryption=True, config=config) as repository:
        kit.write(repository)
        slot = _slot(repository, folder / "new.key", "new")
        changer = repository.key_changer()
        changer.change(lambda slots: [*slots, slot])
        old = Path(config.key_dir) / f"{repository.id}.key"
        changer.change(lambda slots: [one for one in slots if one.get("label") == "new"])
        assert changer.settled()
        return (
            replace(config, key_file=str(folder / "new.key")),
            replace(config, key_file=str(old)),
            changer.warnings,
        )


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_another_key_opens_what_was_stored(place: Place, tmp_path: Path) -> None:
    config = replace(
        place.config, key_dir=str(tmp_path / "keys"), cache_dir=str(tmp_path / "cache")
    )
    store = place.open()
    new, old, warnings = _rotated(store, config, tmp_path)
    with Repository.open(place.open(), new) as repository:
        kit.check(repository, "web")
        kit.check(repository, kit.write(repository))
        generations = [info.name for info in store.list("keys/")]
        assert len(generations) == 1 and repository.about.generation == 2
    with pytest.raises(WrongKey):
        Repository.open(place.open(), old)
    weak = place.kind == "rclone"
    assert ("goes on holding" in "".join(warnings)) is weak
    # Where objects are replaced atomically nothing is left that the old key would open.
    assert (store.get("config") == store.get(generations[0])) is not weak


@pytest.mark.parametrize("place", ["local", "radosgw", "rclone"], indirect=True)
def test_operators_at_the_same_time(place: Place, tmp_path: Path) -> None:
    """Each adds a key of its own: all of the keys open the store, or the loser gets an error."""
    config = replace(
        place.config, key_dir=str(tmp_path / "keys"), cache_dir=str(tmp_path / "cache")
    )
    count = 3
    stores = [place.open() for _ in range(count)]
    Repository.init(stores[0], encryption=True, config=config).close()
    repositories = [Repository.open(store, config) for store in stores]
    slots = [
        _slot(repository, tmp_path / f"{number}.key", f"{number}")
        for number, repository in enumerate(repositories)
    ]
    start, added = threading.Barrier(count), []

    def add(number: int) -> None:
        start.wait()
        try:
            repositories[number].key_changer().change(
                lambda there: there if slots[number] in there else [*there, slots[number]]
            )
            added.append(number)
        except CriuctlError:
            assert place.kind == "rclone"  # there they may get in each other's way for too long

    threads = [threading.Thread(target=add, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Repository.open(place.open(), config) as repository:
        there = {slot_fingerprint(slot) for slot in repository.about.slots}
        assert {slot_fingerprint(slots[number]) for number in added} <= there
        assert place.kind == "rclone" or len(there) == count + 1
        repository.key_changer().tidy()
        assert repository.key_changer().settled()
    for number in added:
        Repository.open(place.open(), replace(config, key_file=str(tmp_path / f"{number}.key")))


def test_a_bucket_that_keeps_and_locks_versions(
    gateway: Place, radosgw_server: RadosGateway, tmp_path: Path
) -> None:
    """Keys are changed as elsewhere; what such a bucket keeps for its own sake, it keeps."""
    bucket = f"locked-{uuid.uuid4().hex[:8]}"
    client = radosgw_server.client()
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {
        "ObjectLockEnabled": "Enabled",
        "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}},
    }
    client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=rule)
    config = replace(
        gateway.config, key_dir=str(tmp_path / "keys"), cache_dir=str(tmp_path / "cache")
    )
    with open_store(f"s3://{bucket}/trees", config) as store:
        new, old, warnings = _rotated(store, config, tmp_path)
        with Repository.open(store, new) as repository:
            kit.check(repository, "web")
        with pytest.raises(WrongKey):
            Repository.open(store, old)
        # A limit: a removed key and read access to what such a bucket keeps open the store.
        versions = client.list_object_versions(Bucket=bucket, Prefix="trees/keys/")
        assert len(versions["Versions"]) == 2 and len(versions["DeleteMarkers"]) == 1
        assert bool(warnings) is not Repository.open(store, new).capabilities.conditional_create
        oldest = client.list_object_versions(Bucket=bucket, Prefix="trees/config")["Versions"][-1]
        body = json.loads(
            client.get_object(Bucket=bucket, Key="trees/config", VersionId=oldest["VersionId"])[
                "Body"
            ].read()
        )
        assert open_by_file(body["slots"], body["id"], Path(old.key_file)).slot == "file"
