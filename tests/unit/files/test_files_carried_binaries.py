"""Carried programs and libraries: what is to be laid where, and where nothing can be."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, ProcessRecord, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.files import carried_binaries
from criuctl.files.contents import digest
from criuctl.files.judgement import judge, judge_all
from criuctl.namespaces.network_choice import Place
from criuctl.report import Reporter
from criuctl.restore.host_facts import HostFacts, PlanOptions
from criuctl.restore.plan import make_plan
from criuctl.store import open_store

CODE = b"\x7fELF, or so\n" * 500


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "place" / "lib.so"
    path.parent.mkdir(mode=0o755)
    path.write_bytes(CODE)
    path.chmod(0o755)
    return path


@pytest.fixture
def carried(library: Path, tmp_path: Path) -> tuple[FileRecord, CheckpointReader]:
    """The record of the library, with its contents, and their reader."""
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    repository = Repository.open(
        open_store(str(tmp_path / "store"), config), config, create_local=True
    )
    with repository.writer(Reporter()) as writer, library.open("rb") as file:
        writer.add_file("file", file.fileno(), len(CODE))
        record = FileRecord(
            path=str(library),
            kind="mapped",
            size=len(CODE),
            mode=library.stat().st_mode,
            digest=digest(file.fileno(), len(CODE)),
            data=writer.stream("file"),
        )
        writer.commit(Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), files=(record,)))
    return record, repository.reader(Reporter())


def same(_path: Path) -> None:
    """It is what it was."""


def other_contents(path: Path) -> None:
    path.write_bytes(CODE.swapcase())


def grown(path: Path) -> None:
    path.write_bytes(CODE + b"more")


def other_mode(path: Path) -> None:
    path.chmod(0o700)


def a_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def without_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


def for_everybody(path: Path) -> None:
    path.unlink()
    path.parent.chmod(0o1777)


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        (same, "same"),
        (other_contents, "overlaid"),
        (grown, "overlaid"),
        (other_mode, "overlaid"),
        (a_link, "overlaid"),
        (Path.unlink, "overlaid"),
        (without_folder, "overlaid"),
        (for_everybody, "refuse"),
    ],
)
def test_judge(
    library: Path,
    carried: tuple[FileRecord, CheckpointReader],
    what: Callable[[Path], None],
    verdict: str,
) -> None:
    what(library)
    judged = judge(carried[0], "refuse")  # the policy is one of files that are put back
    assert judged.verdict == verdict
    assert verdict != "refuse" or judged.hint


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/no-such-folder/bin/python", "`mkdir /no-such-folder`"),
        ("/no-such-file", "--with-files /no-such-file"),
        ("/tmp/no-such-folder/lib.so", "`mkdir /tmp/no-such-folder`"),
        ("/dev/no-such-file", "--with-files /dev/no-such-file"),
        ("/usr/no-such-folder/lib.so", ""),
    ],
)
def test_folders_that_are_not_covered(path: str, hint: str) -> None:
    found = carried_binaries.obstacle(path)
    assert hint in found[1] if hint and found is not None else (hint, found) == ("", None)


def test_a_folder_that_the_tree_writes_to_is_not_covered(
    library: Path, carried: tuple[FileRecord, CheckpointReader]
) -> None:
    written = FileRecord(
        path=str(library.with_name("log")), kind="written", mode=0o100644, digest="", append=True
    )
    library.with_name("log").touch()
    grown(library)  # one that is there can be bound over
    assert [j.verdict for j in judge_all([carried[0], written], "keep")] == ["overlaid", "moved-on"]
    library.unlink()
    (refused, _) = judge_all([carried[0], written], "keep")
    assert (
        refused.verdict == "refuse"
        and written.path in refused.why
        and "--with-files" in refused.hint
    )


def test_what_is_laid(
    library: Path, carried: tuple[FileRecord, CheckpointReader], tmp_path: Path
) -> None:
    """Covered from the nearest folder that exists; what is the same there goes along."""
    record, reader = carried
    deep = record.with_use(path=str(library.parent / "not" / "here" / "lib.so"))
    judged = judge_all([record, deep], "restore")
    assert [j.verdict for j in judged] == ["same", "overlaid"]
    with carried_binaries.laid(judged, reader) as fd:
        assert fd is not None
        place = Path(f"/proc/self/fd/{fd}")
        wanted = json.loads((place / "list").read_text())
        there = [library.parent.stat().st_dev, library.parent.stat().st_ino]
        covers = [["cover-0", str(library.parent), there]]
        assert wanted == {
            "source": carried_binaries.SOURCE,
            "set_uid": True,
            "binds": [],
            "covers": covers,
        }
        for name in ("lib.so", "not/here/lib.so"):
            assert (place / "cover-0" / name).read_bytes() == CODE
            assert (place / "cover-0" / name).stat().st_mode == record.mode
        assert (place / "cover-0").stat().st_mode == library.parent.stat().st_mode
    with carried_binaries.laid(judge_all([record], "restore"), reader) as fd:
        assert fd is None


@pytest.mark.parametrize(
    ("wish", "init", "pids", "errors"),
    [
        ("auto", False, "private", []),
        ("private", False, "private", []),
        ("same", False, "same", ["overlay"]),
        ("auto", True, "init", ["overlay"]),
    ],
)
def test_the_tree_gets_namespaces_of_its_own(
    library: Path,
    carried: tuple[FileRecord, CheckpointReader],
    wish: str,
    init: bool,
    pids: str,
    errors: list[str],
) -> None:
    library.unlink()
    manifest = Manifest(
        id="0" * 32,
        session=SessionRef("s", "1" * 32),
        host=HostInfo(arch="x86_64", page_size=4096),
        processes=(ProcessRecord(pid=100, ns_pid=100),),
        namespaces={"pid": {"mode": "dumped", "init": True}} if init else {},
    )
    facts = HostFacts(
        kernel_arch="x86_64",
        cpu_flags=frozenset(),
        page_size=4096,
        taken_pids=(),
        listening={},
        local_addresses=frozenset(),
        netns=Place("host"),
        users=frozenset({0}),
        files=tuple(judge_all([carried[0]], "restore")),
    )
    plan = make_plan(manifest, facts, PlanOptions(pids=wish))
    assert (plan.pids, [f.code for f in plan.errors]) == (pids, errors)


def test_which_files_travel() -> None:
    asked = carried_binaries.Binaries(os.getpid(), wanted=True)
    assert asked.any
    assert asked.travels("/usr/lib/lib.so", 1 << 40, executable=True)
    assert asked.travels("/usr/share/locale.mo", 1000, executable=False)
    assert not asked.travels("/srv/database", 1 << 40, executable=False)
    assert not asked.travels("/dev/zero", 1, executable=True)
    nothing = carried_binaries.Binaries(os.getpid(), wanted=False)
    assert not nothing.any and not nothing.travels("/usr/lib/lib.so", 1000, executable=True)


@pytest.mark.parametrize(
    ("path", "uid", "mode", "allowed"),
    [
        ("{root}/lib.so", 0, 0o755, True),  # root's own, in root's folder
        ("{root}/lib.so", 1001, 0o755, False),
        ("{root}/lib.so", 0, 0o775, False),
        ("{root}/missing/lib.so", 1001, 0o755, False),
        ("{root}/missing/lib.so", 0, 0o755, True),
        ("{home}/lib.so", 1001, 0o755, True),  # in the folder of the tree's user
        ("{home}/missing/lib.so", 0, 0o755, True),
        ("{home}/link/lib.so", 1001, 0o755, False),
        ("{other}/lib.so", 1001, 0o755, False),  # in that of another one
        ("/etc/ld.so.preload", 1001, 0o644, False),  # what a manifest may name
        ("/usr/bin/no-such-program", 1001, 0o4755, False),
    ],
)
def test_where_the_files_of_a_user_s_tree_may_lie(
    tmp_path: Path, path: str, uid: int, mode: int, allowed: bool
) -> None:
    folders = {name: tmp_path / name for name in ("root", "home", "other")}
    for folder in folders.values():
        folder.mkdir(mode=0o755)
    os.chown(folders["home"], 1001, 1001)
    os.chown(folders["other"], 1002, 1002)
    (folders["home"] / "link").symlink_to(folders["root"])
    record = FileRecord(
        path=path.format(**folders), kind="mapped", mode=stat.S_IFREG | mode, uid=uid
    )
    found = carried_binaries.objection(record, {1001})
    assert (found is None) == allowed, found
    if found is not None:
        assert found[1].endswith(f"--with-files {record.path}.")
    # a process of root's among them would run it
    mixed = carried_binaries.objection(record, {0, 1001})
    assert (mixed is None) == allowed, mixed
    roots = carried_binaries.objection(record, {0})
    assert (roots is None) == ("link" not in path), roots
