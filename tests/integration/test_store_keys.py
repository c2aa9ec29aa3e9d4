"""The keys of a store by the command line: what was stored by one is restored by another."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_tree_is_restored_by_another_key_than_it_was_dumped_by(home: Home, zoo: Zoo, criuctl: Criuctl, trip: Trip) -> None:
    """Dumped by the key file, which is rotated, then removed; restored and dumped by a passphrase; then by the recovery key."""
    made = criuctl("store", "init", "--encrypt", "--recovery-key")
    paper = made["recovery_key"]
    animal = zoo.launch("memory.py", "4")
    by_file = trip.dump(animal, "--name", "web")
    rotated = criuctl("key", "rotate")
    assert rotated["removed"] == [made["key"]["fingerprint"]] and Path(rotated["previous"]).is_file()
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
        if not path.is_file() or path == phrase or path.suffix == ".out":  # what a command said on standard output
            continue
        content = path.read_bytes()
        assert b"correct horse" not in content and paper.encode() not in content, path
