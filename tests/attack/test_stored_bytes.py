"""An attacker who can read or write a store: what is encrypted reveals nothing, what was changed is
not restored, no text in it is run.
"""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace
from servers.rclone import RcloneServer
from support.command import Criuctl, Home
from support.zoo import Animal, Zoo

from criuctl.checkpoint.manifest import PredicateRecord
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.store import open_store

pytestmark = pytest.mark.integration

CANARY = "canary-c0de-secret"


def stored(criuctl: Criuctl, zoo: Zoo, home: Home) -> Animal:
    """A tree with the canary in memory, environment, arguments, a file that is taken along, a name
    and a label.
    """
    animal = zoo.launch("memory.py", "4", env={"TOKEN": CANARY})
    notes = animal.folder / f"notes-{CANARY}"
    notes.write_text(f"{CANARY}\n" * 100)
    criuctl("dump", animal.pid, "--name", CANARY, "--label", f"why={CANARY}", "--with-files", notes)
    return animal


def test_a_reader_of_an_encrypted_bucket_learns_no_content_and_no_name(
    rclone_server: RcloneServer, criuctl: Criuctl, home: Home, zoo: Zoo
) -> None:
    """Encrypted unless the operator says otherwise; sizes, numbers and times of objects are to be
    seen.
    """
    rclone_server.make_bucket(home.token)
    criuctl.extra |= {**rclone_server.env, "CRIUCTL_STORE": f"s3://{home.token}/x"}
    assert criuctl("store", "init")["encrypted"]
    stored(criuctl, zoo, home)
    client, keys = rclone_server.client(), rclone_server.keys(home.token)
    assert len(keys) > 3
    for key in keys:
        body = client.get_object(Bucket=home.token, Key=key)["Body"].read()
        for word in (CANARY, "memory.py", str(home.path)):
            assert word not in key and word.encode() not in body, f"{word} in {key}"


def test_an_object_that_was_changed_is_not_restored(criuctl: Criuctl, home: Home, zoo: Zoo) -> None:
    """A bit in any object of the checkpoint, or another checkpoint's object in its place: refused,
    and nothing runs.
    """
    criuctl("store", "init", "--encrypt")
    animal = stored(criuctl, zoo, home)
    criuctl("restore", CANARY)
    (restored,) = zoo.find(animal)
    criuctl("dump", restored.pid)  # a second checkpoint, to swap with
    changed = 0
    for path in sorted(
        p
        for p in criuctl.store.rglob("*")
        if (p.is_file() and "checkpoints" in p.parts) or "packs" in p.parts
    ):
        if not path.is_file():
            continue
        whole = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(
            whole[: len(whole) // 2]
            + bytes([whole[len(whole) // 2] ^ 1])
            + whole[len(whole) // 2 + 1 :]
        )
        for cached in (home.path / "cache").rglob("*"):
            if cached.is_file():
                cached.unlink()
        verdict = criuctl("verify", "--all", check=False)
        assert verdict["exit_code"] == 8, path
        path.write_bytes(whole)
        changed += 1
    assert changed >= 3
    first, second = sorted(p for p in (criuctl.store / "checkpoints").rglob("*") if p.is_file())
    one, other = first.read_bytes(), second.read_bytes()
    for path, content in ((first, other), (second, one)):
        path.chmod(0o600)
        path.write_bytes(content)
    answer = criuctl("restore", CANARY, check=False)
    assert answer["exit_code"] in (3, 8), answer
    assert zoo.find(animal) == []


def test_no_command_runs_because_a_manifest_says_so(criuctl: Criuctl, home: Home, zoo: Zoo) -> None:
    """Predicates hold commands; one that this host has not noted, or that its configuration lacks,
    makes a checkpoint stale.
    """
    pwned = home.path / "pwned"
    criuctl("store", "init", "--no-encrypt")
    animal = stored(criuctl, zoo, home)
    config = Config(
        store=str(criuctl.store),
        key_dir=str(home.path / "keys"),
        cache_dir=str(home.path / "cache"),
    )
    with open_store(config.store, config) as store, Repository.open(store, config) as repository:
        manifest = repository.manifest(repository.list()[0])
        forged = (
            PredicateRecord("command", f"touch {pwned}"),
            PredicateRecord("output", f"touch {pwned}"),
        )
        repository.publish(replace(manifest, id=os.urandom(16).hex(), predicates=forged))
        (ref,) = (one.id for one in repository.list() if one.id != manifest.id)
    exported = home.path / "exported"
    commands = (
        ("show", ref),
        ("verify", ref),
        ("restore", ref, "--dry-run"),
        ("restore", ref),
        ("export", ref, exported),
    )
    for words in commands:
        criuctl(*words, check=False)
        assert not pwned.exists(), words
    assert criuctl("restore", ref, check=False)["exit_code"] == 4
    assert criuctl("import", exported, check=False)["exit_code"] == 0
    assert not pwned.exists()
    assert zoo.find(animal) == []
