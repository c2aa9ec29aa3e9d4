"""Workspaces on their way into a checkpoint and out of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.chunks import CHUNK_ENTRY, StreamRef
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import Damaged, PreflightRefused
from criuctl.files import rewind, workspace_index
from criuctl.files.judgement import judge_all
from criuctl.files.set_aside import AsideFolder
from criuctl.files.workspaces import Workspace
from criuctl.proc import folder_walk
from criuctl.report import Reporter
from criuctl.store import open_store

BEFORE = 10 * 10**9  # nanoseconds: a file that was not changed just now


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    config = Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
    )
    found = Repository.open(open_store(config.store, config), config, create_local=True)
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "sub").mkdir(parents=True)
    (folder / "first").write_bytes(b"first")
    (folder / "second").write_bytes(b"second" * 500_000)
    (folder / "sub" / "empty").touch()
    os.link(folder / "first", folder / "sub" / "first")
    return folder


def empty() -> Manifest:
    return Manifest(id="1" * 32, session=SessionRef("w", "2" * 32))


def taken(
    repository: Repository, folder: Path, *, changing: bool = False
) -> tuple[Manifest, CheckpointReader, int]:
    """The checkpoint of a workspace, and how many bytes of files were read while frozen or later;
    `changing`: `first` changes, and `second` is replaced, between the two looks.
    """
    with repository.writer(Reporter()) as writer:
        workspace = Workspace(Config(), str(folder), os.getpid())
        workspace.ahead(writer, {})
        writer.wait_hashed()
        ahead = writer.stats.bytes_in
        if changing:
            (folder / "first").write_bytes(b"1st")
            (folder / "sub" / "new").write_bytes(b"another")
            (folder / "sub" / "new").replace(folder / "second")
        workspace.frozen(writer, {}, Reporter())
        writer.wait_hashed()
        manifest = workspace.completed(empty(), writer)
        writer.wait_hashed()
        later = writer.stats.bytes_in - ahead
        writer.commit(manifest)
    return manifest, repository.reader(Reporter()), later


def contents(manifest: Manifest, reader: CheckpointReader, folder: Path) -> dict[str, bytes]:
    assert manifest.workspace is not None
    return {
        os.path.relpath(r.path, folder): reader.read(r.data) if r.data is not None else b""
        for r in workspace_index.unpack(manifest.workspace, reader)
    }


def settle(folder: Path) -> None:
    """Wait until the kernel's clock is a second past all changes of the folder."""
    newest = max(p.stat().st_ctime_ns for p in folder.rglob("*"))
    while time.time_ns() - newest <= 10**9:
        time.sleep(0.05)


def test_what_is_unchanged_is_not_read_again(repository: Repository, folder: Path) -> None:
    settle(folder)
    manifest, reader, later = taken(repository, folder)
    expected = {"first": b"first", "second": b"second" * 500_000, "sub/first": b"first"}
    expected |= {".": b"", "sub": b"", "sub/empty": b""}
    assert contents(manifest, reader, folder) == expected
    assert later < 1 << 16  # the index
    assert manifest.features == ("workspace",)
    assert repository.verify(manifest, Reporter()) > 3_000_000


def test_what_changes_meanwhile_is_as_at_the_freeze(repository: Repository, folder: Path) -> None:
    settle(folder)
    manifest, reader, _ = taken(repository, folder, changing=True)
    found = contents(manifest, reader, folder)
    assert (found["first"], found["sub/first"], found["second"]) == (b"1st", b"1st", b"another")


def test_a_file_that_was_just_written_is_read_again(repository: Repository, folder: Path) -> None:
    """A second write within a tick of the clock leaves no trace in its times."""
    (folder / "second").write_bytes(b"x" * 3_000_000)
    _, _, later = taken(repository, folder)
    assert later >= 3_000_000


def test_limits(folder: Path) -> None:
    for limits, option in (
        (Config(workspace_max_mib=2), "workspace_max_mib"),
        (Config(workspace_max_files=5), "workspace_max_files"),
    ):
        with pytest.raises(PreflightRefused) as refused:
            Workspace(limits, str(folder), os.getpid())
        assert option in refused.value.hint
    Workspace(Config(workspace_max_mib=3, workspace_max_files=6), str(folder), os.getpid())


class Streams(CheckpointReader):
    """Streams of a checkpoint that was made by hand."""

    def __init__(self, index: bytes) -> None:
        self.index = index

    def read(self, ref: StreamRef, free: int = 0) -> bytes:
        return self.index


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"path": "/etc/passwd"}, "outside"),
        ({"path": "/w/../etc/passwd"}, "plain absolute path"),
        ({"path": "/workspace"}, "outside"),
        ({"kind": "written"}, "no record"),
        ({"data": {"size": 0, "chunks": []}}, "no record"),
        ({"size": 9}, "does not fit"),
        ({"size": 3}, "does not fit"),
        ({"size": 0}, "of no file"),
        ({"mode": "all"}, "integer"),
    ],
)
def test_a_hostile_index(
    repository: Repository, folder: Path, change: dict[str, object], what: str
) -> None:
    manifest, _, _ = taken(repository, folder)
    assert manifest.workspace is not None
    data = StreamRef(5, CHUNK_ENTRY.pack(bytes(32), 5))
    workspace = replace(manifest.workspace, path="/w", data=data)
    line = {"path": "/w/file", "mode": 0o100644, "size": 5, "inode": 1}
    good = workspace_index.unpack(workspace, Streams(json.dumps(line).encode()))
    assert good[0].data == data
    with pytest.raises(Damaged, match=what):
        workspace_index.unpack(workspace, Streams(json.dumps(line | change).encode()))
    for text in (b"{", b"[]", b"[" * 100_000):
        with pytest.raises(Damaged):
            workspace_index.unpack(workspace, Streams(text))


def test_a_rewind_of_a_folder_that_is_a_file_now(repository: Repository, folder: Path) -> None:
    """And of a file that is a folder now: what is in it moves with it."""
    manifest, reader, _ = taken(repository, folder)
    (folder / "first").unlink()
    (folder / "first").mkdir()
    (folder / "first" / "inner").touch()
    for path in (folder / "sub").iterdir():
        path.unlink()
    (folder / "sub").rmdir()
    (folder / "sub").write_text("a file")
    (folder / "new" / "deep").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    judged = rewind.judge(manifest, reader, (), {0}, at_home=True)
    verdicts = {
        os.path.relpath(j.record.path, folder): j.verdict for j in judged if j.verdict != "same"
    }
    back = dict.fromkeys(["first", "sub", "sub/first", "sub/empty"], "put-back")
    assert verdicts == back | {"new": "set-aside"}


def test_owner_and_mode_come_back(repository: Repository, folder: Path) -> None:
    manifest, reader, _ = taken(repository, folder)
    (folder / "second").chmod(0o600)
    (verdict,) = [
        j.verdict
        for j in rewind.judge(manifest, reader, (), {0}, at_home=True)
        if j.record.path == str(folder / "second")
    ]
    assert verdict == "put-back"


def test_an_open_file_keeps_its_descriptors(repository: Repository, folder: Path) -> None:
    manifest, reader, _ = taken(repository, folder)
    path = str(folder / "second")
    opened = FileRecord(path=path, kind="written", mode=0o100644, holders=((7, 3),))
    judged = rewind.judge(manifest, reader, judge_all([opened], "keep"), {0}, at_home=True)
    (record,) = [j.record for j in judged if j.record.path == path]
    assert record.holders == ((7, 3),) and record.data is not None


def test_a_folder_in_place_of_ours_is_not_given_away(tmp_path: Path) -> None:
    """Its place is a user's, who moves a folder of root's there."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    os.chown(workspace, 4711, 4711)
    (workspace / "file").write_text("text")
    undo: list[object] = []
    aside = AsideFolder(str(workspace), "12345678", undo.append)
    real = os.mkdir

    def swapped(name: str, mode: int, *, dir_fd: int) -> None:
        real(name, mode, dir_fd=dir_fd)
        (tmp_path / name / "secret").write_text("root's")

    with pytest.MonkeyPatch.context() as patch, folder_walk.folder(str(workspace)) as fd:
        patch.setattr(os, "mkdir", swapped)
        with pytest.raises(OSError, match="another folder"):
            aside.move(str(workspace / "file"), fd)
    assert Path(aside.path).stat().st_uid == 0
    assert (workspace / "file").read_text() == "text"
