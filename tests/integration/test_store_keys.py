"""The keys of a store by the command line: what was stored by one is restored by another."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_tree_is_restored_by_another_key_than_it_was_dumped_by(
    home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """Dumped by the key file, which is rotated, then removed; restored and dumped by a passphrase;
    then by the recovery key.
    """
    made = criuctl("store", "init", "--encrypt", "--recovery-key")
    paper = made["recovery_key"]
    animal = zoo.launch("memory.py", "4")
    by_file = trip.dump(animal, "--name", "web")
    rotated = criuctl("key", "rotate")
    assert (
        rotated["removed"] == [made["key"]["fingerprint"]] and Path(rotated["previous"]).is_file()
    )
    phrase = home.path / "phrase"
    phrase.touch(0o600)
    phrase.write_text("correct horse battery staple\n")
    criuctl("key", "add", "--passphrase-file", phrase, "--label", "phrase")
    listed = {one["kind"]: one for one in criuctl("key", "list")}
    assert listed["file"]["used"] and listed["passphrase"]["label"] == "phrase" and len(listed) == 3
    refused = criuctl("key", "remove", listed["file"]["fingerprint"], check=False)
    assert refused["exit_code"] == 9
    criuctl("key", "remove", listed["file"]["fingerprint"], "--other-passphrase-file", phrase)
    assert criuctl("list", check=False)["exit_code"] == 8
    criuctl.extra["CRIUCTL_PASSPHRASE_FILE"] = str(phrase)
    criuctl("verify", "--all")
    restored = trip.restore(by_file, animal)
    restored.ask()
    by_phrase = trip.dump(restored, "--name", "web")
    del criuctl.extra["CRIUCTL_PASSPHRASE_FILE"]
    criuctl.extra["CRIUCTL_RECOVERY_KEY"] = paper
    again = trip.restore(by_phrase, restored)
    again.ask()
    for path in home.path.rglob("*"):
        # what a command said on standard output
        if not path.is_file() or path == phrase or path.suffix == ".out":
            continue
        content = path.read_bytes()
        assert b"correct horse" not in content and paper.encode() not in content, path


def test_a_write_only_host_stores_what_others_restore_and_reads_its_own(
    home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """It dumps, restores and dumps again; the keys' owner goes on with the session, which is not
    that host's any more.
    """

    def on(host: str) -> None:
        folders = {
            name: home.path / host / name.lower() for name in ("STATE_DIR", "CACHE_DIR", "KEY_DIR")
        }
        criuctl.extra = {"CRIUCTL_HOST_ID": host} | {
            f"CRIUCTL_{name}": str(path) for name, path in folders.items()
        }

    on("owner")
    store = criuctl("store", "init", "--encrypt")["id"]
    key = home.path / "writer" / "key_dir" / f"{store}.key"
    added = criuctl("key", "add", "--write-only", key, "--label", "web1")
    assert key.stat().st_mode & 0o777 == 0o600
    on("writer")
    animal = zoo.launch("counter.py", "1")
    restored = trip.restore(trip.dump(animal, "--name", "web"), animal)
    second = trip.dump(restored, "--name", "web")
    on("owner")
    third = trip.dump(trip.restore(second, restored), "--name", "web")
    assert criuctl("show", "web@2")["writer"] == {"label": "web1", "fingerprint": added["added"][0]}
    assert criuctl("show", "web")["writer"] is None
    kinds = {one["kind"]: one for one in criuctl("key", "list")}
    assert (kinds["writer"]["label"], kinds["writer"]["fingerprint"]) == ("web1", added["added"][0])
    on("writer")
    listed = criuctl("list", check=False)
    assert (listed["exit_code"], [one["number"] for one in listed["list"]]) == (0, [1, 2])
    assert "1 checkpoint of other hosts" in listed["stderr"]
    for command in (("restore", "web"), ("verify", third["checkpoint"])):
        refused = criuctl(*command, check=False)
        assert (refused["exit_code"], refused["error"]["code"]) == (8, "foreign"), command
    for refused_here in (
        ("restore", "web@2"),
        ("gc",),
        ("key", "list"),
        ("store", "key", "--export", "x"),
    ):
        assert criuctl(*refused_here, check=False)["exit_code"] == 9, refused_here
    info = criuctl("store", "info")
    assert (info["key"]["kind"], info["hidden"], info["unreadable"], info["checkpoints"]) == (
        "writer",
        1,
        0,
        2,
    )
    assert [one["ok"] for one in criuctl("verify", "--all")] == [True, True]
    on("owner")
    assert criuctl("key", "remove", "web1")["removed"] == added["added"]
    on("writer")
    assert criuctl("list", check=False)["exit_code"] == 8
