"""Whether the named pipe that a process has open is the one of the dump: decided without CRIU, on
real pipes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.checkpoint.file_records import FifoRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, ProcessRecord, SessionRef
from criuctl.criu.fifoimages import SavedQueue
from criuctl.criu.images import ImageSet
from criuctl.errors import DumpFailed
from criuctl.files import fifos
from criuctl.host.registry import boot_id
from criuctl.proc.descriptors import descriptors
from criuctl.proc.tree import ProcessIdentity, read_tree
from criuctl.report import Reporter


class Case:
    """A named pipe that this process has open, and what the checkpoint says of it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(path)
        self.path, self.fd = path, os.open(path, os.O_RDWR | os.O_NONBLOCK)
        status = path.stat()
        self.queue = SavedQueue(
            status.st_ino & 0xFFFFFFFF, b"SSSS", 65536, (str(path),), ((7, 3),), True
        )
        self.record = FifoRecord(
            str(path),
            status.st_ino,
            status.st_dev,
            ((os.getpid(), ProcessIdentity.of(os.getpid()).start_time),),
        )
        self.reporter = Reporter()
        self.left: set[int] = set()
        monkeypatch.setattr(fifos, "saved_queues", lambda images: [self.queue])
        monkeypatch.setattr(fifos, "drop_queues", lambda images, numbers: self.left.update(numbers))

    def settle(
        self,
        *records: FifoRecord,
        boot: str = "",
        running: bool = False,
        copy: bool = False,
        tree: tuple[ProcessRecord, ...] = (),
    ) -> bool:
        """Whether nothing would be written into it."""
        host = HostInfo(boot_id=boot or boot_id())
        about = Manifest(
            "0" * 32,
            SessionRef("s", "0" * 32),
            host=host,
            fifos=records,
            criu={"leave_running": running},
            processes=tree,
        )
        with fifos.settled(ImageSet(-1), about, self.reporter, "", copy=copy):
            pass
        return bool(self.left)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(tmp_path / "pipe", monkeypatch)
    yield made
    os.close(made.fd)


def test_one_that_criu_takes_for_another_one_is_refused(case: Case) -> None:
    """As it may have come since the look before the freeze."""
    me = read_tree(os.getpid())[0]
    (held,) = (d for d in descriptors(os.getpid()) if d.fd == case.fd)
    fifos.with_unread(ImageSet(-1), [me], {me.pid: [held]})
    other = held._replace(fd=9, device=held.device + 1, target="/other/pipe")
    with pytest.raises(
        DumpFailed, match=r"/other/pipe have inodes of the same number.*; the tree runs on"
    ):
        fifos.with_unread(ImageSet(-1), [me], {me.pid: [held, other]})


def test_one_that_had_it_open_has_it_still(case: Case) -> None:
    os.write(case.fd, b"SSSSWW")
    assert case.settle(case.record) and case.reporter.warnings == []


def test_it_was_read_from(case: Case) -> None:
    assert case.settle(case.record)
    (warning,) = case.reporter.warnings
    assert (
        "the tree finds the 0 bytes that are in it now, not the 4 bytes that were unread then"
        in warning
    )


def test_others_have_it_open_by_now(case: Case) -> None:
    """Either passed on, as its contents show, or opened again."""
    others = FifoRecord(str(case.path), case.record.inode, case.record.device, ((1 << 22, 1),))
    assert not case.settle(others)
    os.write(case.fd, b"SSSS")
    assert case.settle(others)


def test_it_ended_with_the_tree(case: Case) -> None:
    alone = FifoRecord(str(case.path), case.record.inode, case.record.device)
    os.write(case.fd, b"SSSS")
    assert not case.settle(alone)
    assert case.reporter.codes == ["fifo-behind"]
    assert case.settle(alone, running=True)


def test_the_tree_has_not_ended(case: Case) -> None:
    """As one that is moved to another criuctl of the same host."""
    alone = FifoRecord(str(case.path), case.record.inode, case.record.device)
    os.write(case.fd, b"SSSS")
    me = ProcessRecord(pid=os.getpid(), ns_pid=7, start_time=case.record.outside[0][1])
    assert case.settle(alone, tree=(me,)) and case.reporter.warnings == []


def test_a_checkpoint_of_an_older_criuctl(case: Case) -> None:
    assert case.settle()
    assert case.reporter.codes == ["fifo-read-since"]


def test_another_boot(case: Case) -> None:
    os.write(case.fd, b"SSSS")
    assert not case.settle(case.record, boot="another") and not case.settle(boot="another")


def test_another_file_system(case: Case) -> None:
    assert not case.settle(
        FifoRecord(str(case.path), case.record.inode, case.record.device + 1, case.record.outside)
    )


def test_a_copy_next_to_a_reader(case: Case) -> None:
    """Wherever it is from."""
    assert case.settle(case.record, boot="another", copy=True)
    assert case.reporter.codes == ["fifo-shared"]


def test_nothing_was_unread(case: Case) -> None:
    case.queue = SavedQueue(case.queue.number, b"", 65536, case.queue.paths, (), True)
    assert case.settle() and case.reporter.warnings == []
    case.left.clear()
    case.queue = SavedQueue(case.queue.number, b"", 1 << 20, case.queue.paths, (), True)
    assert not case.settle()  # CRIU makes it larger


def test_no_process_has_it_open(case: Case) -> None:
    os.close(case.fd)
    try:
        assert not case.settle(case.record)
    finally:
        case.fd = os.open(case.path, os.O_RDWR | os.O_NONBLOCK)
