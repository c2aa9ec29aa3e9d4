"""Files that are open under deleted names, judged: by what is at their other names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.file_records import FileRecord, LinkRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.criu.images import ImageSet
from criuctl.files.deleted_names import DeletedName, judge
from criuctl.files.judgement import Judgement, Policy
from criuctl.host.registry import boot_id
from criuctl.proc import folder_walk
from criuctl.report import Reporter
from criuctl.store import open_store

OLD = b"as it was at the freeze\n" * 100


class Images(ImageSet):
    """Those of a tree that has the file open to read, or for whose helper link nothing is known."""

    def __init__(self) -> None:
        pass

    def linked(self) -> dict[str, list[tuple[int, object]]]:
        return {}

    def names(self) -> list[str]:
        return []

    def holders(self) -> dict[int, list[tuple[int, int]]]:
        return {}


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Manifest, CheckpointReader]:
    """Of a tree that had ``gone`` open, a file with the other name ``data``; without a digest, as
    in older checkpoints.
    """
    (tmp_path / "data").write_bytes(OLD)
    status = (tmp_path / "data").stat()
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    repository = Repository.open(
        open_store(str(tmp_path / "store"), config), config, create_local=True
    )
    with repository.writer(Reporter()) as writer, (tmp_path / "data").open("rb") as file:
        writer.add_file("link", file.fileno(), len(OLD))
        link = LinkRecord(
            str(tmp_path / "link_remap.1"),
            writer.stream("link"),
            str(tmp_path / "data"),
            status.st_ino,
            status.st_dev,
            status.st_mode,
        )
        manifest = Manifest(
            id="0" * 32,
            session=SessionRef("s", "1" * 32),
            host=HostInfo(boot_id=boot_id()),
            links=(link,),
        )
        writer.commit(manifest)
    return manifest, repository.reader(Reporter())


def judged(
    checkpoint: tuple[Manifest, CheckpointReader],
    policy: Policy = "restore",
    files: tuple[Judgement, ...] = (),
) -> DeletedName:
    (found,) = judge(checkpoint[0], Images(), files, policy, checkpoint[1])
    return found


def nothing(_path: Path) -> None:
    """It stays as it is."""


def grow(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"later\n")


def change(path: Path) -> None:
    path.write_bytes(OLD.upper())


def shrink(path: Path) -> None:
    os.truncate(path, 10)


def close_to_others(path: Path) -> None:
    path.chmod(0o600)


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(OLD)
    path.with_name("new").rename(path)


@pytest.mark.parametrize(
    ("what", "policy", "verdict", "level"),
    [
        (nothing, "restore", "same", None),
        (nothing, "refuse", "same", None),
        (grow, "restore", "grown", "info"),
        (grow, "refuse", "grown", "info"),
        (change, "restore", "apart", "warning"),
        (change, "keep", "moved-on", "info"),
        (change, "refuse", "refuse", "error"),
        (shrink, "restore", "apart", "warning"),
        (close_to_others, "restore", "moved-on", "info"),
        (close_to_others, "refuse", "refuse", "error"),
        (Path.unlink, "restore", "apart", None),
        (replaced, "restore", "apart", None),  # as if the tree had been running
        (replaced, "refuse", "apart", None),
    ],
)
@pytest.mark.parametrize("digest", [True, False])
def test_judged_by_its_other_name(
    digest: bool,
    what: Callable[[Path], None],
    policy: Policy,
    verdict: str,
    level: str | None,
    checkpoint: tuple[Manifest, CheckpointReader],
    tmp_path: Path,
) -> None:
    from blake3 import blake3

    (link,) = checkpoint[0].links
    if digest:
        checkpoint = (
            replace(checkpoint[0], links=(link.with_use(digest=blake3(OLD).hexdigest()),)),
            checkpoint[1],
        )
    what(tmp_path / "data")
    found = judged(checkpoint, policy)
    assert found.verdict == verdict
    assert found.other == ("" if verdict == "apart" else str(tmp_path / "data"))
    finding = found.finding()
    assert (finding.level if finding else None) == level
    assert finding is None or str(tmp_path / "data") in finding.text


@pytest.mark.parametrize(
    ("what", "verdict"),
    [(nothing, "same"), (grow, "grown"), (change, "apart"), (os.mkdir, "apart")],
)
def test_where_numbers_mean_nothing_contents_decide(
    what: Callable[[Path], None],
    verdict: str,
    checkpoint: tuple[Manifest, CheckpointReader],
    tmp_path: Path,
) -> None:
    """On another host, or after a reboot of this one."""
    manifest = replace(checkpoint[0], host=HostInfo(boot_id="another"))
    replaced(tmp_path / "data")
    if what is os.mkdir:
        (tmp_path / "data").unlink()
    what(tmp_path / "data")
    assert judged((manifest, checkpoint[1])).verdict == verdict


def test_a_file_whose_other_names_are_unknown_is_reported(
    checkpoint: tuple[Manifest, CheckpointReader],
) -> None:
    (link,) = checkpoint[0].links
    found = judged((replace(checkpoint[0], links=(link.with_use(sibling=""),)), checkpoint[1]))
    finding = found.finding()
    assert found.verdict == "apart" and finding is not None and finding.level == "warning"
    fifo = link.with_use(sibling="", mode=0o010600, data=StreamRef())
    assert judged((replace(checkpoint[0], links=(fifo,)), checkpoint[1])).finding() is None


def test_one_that_has_a_record_goes_where_that_goes(
    checkpoint: tuple[Manifest, CheckpointReader],
) -> None:
    (link,) = checkpoint[0].links
    record = FileRecord(
        "/elsewhere", "written", inode=link.inode, device=link.device, digest="0" * 64
    )
    twin = record.with_use(path="/twin")
    found = judged(
        checkpoint,
        files=(Judgement(twin, "same"), Judgement(record, "put-back"), Judgement(twin, "grown")),
    )
    assert (found.verdict, found.other, found.finding()) == ("follows", "/elsewhere", None)
    assert (
        judged(checkpoint, files=(Judgement(record.with_use(digest=""), "moved-on"),)).verdict
        == "same"
    )


@pytest.mark.parametrize(
    ("same_boot", "known", "verdict", "reason"),
    [
        (True, True, "same", ""),  # renamed: the handle leads to it
        (True, False, "same", ""),
        (False, True, "apart", ""),
        (False, False, "apart", "none of its other names is known"),
    ],
)
def test_a_handle_holds_until_the_next_boot(
    same_boot: bool,
    known: bool,
    verdict: str,
    reason: str,
    checkpoint: tuple[Manifest, CheckpointReader],
    tmp_path: Path,
) -> None:
    manifest, reader = checkpoint
    with (tmp_path / "data").open("rb") as file:
        handle = folder_walk.handle(file.fileno())
    assert handle, "this file system has no handles (name_to_handle_at)"
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    link = replace(
        manifest.links[0], handle=handle, sibling=manifest.links[0].sibling if known else ""
    )
    host = HostInfo(boot_id=boot_id() if same_boot else "another")
    found = judged((replace(manifest, links=(link,), host=host), reader))
    assert (found.verdict, found.why.partition(";")[0]) == (verdict, reason)
    assert (found.there is not None) == (verdict == "same") and found.other in ("", str(moved))
