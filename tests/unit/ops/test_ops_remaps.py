"""CRIU's helper links for deleted names: taken down where they are when a dump is over."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.criu.images import ImageSet
from criuctl.errors import DumpFailed
from criuctl.ops.namespaces import plan_entry
from criuctl.ops.remaps import DumpedLinks, provided
from criuctl.report import Reporter


class Images(ImageSet):
    """Those of a dump that needed these helper links."""

    def __init__(self, *links: Path) -> None:
        self.links = [str(link) for link in links]

    def link_remaps(self) -> list[str]:
        return self.links


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a file and its helper link."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").write_text("kept")
    (tmp_path / "work" / "link_remap.1").hardlink_to(tmp_path / "work" / "data")
    return tmp_path / "work"


def test_nobody_leads_the_removal_elsewhere(work: Path, writer: CheckpointWriter) -> None:
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
    """Each open file has a helper link of its own; none of them is a name to rely on, for they all go."""
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
    nothing_is_read = cast("CheckpointReader", None)  # of a named pipe
    with provided(records, nothing_is_read):
        assert links[0].samefile(links[1])
    assert os.listdir(work) == []


def test_in_a_mount_namespace_that_has_ended_with_the_tree(work: Path, writer: CheckpointWriter) -> None:
    """Where the folder was mounted there, nothing leads to the link by the path that the tree had for it."""
    seen = work.parent / "seen"
    seen.mkdir()
    script = 'mount --bind "$1" "$2" && echo && exec cat'
    child = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", work, seen], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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


def test_where_nothing_leads_to_them_any_more_the_dump_fails(work: Path, writer: CheckpointWriter) -> None:
    """The tree was touched already, and runs on."""
    (work.parent / "home").mkdir()
    (work.parent / "home" / "work").symlink_to(work)
    os.chown(work.parent / "home", 65534, 65534)
    for link, why in ((work.parent / "home" / "work" / "link_remap.1", "symbolic link"), (work / "link_remap.2", "No such file")):
        with ExitStack() as stack, pytest.raises(DumpFailed) as told:
            DumpedLinks(os.getpid(), plan_entry(os.getpid()), stack).collect(Images(link), writer)
        assert str(link) in told.value.message and why in told.value.message
