"""An attacker who can write to a store replaces it, or parts of it: this host notices before it
stores or restores anything.

On a folder, on the reference S3 server and on the weak one. The attacker acts through the file
system or an S3 client, never through criuctl's own code on the store that is attacked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers.common import S3Server
from support.command import Criuctl, Home
from support.keeper import Keeper
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

CANARY = "canary-91ad-secret-token"
KINDS = ["folder", "radosgw", "rclone"]
USES: list[tuple[str, ...]] = [
    ("list",),
    ("show", "work"),
    ("verify", "--all"),
    ("verify", "work", "--restore"),
    ("store", "info"),
    ("store", "key"),
    ("key", "list"),
    ("rm", "work"),
    ("prune", "--keep-last", "1"),
    ("gc", "--grace", "0"),
    ("export", "work", "exported"),
    ("restore", "work"),
    ("restore", "work", "--as", "copy"),
    ("restore", "work@1"),
]
"""Commands that open a store; none of them goes on with another one."""
FEW = [("list",), ("rm", "work"), ("gc", "--grace", "0"), ("restore", "work")]


@dataclass
class Place:
    """Where a store lies, as the attacker sees it: names and bytes."""

    url: str
    objects: Callable[[], dict[str, bytes]]
    put: Callable[[str, bytes], None]
    remove: Callable[[str], None]
    extra: dict[str, str] = field(default_factory=dict)

    def replace_all(self, objects: dict[str, bytes]) -> None:
        """Put another store in its place."""
        for name in self.objects():
            self.remove(name)
        for name, data in objects.items():
            self.put(name, data)

    def config(self) -> dict[str, Any]:
        """What the object `config` says."""
        found: dict[str, Any] = json.loads(self.objects()["config"])
        return found


def folder_place(path: Path) -> Place:
    """A folder."""

    def objects() -> dict[str, bytes]:
        files = [
            p
            for p in path.rglob("*")
            if p.is_file() and not p.relative_to(path).parts[0].startswith(".")
        ]
        return {str(p.relative_to(path)): p.read_bytes() for p in files}

    def put(name: str, data: bytes) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)

    return Place(str(path), objects, put, lambda name: (path / name).unlink())


def bucket_place(server: S3Server, bucket: str, prefix: str) -> Place:
    """A prefix of a bucket."""
    client = server.client()

    def objects() -> dict[str, bytes]:
        keys = [key for key in server.keys(bucket) if key.startswith(f"{prefix}/")]
        return {
            k.removeprefix(f"{prefix}/"): client.get_object(Bucket=bucket, Key=k)["Body"].read()
            for k in keys
        }

    def put(name: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)

    def remove(name: str) -> None:
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{name}")

    return Place(f"s3://{bucket}/{prefix}", objects, put, remove, server.env)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, home: Home, criuctl: Criuctl) -> Place:
    """A place of each kind; criuctl is set to use it."""
    if request.param == "folder":
        made = folder_place(home.path / "store")
    else:
        server: S3Server = request.getfixturevalue(f"{request.param}_server")
        server.make_bucket(home.token)
        made = bucket_place(server, home.token, "trees")
    criuctl.extra |= {**made.extra, "CRIUCTL_STORE": made.url}
    return made


@pytest.fixture
def attacker(keeper: Keeper, home: Home, tmp_path: Path) -> Iterator[Criuctl]:
    """criuctl on a host of the attacker's, with keys, state and a store of his own."""
    path, run = tmp_path / "attacker", home.run / "attacker"
    path.mkdir()
    run.mkdir()
    yield Criuctl(keeper, Home(home.token, path, run))
    shutil.rmtree(run)


def uses(place: Place) -> list[tuple[str, ...]]:
    """All of them on a folder; some elsewhere, where what opens the store is the same."""
    return FEW if place.extra else USES


def refused(answer: dict[str, Any], code: str = "store-changed") -> dict[str, Any]:
    """The error of a command that ended with 9 for the store."""
    assert answer["exit_code"] == 9, answer
    error: dict[str, Any] = answer["error"]
    assert error["code"] == code, error
    return error


def forged(attacker: Criuctl, zoo: Zoo, *init: str) -> dict[str, bytes]:
    """A whole store of the attacker's, with a checkpoint called ``work``."""
    attacker("store", "init", *init)
    animal = zoo.launch("memory.py", "1", name=f"forged-{len(list(zoo.home.glob('forged-*')))}")
    attacker("dump", animal.pid, "--name", "work")
    return folder_place(attacker.store).objects()


def plain_config(attacker: Criuctl) -> bytes:
    """A config that says that its store is not encrypted, valid in itself."""
    attacker("store", "init", "--no-encrypt", env={"CRIUCTL_STORE": str(attacker.store) + "-plain"})
    return Path(f"{attacker.store}-plain", "config").read_bytes()


def secret(zoo: Zoo) -> Animal:
    """A process with a secret in its memory."""
    return zoo.launch("memory.py", "1", env={"TOKEN": CANARY})


def test_a_plain_config_in_place_of_an_encrypted_one(
    place: Place, criuctl: Criuctl, attacker: Criuctl, zoo: Zoo, home: Home
) -> None:
    """Another id, or the same id and no encryption: nothing is stored, in the clear least of all,
    nothing comes back.
    """
    criuctl("store", "init", "--encrypt")
    animal = secret(zoo)
    criuctl("dump", animal.pid, "--name", "work", "--leave-running")
    own, other = place.config(), json.loads(plain_config(attacker))
    for claimed in (other["id"], own["id"]):
        place.put("config", json.dumps(other | {"id": claimed}).encode())
        before = place.objects()
        error = refused(
            criuctl("dump", animal.pid, "--name", "work", "--leave-running", check=False)
        )
        assert own["id"][:12] in error["message"] and "criuctl store trust" in error["hint"]
        assert error["pinned"]["id"] == own["id"]
        for use in uses(place):
            refused(criuctl(*use, check=False))
        assert place.objects() == before
        assert not any(CANARY.encode() in data for data in before.values())
    place.put("config", json.dumps(own).encode())
    criuctl("verify", "--all")


def test_what_watches_over_sessions_takes_it_for_no_answer(
    criuctl: Criuctl, attacker: Criuctl, zoo: Zoo
) -> None:
    """A forged lease says that another host has the session: no store says so that is not the
    pinned one.
    """
    criuctl("store", "init", "--encrypt")
    animal = zoo.launch("memory.py", "1")
    criuctl("dump", animal.pid, "--name", "work", "--leave-running")
    store = folder_place(criuctl.store)
    session = criuctl("status", "work")["id"]
    attacker("store", "init", "--no-encrypt")
    forge_lease(attacker, session)
    store.replace_all(folder_place(attacker.store).objects())
    answer = criuctl("fence", "work", check=False)
    assert "is not the store that it was" in json.dumps(answer), answer
    assert criuctl("status", "work")["state"] == "running"
    animal.ask()


def forge_lease(attacker: Criuctl, session: str) -> None:
    """In the attacker's store the session ``work`` lives on another host, by a higher epoch."""
    from criuctl.checkpoint import leases
    from criuctl.checkpoint.repository import Repository
    from criuctl.config import Config
    from criuctl.store.local import LocalStore

    paths = {name: str(attacker.home.path / name) for name in ("state_dir", "cache_dir", "key_dir")}
    store = LocalStore(str(attacker.store))
    with Repository.open(store, Config(store=store.url, **paths)) as repository:  # type: ignore[arg-type]
        leases.claim(
            repository, "work", session, 9, host="forger", host_name="forger", above=99
        ).keep()


def test_a_whole_other_store(place: Place, criuctl: Criuctl, attacker: Criuctl, zoo: Zoo) -> None:
    """Neither one that is plain nor one that this host could open, with the very key that it uses,
    comes to anything.
    """
    criuctl("store", "init", "--encrypt")
    animal = zoo.launch("memory.py", "1")
    criuctl("dump", animal.pid, "--name", "work")
    kept = place.objects()
    place.replace_all(forged(attacker, zoo, "--no-encrypt"))
    for use in uses(place):
        refused(criuctl(*use, check=False))
    # The same key opens this one, as that of a host which has two stores does.
    key = next((criuctl.home.path / "keys").glob("*.key"))
    shutil.rmtree(attacker.store)
    attacker.extra["CRIUCTL_KEY_FILE"] = str(key)
    place.replace_all(forged(attacker, zoo, "--encrypt", "--key-file", str(key)))
    for use in uses(place):
        refused(criuctl(*use, check=False, env={"CRIUCTL_KEY_FILE": str(key)}))
    place.replace_all(kept)
    zoo.adopt(criuctl("restore", "work")["pid"], animal)


def test_a_passphrase_protects_likewise(
    place: Place, criuctl: Criuctl, attacker: Criuctl, zoo: Zoo
) -> None:
    """No key file says that this store is encrypted: the pin does."""
    phrase = {"CRIUCTL_PASSPHRASE": "correct horse"}
    criuctl.extra |= phrase
    file = criuctl.home.path / "phrase"
    file.write_text("correct horse")
    file.chmod(0o600)
    criuctl("store", "init", "--passphrase", env={"CRIUCTL_PASSPHRASE_FILE": str(file)})
    animal = secret(zoo)
    criuctl("dump", animal.pid, "--name", "work", "--leave-running")
    place.put("config", plain_config(attacker))
    before = place.objects()
    del criuctl.extra["CRIUCTL_PASSPHRASE"]  # whether or not it is at hand
    for env in ({}, phrase):
        refused(
            criuctl("dump", animal.pid, "--name", "work", "--leave-running", check=False, env=env)
        )
        refused(criuctl("restore", "work", check=False, env=env))
    assert place.objects() == before
    # A store of the attacker's that the same passphrase opens, as he may have seen it typed.
    attacker.extra |= phrase
    place.replace_all(forged(attacker, zoo, "--passphrase"))
    refused(criuctl("restore", "work", check=False, env=phrase))


def test_slots_of_another_key(place: Place, criuctl: Criuctl, attacker: Criuctl) -> None:
    """A master key of the attacker's, sealed for the pinned id by the very key file that this host
    has: reported as another key.
    """
    criuctl("store", "init", "--encrypt")
    store_id = place.config()["id"]
    key = criuctl.home.path / "keys" / f"{store_id}.key"
    place.put("config", sealed_for(store_id, key.read_text()))
    error = refused(criuctl("list", check=False))
    assert "another master key" in error["message"]


def sealed_for(store_id: str, key_text: str) -> bytes:
    """The config of a store of that id with a fresh master key that the key file opens; valid in
    itself.
    """
    import secrets

    from criuctl.checkpoint import configobject, key_files, key_slots
    from criuctl.checkpoint.codec import Sealer

    master = secrets.token_bytes(32)
    key = key_files.KeyText.parse(key_text.encode(), "key")
    body = {
        "format": configobject.FORMAT,
        "version": 1,
        "features": [],
        "id": store_id,
        "created": "2026-01-01T00:00:00.000Z",
        "encryption": "aes-256-gcm",
        "capabilities": {"conditional_create": True, "kind": "local"},
        "slots": [key_slots.file_slot(master, key, store_id)],
    }
    return configobject.text(body, Sealer(master, encrypted=True))


def test_both_the_key_file_and_the_store_are_replaced(
    place: Place, criuctl: Criuctl, attacker: Criuctl, zoo: Zoo
) -> None:
    """As by a backup of another host that was put back over this one: the id has changed, so it is
    refused.
    """
    criuctl("store", "init", "--encrypt")
    place.replace_all(forged(attacker, zoo, "--encrypt"))
    for file in (attacker.home.path / "keys").glob("*.key"):
        shutil.copy(file, criuctl.home.path / "keys" / file.name)
    refused(criuctl("restore", "work", check=False))


def test_changing_the_keys_is_no_change_of_the_store(place: Place, criuctl: Criuctl) -> None:
    """Keys are rotated, added and removed; the pin holds."""
    criuctl("store", "init", "--encrypt")
    before = criuctl("store", "info")["pin"]
    # 11 where the store cannot replace its config
    assert criuctl("key", "rotate", check=False)["added"]
    file = criuctl.home.path / "other.key"
    assert criuctl("key", "add", "--key-file", file, check=False)["added"]
    assert criuctl("list", env={"CRIUCTL_KEY_FILE": str(file)}) == []
    assert (
        criuctl("store", "info")["pin"]
        == before
        == {"since": before["since"], "how": "init", "problem": None}
    )


def test_store_trust_accepts_a_recreated_store(
    place: Place, criuctl: Criuctl, attacker: Criuctl, zoo: Zoo
) -> None:
    """`store trust` says which it was and which it is; a plain one needs one word more; an id can
    be required.
    """
    criuctl("store", "init", "--encrypt")
    was = place.config()["id"]
    place.replace_all(forged(attacker, zoo, "--no-encrypt"))
    now = place.config()["id"]
    refused(criuctl("list", check=False))
    refused(criuctl("store", "trust", check=False), "store-not-trusted")
    refused(criuctl("store", "trust", was[:8], "--no-encrypt", check=False))
    refused(criuctl("list", check=False))
    answer = criuctl("store", "trust", now[:8], "--no-encrypt")
    assert (answer["id"], answer["encrypted"], answer["before"]["id"]) == (now, False, was)
    assert [row["session"] for row in criuctl("list")] == ["work"]
    assert criuctl("store", "info")["pin"]["how"] == "trusted"


def test_a_store_that_is_gone_is_not_made_anew_in_the_clear(
    place: Place, criuctl: Criuctl, zoo: Zoo
) -> None:
    """All of it was removed: a dump makes none in its place, and `store init` one that is
    encrypted as that was.
    """
    criuctl("store", "init")
    animal = secret(zoo)
    for name in place.objects():
        place.remove(name)
    answer = criuctl("dump", animal.pid, "--name", "work", check=False)
    assert answer["exit_code"] == 7, answer
    assert not any(CANARY.encode() in data for data in place.objects().values())
    made = criuctl("store", "init")
    assert made["encrypted"] is True
    criuctl("dump", animal.pid, "--name", "work")


def test_plain_in_s3_only_if_the_operator_said_so(
    home: Home, criuctl: Criuctl, attacker: Criuctl, radosgw_server: S3Server
) -> None:
    """The host that made it so uses it; another host gets a warning when it first uses it; a folder
    is used as before.
    """
    radosgw_server.make_bucket(home.token)
    url = f"s3://{home.token}/plain"
    env = {**radosgw_server.env, "CRIUCTL_STORE": url}
    criuctl("store", "init", "--no-encrypt", env=env)
    assert criuctl("list", env=env) == criuctl("list", env=env | {"CRIUCTL_STORE": f"{url}/"}) == []
    error = refused(attacker("list", check=False, env=env), "store-not-trusted")
    assert "store trust" in error["hint"] and "--no-encrypt" in error["hint"]
    attacker("store", "trust", "--no-encrypt", env=env)
    assert attacker("list", env=env) == []
    criuctl("store", "init", "--no-encrypt")
    assert attacker("list", env={"CRIUCTL_STORE": str(criuctl.store)}) == []


def test_two_first_uses_at_once_agree(place: Place, criuctl: Criuctl, attacker: Criuctl) -> None:
    """Several commands meet a store at the same time, while it is replaced: all that go on have
    seen the same one.
    """
    criuctl("store", "init", "--encrypt")
    shutil.rmtree(criuctl.home.path / "state" / "stores")
    first = [criuctl.start("store", "info") for _ in range(4)]
    for command in first:
        assert command.process.wait(120) == 0, command.output()
    assert len(list((criuctl.home.path / "state" / "stores").iterdir())) == 1
    place.put("config", plain_config(attacker))
    refused(criuctl("list", check=False))


def test_a_pin_that_cannot_be_understood_is_no_missing_one(place: Place, criuctl: Criuctl) -> None:
    """It was cut off, or edited: refused, until the operator says which store is the right one."""
    criuctl("store", "init", "--encrypt")
    (pin,) = (criuctl.home.path / "state" / "stores").iterdir()
    pin.write_text(pin.read_text()[:20])
    answer = criuctl("list", check=False)
    assert (answer["exit_code"], answer["error"]["code"]) == (8, "damaged")
    criuctl("store", "trust")
    assert criuctl("list") == []


def test_a_read_only_state_folder_is_said(place: Place, criuctl: Criuctl, home: Home) -> None:
    """Where no pin can be written the store is used as before, and `store info` and `doctor` say
    what that means.
    """
    criuctl("store", "init", "--encrypt")
    file = home.path / "file"
    file.touch()
    env = {"CRIUCTL_STATE_DIR": str(file / "state")}
    pin = criuctl("store", "info", env=env)["pin"]
    assert pin["how"] is None and str(file) in pin["problem"]
