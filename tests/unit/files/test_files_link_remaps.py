"""CRIU's helper links for deleted names: taken down where they are when a dump is over."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import pytest

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.file_records import LinkRecord
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.criu.images import ImageSet, write
from criuctl.criu.schema import message
from criuctl.errors import DumpFailed, RestoreFailed
from criuctl.files.deleted_names import DeletedName
from criuctl.files.link_remaps import DumpedLinks, provided
from criuctl.namespaces.plan import plan_entry
from criuctl.report import Reporter

NOTHING_IS_READ = cast("CheckpointReader", None)


class Images(ImageSet):
    """Those of a dump that needed these helper links."""

    def __init__(self, *links: Path) -> None:
        self.links = [str(link) for link in links]

    def link_remaps(self) -> dict[str, int]:
        return dict.fromkeys(self.links, -1)


@contextmanager
def restored(above: Path, *links: Path) -> Iterator[ImageSet]:
    """Images with these helper links, numbered 1, 2, ..., to files that were opened as ``data``."""
    (above / "images").mkdir(exist_ok=True)
    folder = os.open(above / "images", os.O_RDONLY)
    entries, pairs = [], []
    for number, link in enumerate(links, 1):
        for file, path in ((number, link), (number + 100, link.with_name("gone"))):
            entry = message("FILES")(id=file, type=1)
            entry.reg.id, entry.reg.flags, entry.reg.pos, entry.reg.size = file, os.O_RDWR, 0, 99
            entry.reg.fown.uid = entry.reg.fown.euid = entry.reg.fown.signum = (
                entry.reg.fown.pid_type
            ) = entry.reg.fown.pid = 0
            entry.reg.name, entry.reg.mode = str(path), 0o100644
            entries.append(entry)
        pairs.append(message("REMAP_FPATH")(orig_id=number + 100, remap_id=number, remap_type=0))
    write(folder, "files.img", "FILES", entries)
    write(folder, "remap-fpath.img", "REMAP_FPATH", pairs)
    write(folder, "pstree.img", "PSTREE", [])
    try:
        yield ImageSet(folder)
    finally:
        os.close(folder)


def linked(work: Path) -> DeletedName:
    """A deleted name whose helper link is to be one of ``data``."""
    status = (work / "data").stat()
    record = LinkRecord(
        str(work / "link_remap.1"),
        StreamRef(),
        str(work / "data"),
        status.st_ino,
        status.st_dev,
        status.st_mode,
    )
    return DeletedName(
        (record,), "same", str(work / "gone"), str(work / "data"), (status.st_dev, status.st_ino)
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a file and its helper link."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").write_text("kept")
    (tmp_path / "work" / "link_remap.1").hardlink_to(tmp_path / "work" / "data")
    return tmp_path / "work"


def test_the_removal_follows_no_link(work: Path, writer: CheckpointWriter) -> None:
    reporter = Reporter()
    with ExitStack() as stack:
        links = DumpedLinks(os.getpid(), plan_entry(os.getpid()), stack)
        (record,) = links.collect(Images(work / "link_remap.1"), writer)
        assert (record.path, record.sibling) == (str(work / "link_remap.1"), str(work / "data"))
        (work.parent / "etc").mkdir()
        (work.parent / "etc" / "link_remap.1").touch()
        work.rename(work.parent / "away")
        work.symlink_to(work.parent / "etc")
        links.clean(reporter)
        links.clean(reporter)
    assert os.listdir(work.parent / "etc") == ["link_remap.1"]
    assert os.listdir(work.parent / "away") == ["data"]
    assert reporter.warnings == []


def test_what_was_opened_twice_is_one_file_again(work: Path, writer: CheckpointWriter) -> None:
    """Each open file has a helper link of its own; none of them is a name to rely on, for they all
    go.
    """
    (work / "data").unlink()
    (work / "link_remap.1").unlink()
    links = [work / "link_remap.1", work / "link_remap.2"]
    os.mkfifo(links[0])
    links[1].hardlink_to(links[0])
    with ExitStack() as stack:
        dumped = DumpedLinks(os.getpid(), plan_entry(os.getpid()), stack)
        records = dumped.collect(Images(*links), writer)
        dumped.clean(Reporter())
    assert [record.sibling for record in records] == ["", ""]
    name = DeletedName(tuple(records), "apart", str(work / "data"))
    with (
        restored(work.parent, *links) as images,
        provided([name], images, NOTHING_IS_READ, {}, Reporter()),
    ):
        one, two = work.iterdir()
        assert one.samefile(two)
    assert os.listdir(work) == []


def test_what_is_in_the_place_of_one_is_not_removed(work: Path, writer: CheckpointWriter) -> None:
    with ExitStack() as stack:
        links = DumpedLinks(os.getpid(), plan_entry(os.getpid()), stack)
        links.collect(Images(work / "link_remap.1"), writer)
        (work / "link_remap.1").unlink()
        (work / "link_remap.1").write_text("another tree's")
        links.clean(Reporter())
    assert (work / "link_remap.1").read_text() == "another tree's"


def test_the_images_name_where_they_are(work: Path) -> None:
    """Not by names that another tree may have; and of what they are, criuctl has judged the size
    and the mode.
    """
    (work / "data").chmod(0o600)
    with (
        restored(work.parent, work / "link_remap.1") as images,
        provided([linked(work)], images, NOTHING_IS_READ, {}, Reporter()),
    ):
        helper, deleted = images.files()
        assert Path(helper.reg.name).samefile(work / "data") and helper.reg.name.startswith(
            str(work / "link_remap.1.")
        )
        assert (deleted.reg.name, deleted.reg.HasField("size"), deleted.reg.HasField("mode")) == (
            str(work / "gone"),
            False,
            False,
        )
    assert sorted(os.listdir(work)) == ["data", "link_remap.1"]


def failing(work: Path, meanwhile: Callable[[Path], object]) -> None:
    """A restore that fails after CRIU has done something, given the helper link."""
    with (
        restored(work.parent, work / "link_remap.1") as images,
        provided([linked(work)], images, NOTHING_IS_READ, {}, Reporter()),
    ):
        meanwhile(Path(images.files()[0].reg.name))
        raise RestoreFailed("a size")


@pytest.mark.parametrize("name", ["gone", "gone.cr_link"])
@pytest.mark.parametrize("there", [True, False])
def test_after_a_failure_the_deleted_name_is_gone_again(there: bool, name: str, work: Path) -> None:
    """CRIU links it for the moment in which it opens it. A file of another user that was there
    before stays.
    """
    if there:
        (work / name).hardlink_to(work / "data")
    with pytest.raises(RestoreFailed):
        failing(work, lambda helper: None if there else os.link(helper, work / name))
    assert (work / name).exists() == there


def test_after_a_failure_what_came_meanwhile_stays(work: Path) -> None:
    with pytest.raises(RestoreFailed):
        failing(work, lambda _helper: (work / "gone").write_text("somebody else's"))
    assert (work / "gone").read_text() == "somebody else's"


def test_what_killed_ones_have_left_is_swept(work: Path) -> None:
    """Not what is of a criuctl that lives: two restores in one folder have nothing to do with each
    other.
    """
    reads, writes = os.pipe()
    with restored(work.parent, work / "link_remap.1") as images:
        if (child := os.fork()) == 0:  # it is killed in the middle
            with provided([linked(work)], images, NOTHING_IS_READ, {}, Reporter()):
                os.write(writes, b"x")
                signal.pause()
        try:
            assert os.read(reads, 1) == b"x"
            (theirs,) = set(os.listdir(work)) - {"data", "link_remap.1"}
            with restored(work.parent, work / "link_remap.1") as others:
                with provided([linked(work)], others, NOTHING_IS_READ, {}, Reporter()):
                    assert len(os.listdir(work)) == 4
                assert theirs in os.listdir(work)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reads)
            os.close(writes)
        with provided([linked(work)], images, NOTHING_IS_READ, {}, Reporter()):
            assert theirs not in os.listdir(work)
    assert sorted(os.listdir(work)) == ["data", "link_remap.1"]


def test_in_a_mount_namespace_that_has_ended_with_the_tree(
    work: Path, writer: CheckpointWriter
) -> None:
    """Where the folder was mounted there, nothing leads to the link by the path that the tree had
    for it.
    """
    seen = work.parent / "seen"
    seen.mkdir()
    script = 'mount --bind "$1" "$2" && echo && exec cat'
    child = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", work, seen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with ExitStack() as stack:
        with child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == b"\n"
            links = DumpedLinks(child.pid, plan_entry(child.pid), stack)
            (record,) = links.collect(Images(seen / "link_remap.1"), writer)
            assert (record.path, record.sibling) == (str(seen / "link_remap.1"), str(seen / "data"))
            child.stdin.close()
        links.clean(Reporter())
    assert os.listdir(work) == ["data"]


def test_where_nothing_leads_to_them_any_more_the_dump_fails(
    work: Path, writer: CheckpointWriter
) -> None:
    """The tree was touched already, and runs on."""
    (work.parent / "home").mkdir()
    (work.parent / "home" / "work").symlink_to(work)
    os.chown(work.parent / "home", 65534, 65534)
    for link, why in (
        (work.parent / "home" / "work" / "link_remap.1", "symbolic link"),
        (work / "link_remap.2", "No such file"),
    ):
        with ExitStack() as stack, pytest.raises(DumpFailed) as raised:
            DumpedLinks(os.getpid(), plan_entry(os.getpid()), stack).collect(Images(link), writer)
        assert str(link) in raised.value.message and why in raised.value.message
