"""Files of several names, hard links, that change between dump and restore."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

WAS = "as it was\n"


def change(path: Path, how: str) -> str:
    """The same inode with other contents; what they are."""
    text = {"grown": WAS + "later\n", "other": WAS.upper(), "shrunk": "as\n", "mode": WAS}[how]
    if how == "mode":
        path.chmod(0o600)
    else:
        with path.open("r+") as file:
            file.write(text)
            file.truncate()
    return text


@pytest.mark.parametrize("opened", [("a:write", "z:none"), ("a:none", "z:write"), ("a:write", "z:write")])
def test_a_copy_of_a_file_with_two_names(opened: tuple[str, str], zoo: Zoo, trip: Trip) -> None:
    """Neither is taken from under the original's hands, and the copy's two are one file."""
    original = zoo.launch("hardlinks.py", *(f"data/{word}" for word in opened))
    a, z = (original.folder / "data" / name for name in "az")
    told = trip.snapshot(original, "--name", "first", "--with-files", a.parent)
    inode = a.stat().st_ino
    original.ask()
    copy = trip.restore(told, original, "--as", "second", equal=False)
    own = {Path(f["path"]): Path(f.get("own_copy", "")) for f in copy.answer["files"]}
    assert own.keys() == {a, z}
    assert a.stat().st_ino == z.stat().st_ino == inode
    assert all(other.name.startswith(f"{path.name}.older-") for path, other in own.items())
    assert own[a].samefile(own[z]) and own[a].stat().st_nlink == 2
    report = copy.ask()
    assert set(report["inodes"].values()) == {own[a].stat().st_ino}
    assert set(report["texts"].values()) == {WAS}
    assert set(original.ask()["inodes"].values()) == {inode}


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("how", [("append", "read"), ("write", "read")])
def test_open_under_two_names_and_grown(how: tuple[str, str], first: str, zoo: Zoo, trip: Trip) -> None:
    """Each name is judged: what is only appended to goes on; else both are put back, one file as they were."""
    names = {"a": how[0], "b": how[1]}
    animal = zoo.launch("hardlinks.py", *(f"{name}:{names[name]}" for name in sorted(names, key=lambda n: n != first)))
    told = trip.dump(animal)
    inode = (animal.folder / "a").stat().st_ino
    newer = change(animal.folder / "b", "grown")
    restored = trip.restore(told, animal, equal=False)
    report = restored.ask()
    grown = how[0] == "append"
    assert report["texts"] == dict.fromkeys("ab", newer if grown else WAS)
    assert set(report["inodes"].values()) == {(animal.folder / "a").stat().st_ino} == {(animal.folder / "b").stat().st_ino}
    assert ((animal.folder / "a").stat().st_ino == inode) == grown
    assert len(restored.answer["files"]) == (0 if grown else 2)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_one_of_two_names_is_gone(gone: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Refused, naming it, before anything starts; where its contents came along it is a name of that file again."""
    animal = zoo.launch("hardlinks.py", "a:write", "b:read")
    told = trip.snapshot(animal, "--name", "first")
    carried = trip.dump(animal, "--name", "second", "--with-files", animal.folder / "a")
    (animal.folder / gone).unlink()
    refused = criuctl("restore", told["checkpoint"], check=False)
    assert refused["exit_code"] == 4 and str(animal.folder / gone) in refused["error"]["message"]
    report = trip.restore(carried, animal, equal=False).ask()
    assert report["texts"] == {"a": WAS, "b": WAS} and report["links"] == {"a": 2, "b": 2}
    assert os.path.samefile(animal.folder / "a", animal.folder / "b")
