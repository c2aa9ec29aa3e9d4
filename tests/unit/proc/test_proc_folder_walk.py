"""The links that are followed on the path to a folder."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from criuctl.proc import folder_walk

BOB, ALICE = 65534, 65533


def link(path: Path, target: Path | str, uid: int = 0) -> None:
    path.symlink_to(target)
    os.chown(path, uid, uid, follow_symlinks=False)


def folder(path: Path, uid: int = 0) -> Path:
    path.mkdir()
    os.chown(path, uid, uid)
    return path


def reached(path: Path) -> Path:
    with folder_walk.folder(str(path)) as fd:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))


def test_links_of_those_who_may_write_there_anyway_are_followed(tmp_path: Path) -> None:
    home, etc = folder(tmp_path / "home", BOB), folder(tmp_path / "etc")
    below = folder(home / "below", BOB)
    link(tmp_path / "absolute", etc)
    link(tmp_path / "relative", "absolute/../home")
    link(tmp_path / "of-bob", home, BOB)
    link(home / "own", "../home/below", BOB)
    link(home / "made-by-root", below)
    assert reached(tmp_path / "absolute") == etc
    assert reached(tmp_path / "relative" / "own") == below
    assert reached(tmp_path / "of-bob" / "made-by-root") == below
    assert reached(Path("/")) == Path("/")


# a user who may write in a folder can move root's links in it
@pytest.mark.parametrize("uid", [BOB, 0])
def test_links_of_other_users_are_refused(tmp_path: Path, uid: int) -> None:
    home, etc = folder(tmp_path / "home", BOB), folder(tmp_path / "etc")
    folder(etc / "work", BOB)
    link(home / "work", etc, uid)
    with pytest.raises(folder_walk.ForeignLink) as raised:
        reached(home / "work" / "work")
    assert raised.value.filename == str(home / "work")
    assert str(BOB) in str(raised.value)
    link(tmp_path / "of-alice", home, ALICE)
    with pytest.raises(folder_walk.ForeignLink, match=str(ALICE)):
        reached(tmp_path / "of-alice")


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    link(tmp_path / "round", "round")
    codes = {
        "file": errno.ENOTDIR,
        "none": errno.ENOENT,
        "round": errno.ELOOP,
        "n" * 300: errno.ENAMETOOLONG,
    }
    for name, number in codes.items():
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            reached(tmp_path / name / "below")
    opened = [
        os.readlink(entry.path)
        for entry in os.scandir("/proc/self/fd")
        if os.path.lexists(entry.path)
    ]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
