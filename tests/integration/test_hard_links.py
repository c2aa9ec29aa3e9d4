"""Files of several names, hard links, some of them deleted, that change between dump and
restore.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Criuctl
from support.pauses import paused
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

WAS = "as it was\n"


def names(animal: Animal) -> set[str]:
    """Those in its folder that are the test's business."""
    return {
        p.name
        for p in animal.folder.iterdir()
        if not p.name.startswith(("ready", "output", "report-"))
    }


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


@pytest.mark.parametrize("how", ["grown", "other", "shrunk"])
def test_another_name_of_a_deleted_one_has_changed(
    how: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A process that has it open finds it as it was, in a file of its own; that is reported, before
    and after.
    """
    animal = zoo.launch("hardlinks.py", "-a:write", "b:none")
    report = trip.dump(animal)
    newer = change(animal.folder / "b", how)
    plan = criuctl("restore", report["checkpoint"], "--dry-run")
    assert [f["level"] for f in plan["findings"] if str(animal.folder / "a") in f["text"]] == [
        "warning"
    ]
    restored = trip.restore(report, animal, equal=False)
    (warning,) = (
        text for text in restored.answer["warnings"] if f"{animal.folder / 'a'} (deleted)" in text
    )
    assert str(animal.folder / "b") in warning and "a file of its own, as it was" in warning
    answer = restored.ask()
    assert (answer["texts"], answer["links"]) == ({"-a": WAS}, {"-a": 0})
    assert (animal.folder / "b").read_text() == newer
    assert names(animal) == {"b"}
    again = trip.restore(trip.dump(restored), restored, equal=False)
    assert again.ask()["texts"] == {"-a": WAS + "more\n"}


@pytest.mark.parametrize("how", ["read", "append"])
def test_another_name_of_a_deleted_one_was_appended_to(
    how: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """A process that only reads it, or appends to it itself, does not notice that."""
    animal = zoo.launch("hardlinks.py", f"-a:{how}", "b:none")
    report = trip.dump(animal)
    newer = change(animal.folder / "b", "grown")
    criuctl.extra["CRIUCTL_FILE_CONFLICTS"] = "refuse"
    restored = trip.restore(report, animal, equal=False)
    answer = restored.ask()
    assert answer["texts"] == {"-a": newer}
    assert answer["inodes"] == {"-a": (animal.folder / "b").stat().st_ino}
    assert names(animal) == {"b"} and not restored.answer["warnings"]


@pytest.mark.parametrize(
    "opened",
    [("-a:map", "b:none"), ("-a:read", "-b:write", "c:none"), ("-a:map", "-b:read", "c:none")],
)
def test_all_that_is_deleted_goes_one_way(opened: tuple[str, ...], zoo: Zoo, trip: Trip) -> None:
    """Where one of them is written to, mapped or open, they are a file of their own, all."""
    animal = zoo.launch("hardlinks.py", *opened)
    report = trip.dump(animal)
    newer = change(animal.folder / opened[-1].partition(":")[0], "grown")
    restored = trip.restore(report, animal, equal=False)
    (warning,) = (text for text in restored.answer["warnings"] if "(deleted)" in text)
    assert "a file of its own" in warning
    answer = restored.ask()
    assert set(answer["texts"].values()) | set(answer["mapped"]) == {WAS}
    assert len(set(answer["inodes"].values())) <= 1
    assert (animal.folder / opened[-1].partition(":")[0]).read_text() == newer


@pytest.mark.parametrize("how", ["grown", "other", "mode"])
def test_policies_of_deleted_names(how: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Refused, with nothing touched, or taken as it is: as for a file that has its name."""
    animal = zoo.launch("hardlinks.py", "-a:write", "b:none")
    report = trip.dump(animal)
    newer = change(animal.folder / "b", how)
    refused = criuctl("restore", report["checkpoint"], "--files", "refuse", check=False)
    assert refused["exit_code"] == 4
    (found,) = (f for f in refused["error"]["findings"] if f["level"] == "error")
    assert (
        f"{animal.folder / 'a'} (deleted): {animal.folder / 'b'}" in found["text"]
        and found["hint"]
        and found["fd"] is not None
    )
    assert names(animal) == {"b"}
    restored = trip.restore(report, animal, "--files", "keep", equal=False)
    answer = restored.ask()
    assert answer["texts"] == {"-a": newer}
    assert answer["inodes"] == {"-a": (animal.folder / "b").stat().st_ino}
    assert names(animal) == {"b"}


def test_a_deleted_name_of_a_file_that_is_put_back(zoo: Zoo, trip: Trip) -> None:
    """The tree has it open under a name that is there, too: it is one file again, the newer one
    aside.
    """
    animal = zoo.launch("hardlinks.py", "-a:write", "b:read")
    report = trip.dump(animal)
    change(animal.folder / "b", "grown")
    answer = trip.restore(report, animal, equal=False).ask()
    assert answer["texts"] == {"-a": WAS, "b": WAS}
    assert set(answer["inodes"].values()) == {(animal.folder / "b").stat().st_ino}


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("other", ["b", "folder/b"])
def test_a_deleted_name_whose_others_are_elsewhere(
    other: str, moved: bool, zoo: Zoo, trip: Trip
) -> None:
    """In another folder, or renamed meanwhile: it is one file with them all the same, and what is
    written comes there.
    """
    animal = zoo.launch("hardlinks.py", "-a:write", f"{other}:none")
    report = trip.dump(animal)
    path = animal.folder / other
    if moved:
        path = path.rename(animal.folder / "moved")
        (animal.folder / other).write_text("another file")
    restored = trip.restore(report, animal, equal=False)
    assert not restored.answer["warnings"]
    answer = restored.ask()
    assert answer["texts"] == {"-a": WAS} and answer["inodes"] == {"-a": path.stat().st_ino}
    assert path.read_text() == WAS + "more\n"
    assert not [name for name in names(animal) if name.startswith("link_remap")]


def test_a_deleted_name_whose_others_are_elsewhere_and_have_changed(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    animal = zoo.launch("hardlinks.py", "-a:write", "folder/b:none")
    report = trip.dump(animal)
    newer = change(animal.folder / "folder" / "b", "other")
    refused = criuctl("restore", report["checkpoint"], "--files", "refuse", check=False)
    assert (
        refused["exit_code"] == 4
        and f"{animal.folder / 'a'} (deleted): " in refused["error"]["message"]
    )
    restored = trip.restore(report, animal, equal=False)
    assert [
        text
        for text in restored.answer["warnings"]
        if "(deleted)" in text and "a file of its own" in text
    ]
    assert restored.ask()["texts"] == {"-a": WAS}
    assert (animal.folder / "folder" / "b").read_text() == newer


def test_a_deleted_name_whose_others_were_deleted_meanwhile(zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("hardlinks.py", "-a:write", "b:none", "folder/c:none")
    report = trip.dump(animal)
    (animal.folder / "b").unlink()
    (animal.folder / "folder" / "c").unlink()
    restored = trip.restore(report, animal, equal=False)
    answer = restored.ask()
    assert (
        answer["texts"] == {"-a": WAS}
        and not restored.answer["warnings"]
        and names(animal) == {"folder"}
    )


def test_no_helper_link_is_left_where_the_dump_is_killed_at_its_end(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """It would be in the way of the next dump of that program."""
    animal = zoo.launch("hardlinks.py", "-a:write", "b:none")
    with paused(criuctl, "cleanup", "dump", animal.pid, "--name", "web") as held:
        assert names(animal) == {"b"}
        held.kill()
    held.wait_settled(animal)
    restored = zoo.adopt(criuctl("restore", "web")["pid"], animal)
    assert restored.ask()["texts"] == {"-a": WAS} and names(animal) == {"b"}


def test_what_has_the_name_of_a_helper_link_is_let_be(zoo: Zoo, trip: Trip) -> None:
    """CRIU numbers them in each tree: another one's in that folder has the same name."""
    animal = zoo.launch("hardlinks.py", "-a:write", "b:none")
    report = trip.snapshot(animal, "--name", "first")
    animal.end()
    for number in range(64):
        (animal.folder / f"link_remap.{number}").write_text("another tree's")
    restored = trip.restore(report, animal, equal=False)
    answer = restored.ask()
    assert answer["texts"] == {"-a": WAS}
    assert answer["inodes"] == {"-a": (animal.folder / "b").stat().st_ino}
    assert all(
        (animal.folder / f"link_remap.{number}").read_text() == "another tree's"
        for number in range(64)
    )
    assert len(names(animal)) == 65


@pytest.mark.parametrize("carried", [False, True])
def test_a_copy_of_who_has_a_deleted_name_open(carried: bool, zoo: Zoo, trip: Trip) -> None:
    """Both write to the same file as long as it is as it was, which is reported; then the copy gets
    its own.
    """
    original = zoo.launch("hardlinks.py", "-a:write", "b:none")
    report = trip.snapshot(
        original,
        "--name",
        "first",
        *(["--with-files", str(original.folder / "b")] if carried else []),
    )
    sharing = trip.restore(report, original, "--as", "sharing", "--share-files", equal=False)
    (warning,) = (text for text in sharing.answer["warnings"] if "writes to it as well" in text)
    assert f"{original.folder / 'a'} (deleted): PID {original.pid} (" in warning
    sharing.end()
    inode = original.ask()["inodes"]["-a"]
    if carried:  # which no process has open by that name, so there can be no second one
        refused = trip.criuctl("restore", report["checkpoint"], "--as", "second", check=False)
        assert (
            refused["exit_code"] == 4 and str(original.folder / "b") in refused["error"]["message"]
        )
        return
    copy = trip.restore(report, original, "--as", "second", equal=False)
    answer = copy.ask()
    assert answer["texts"] == {"-a": WAS} and answer["inodes"]["-a"] != inode
    assert original.ask()["texts"] == {"-a": WAS + "more\n"}
    assert names(original) == {"b"}


@pytest.mark.parametrize(
    "opened", [("a:write", "z:none"), ("a:none", "z:write"), ("a:write", "z:write")]
)
def test_a_copy_of_a_file_with_two_names(opened: tuple[str, str], zoo: Zoo, trip: Trip) -> None:
    """Neither is taken from under the original's hands, and the copy's two are one file."""
    original = zoo.launch("hardlinks.py", *(f"data/{word}" for word in opened))
    a, z = (original.folder / "data" / name for name in "az")
    report = trip.snapshot(original, "--name", "first", "--with-files", a.parent)
    inode = a.stat().st_ino
    original.ask()
    copy = trip.restore(report, original, "--as", "second", equal=False)
    own = {Path(f["path"]): Path(f.get("own_copy", "")) for f in copy.answer["files"]}
    opened_names = {path for path, word in zip((a, z), opened, strict=True) if "none" not in word}
    assert opened_names <= own.keys() <= {a, z}
    assert a.stat().st_ino == z.stat().st_ino == inode
    assert all(other.name.startswith(f"{path.name}.older-") for path, other in own.items())
    assert len({path.stat().st_ino for path in own.values()}) == 1
    answer = copy.ask()
    assert set(answer["inodes"].values()) == {next(iter(own.values())).stat().st_ino}
    assert set(answer["texts"].values()) == {WAS}
    assert set(original.ask()["inodes"].values()) == {inode}


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("how", [("append", "read"), ("write", "read")])
def test_open_under_two_names_and_grown(
    how: tuple[str, str], first: str, zoo: Zoo, trip: Trip
) -> None:
    """Each name is judged: what is only appended to goes on; else both are put back, one file as
    they were.
    """
    names = {"a": how[0], "b": how[1]}
    animal = zoo.launch(
        "hardlinks.py",
        *(f"{name}:{names[name]}" for name in sorted(names, key=lambda n: n != first)),
    )
    report = trip.dump(animal)
    inode = (animal.folder / "a").stat().st_ino
    newer = change(animal.folder / "b", "grown")
    restored = trip.restore(report, animal, equal=False)
    answer = restored.ask()
    grown = how[0] == "append"
    assert answer["texts"] == dict.fromkeys("ab", newer if grown else WAS)
    assert (
        set(answer["inodes"].values())
        == {(animal.folder / "a").stat().st_ino}
        == {(animal.folder / "b").stat().st_ino}
    )
    assert ((animal.folder / "a").stat().st_ino == inode) == grown
    assert len(restored.answer["files"]) == (0 if grown else 2)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_one_of_two_names_is_gone(gone: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Refused, naming it, before anything starts; where its contents came along it is a name of
    that file again.
    """
    animal = zoo.launch("hardlinks.py", "a:write", "b:read")
    report = criuctl("dump", animal.pid, "--leave-running", "--name", "first", env=RECORDED)
    carried = trip.dump(animal, "--name", "second", "--with-files", animal.folder / "a")
    (animal.folder / gone).unlink()
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 4 and str(animal.folder / gone) in refused["error"]["message"]
    answer = trip.restore(carried, animal, equal=False).ask()
    assert answer["texts"] == {"a": WAS, "b": WAS} and answer["links"] == {"a": 2, "b": 2}
    assert os.path.samefile(animal.folder / "a", animal.folder / "b")
