"""Files that a tree only reads: which are known by their contents, and how they are judged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.file_records import FileRecord
from criuctl.config import Config
from criuctl.files import contents, read_only_files, used_files
from criuctl.files.judgement import Policy, judge

OLD = b"as it was at the freeze\n" * 100
STREAM = StreamRef(len(OLD))


def record(
    path: Path, kind: str, role: str, *, hashed: bool = True, carried: bool = False
) -> FileRecord:
    """The record of a file as it is now."""
    status = path.lstat()
    fd = os.open(path, os.O_RDONLY)
    try:
        found = contents.base_record(str(path), kind, status)
        digest = contents.digest(fd, status.st_size)
    finally:
        os.close(fd)
    return found.with_use(
        role=role,
        digest=digest if hashed else "",
        data=STREAM if carried else None,
        holders=((7, 3),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(OLD)
    os.utime(path, ns=(10**18, 10**18))
    return path


def rewrite(path: Path) -> None:
    path.write_bytes(OLD.upper())


def touch(path: Path) -> None:
    path.touch()


def grow(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"later\n")


def shrink(path: Path) -> None:
    os.truncate(path, 10)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CARRIED = {"hashed": True, "carried": True}
HASHED = {"hashed": True}
TIMED = {"hashed": False}


@pytest.mark.parametrize(
    ("kind", "role", "known", "change", "policy", "expected"),
    [
        ("read", "script", CARRIED, touch, "restore", ("same", "")),
        ("read", "script", CARRIED, rewrite, "restore", ("deleted-copy", "warning")),
        ("read", "script", CARRIED, shrink, "restore", ("deleted-copy", "warning")),
        ("read", "script", CARRIED, Path.unlink, "restore", ("deleted-copy", "warning")),
        ("read", "script", CARRIED, Path.unlink, "refuse", ("deleted-copy", "warning")),
        ("read", "script", CARRIED, become_a_folder, "restore", ("deleted-copy", "warning")),
        ("read", "script", CARRIED, rewrite, "refuse", ("refuse", "error")),
        ("read", "script", CARRIED, rewrite, "keep", ("moved-on", "warning")),
        ("read", "script", CARRIED, grow, "restore", ("moved-on", "info")),
        ("read", "script", CARRIED, grow, "refuse", ("moved-on", "info")),
        ("read", "script", HASHED, rewrite, "restore", ("refuse", "error")),
        ("read", "script", HASHED, shrink, "restore", ("refuse", "error")),
        ("read", "script", HASHED, Path.unlink, "restore", ("refuse", "error")),
        ("read", "script", TIMED, touch, "restore", ("moved-on", "warning")),
        ("read", "", HASHED, touch, "restore", ("same", "")),
        ("read", "", HASHED, rewrite, "restore", ("moved-on", "warning")),
        ("read", "", HASHED, rewrite, "refuse", ("refuse", "error")),
        ("read", "", HASHED, grow, "restore", ("moved-on", "info")),
        ("read", "", TIMED, rewrite, "restore", ("moved-on", "warning")),
        ("read", "", TIMED, shrink, "restore", ("moved-on", "warning")),
        ("read", "", TIMED, grow, "restore", ("moved-on", "info")),
        ("read", "data", CARRIED, rewrite, "restore", ("deleted-copy", "warning")),
        ("mapped", "data", HASHED, rewrite, "restore", ("moved-on", "warning")),
        ("mapped", "data", HASHED, rewrite, "refuse", ("refuse", "error")),
        ("mapped", "data", HASHED, shrink, "restore", ("refuse", "error")),
        ("mapped", "data", TIMED, touch, "restore", ("moved-on", "warning")),
        ("mapped", "data", TIMED, grow, "restore", ("refuse", "error")),
        # a library: CRIU compares build-ids
        ("mapped", "", TIMED, rewrite, "restore", ("same", "")),
        ("mapped", "", TIMED, touch, "refuse", ("same", "")),
    ],
)
def test_judged(
    kind: str,
    role: str,
    known: dict[str, bool],
    change: Callable[[Path], None],
    policy: Policy,
    expected: tuple[str, str],
    file: Path,
) -> None:
    kept = record(file, kind, role, **known)
    assert judge(kept, policy).verdict == "same"
    change(file)
    judged = judge(kept, policy)
    finding = judged.finding()
    assert (judged.verdict, finding.level if finding else "") == expected
    if finding is not None and finding.level != "info":
        assert str(file) in finding.text and (finding.pid, finding.fd) == (7, 3)
        assert finding.hint or finding.level == "warning"


def test_what_older_checkpoints_know(file: Path) -> None:
    """They have no hash, and some no time."""
    kept = record(file, "read", "", hashed=False).with_use(mtime_ns=0)
    rewrite(file)
    assert judge(kept, "refuse").verdict == "same"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/usr/bin/dash", True),
        ("/usr/bin/bash", True),
        ("/usr/bin/python3.11", True),
        ("/usr/bin/python3.11 (deleted)", True),
        ("/usr/bin/perl5.36-x86_64", False),
        ("/usr/bin/mawk", True),
        ("/usr/bin/node", True),
        ("/usr/sbin/sshd", False),
        ("/usr/bin/tail", False),
    ],
)
def test_interpreters(program: str, expected: bool) -> None:
    assert read_only_files.is_interpreter(program) == expected


def entries(folder: Path, **sizes: int) -> list[used_files.OpenFile]:
    made = []
    for name, size in sizes.items():
        path = folder / name
        path.write_bytes((b"#!" if name.startswith("script") else b"").ljust(size, b"."))
        made.append(
            used_files.OpenFile(str(path), str(path), mapped=name.startswith(("data", "live")))
        )
    return made


def test_scripts_come_first_and_the_smallest_of_a_kind(tmp_path: Path) -> None:
    mib = 1 << 20
    found = entries(
        tmp_path,
        script=mib,
        data=10,
        plain=5,
        large=mib + 1,
        script2=20,
        **{f"more{n}": mib for n in range(20)},
    )
    read_only_files.mark_read(Config(), found, contents.open_contents)
    by_name = {Path(one.path).name: one for one in found}
    assert {name: one.role for name, one in by_name.items() if one.role} == {
        "script": "script",
        "script2": "script",
        "data": "data",
    }
    assert {name for name, one in by_name.items() if one.small} == {"script", "script2", "data"}
    assert not by_name["large"].hashed and by_name["plain"].hashed
    assert (
        sum(os.path.getsize(one.path) for one in found if one.hashed) <= read_only_files.HASH_TOTAL
    )


def test_nothing_travels_where_that_is_not_wanted(tmp_path: Path) -> None:
    found = entries(tmp_path, script=10, data=10)
    read_only_files.mark_read(replace(Config(), files_small_mib=0), found, contents.open_contents)
    assert [(one.hashed, one.small) for one in found] == [(True, False)] * 2


def test_what_is_live_or_code_does_not_travel(tmp_path: Path) -> None:
    live, code, gone = entries(tmp_path, live=10, data=10, data2=10)
    live.live = code.executable = True
    os.unlink(gone.path)
    read_only_files.mark_read(Config(), [live, code, gone], contents.open_contents)
    assert [(one.role, one.hashed, one.small) for one in (live, code, gone)] == [
        ("", True, False),
        ("", False, False),
        ("", False, False),
    ]


def test_of_very_many_files_not_all_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is frozen meanwhile."""
    monkeypatch.setattr(read_only_files, "HASH_FILES", 3)
    found = entries(tmp_path, **{f"more{n}": n for n in range(6)}, data=9)
    opened = []

    def noting(source: str, leased: tuple[int, int] | None, flags: int) -> int:
        opened.append(Path(source).name)
        return contents.open_contents(source, leased, flags)

    read_only_files.mark_read(Config(), found, noting)
    assert opened == ["data", "more0", "more1"]
    assert [Path(one.path).name for one in found if one.hashed] == ["more0", "more1", "data"]
