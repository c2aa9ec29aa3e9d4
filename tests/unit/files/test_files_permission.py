"""The rule for what a restored process may get back by a path, on real files."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from criuctl.checkpoint.file_records import FileRecord, InodeRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, SessionRef
from criuctl.criu.heldfiles import HeldFile, Use
from criuctl.criu.mountspaces import MountSpaces
from criuctl.criu.procfiles import LateFile
from criuctl.errors import Damaged, RestoreFailed
from criuctl.files import inode_records
from criuctl.files.permission import Judge, Objection, check_flags
from criuctl.host.registry import boot_id
from criuctl.proc import inodes
from criuctl.proc.credentials import Credentials
from criuctl.proc.path_control import PathLookup
from criuctl.restore.comparison import compare_late
from criuctl.restore.mount_views import Views

USER, STRANGER = 1001, 1002
ROOT = Credentials(0, 0, capabilities=(1 << 41) - 1)
OWN = Credentials(USER, USER)
HERE = HostInfo(boot_id=boot_id())
MANIFEST = Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), host=HERE)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of root's that everybody may pass."""
    with tempfile.TemporaryDirectory(prefix="criuctl-granting-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@pytest.fixture
def home(place: Path) -> Path:
    """A folder of the user's in one of root's."""
    folder = place / "home"
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder


def make(path: Path, uid: int = USER, mode: int = 0o600) -> Path:
    path.write_text("it")
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path


def judged(
    path: Path,
    user: Credentials = OWN,
    flags: int = os.O_RDWR,
    *,
    known: dict[str, InodeRecord] | None = None,
    certain: bool = False,
    owner: int | None = None,
    record: FileRecord | None = None,
) -> Objection | None:
    held = HeldFile(1, str(path), 0, flags, (Use(7, "descriptor", 3, flags),))
    records: dict[str, FileRecord | InodeRecord] = dict(known or {})
    if record is not None:
        records[str(path)] = record
    if owner is not None:
        records[str(path)] = InodeRecord(path=str(path), uid=owner)
    judge = Judge(MANIFEST, known or {}, records, {7: user}, certain)
    with PathLookup() as lookup, lookup.at(str(path)) as found:
        return judge.objection(held, found, None)


def test_a_user_s_own_file(home: Path) -> None:
    assert judged(make(home / "file")) is None


def test_the_mode_counts(home: Path) -> None:
    """It may read, but not write."""
    file = make(home / "file", STRANGER, 0o644)
    assert judged(file, flags=os.O_RDONLY) is None
    refused = judged(file)
    assert refused is not None and str(refused.fault.component) == str(home)
    assert "PID 7 (descriptor 3)" in str(refused)


def test_what_the_user_may_not_open_needs_evidence(place: Path) -> None:
    public, private = make(place / "public", 0, 0o644), make(place / "private", 0)
    assert judged(public, flags=os.O_RDONLY) is None
    assert judged(private, certain=True) is not None  # that root owns the path proves nothing
    assert judged(private) is not None
    assert judged(private, known={str(private): InodeRecord(path=str(private))}) is not None
    with open(private) as file:
        status, born = os.fstat(file.fileno()), inodes.born(file.fileno())
        same = InodeRecord(
            path=str(private),
            device=status.st_dev,
            inode=status.st_ino,
            born=born,
            handle=inodes.handle(file.fileno()),
        )
    assert judged(private, known={str(private): same}) is None


@pytest.mark.parametrize(
    ("then", "now", "fine"),
    [
        ((0, 0o640), (0, 0o640), True),  # a log that was rotated, or of another host
        ((0, 0o600), (0, 0o644), True),
        ((0, 0o644), (0, 0o600), False),
        ((0, 0o640), (4, 0o640), False),
        ((0, 0), (0, 0o600), False),  # not recorded
    ],
)
def test_what_root_opened_for_the_program(
    place: Path, then: tuple[int, int], now: tuple[int, int], fine: bool
) -> None:
    """Another file at root's own path is given if it is not stricter than at the dump."""
    file = make(place / "log", 0, now[1])
    os.chown(file, 0, now[0])
    record = FileRecord(path=str(file), kind="written", gid=then[0], mode=then[1])
    assert (judged(file, certain=True, record=record) is None) is fine
    assert judged(file, record=record) is not None


def test_links_of_the_user_s_own(place: Path, home: Path) -> None:
    """They lead where the user may go, and root nowhere."""
    make(place / "public", 0, 0o644)
    (home / "link").symlink_to(place / "public")
    os.chown(home / "link", USER, USER, follow_symlinks=False)
    assert judged(home / "link", flags=os.O_RDONLY) is None
    assert judged(home / "link") is not None
    refused = judged(home / "link", ROOT)
    assert refused is not None and refused.fault.component == str(home)


def test_what_a_stranger_has_put_into_a_common_folder(place: Path, home: Path) -> None:
    common = place / "common"
    common.mkdir()
    common.chmod(0o1777)
    own, strange = make(common / "own"), make(common / "strange", STRANGER, 0o666)
    assert judged(own) is None
    assert judged(strange) is not None
    assert judged(strange, owner=STRANGER) is None  # it was that user's at the dump
    os.link(own, home / "second")
    assert judged(own) is not None  # a link of any file of the user's


def test_root_in_a_user_s_folder(home: Path) -> None:
    """A file is as it was the user's; a second name of another file is not."""
    file = make(home / "file")
    assert judged(file, ROOT) is not None
    assert judged(file, ROOT, owner=USER) is None
    os.link(file, home / "second")
    assert judged(file, ROOT, owner=USER) is not None


def test_the_very_inode(place: Path, home: Path) -> None:
    """Whatever the path is; a later file with its number is another one."""
    file = make(home / "file", 0)
    with PathLookup() as lookup, lookup.at(str(file)) as found:
        status = found.status
        record = InodeRecord(
            path=str(file),
            device=status.st_dev,
            inode=status.st_ino,
            born=inodes.born(found.fd),
            handle=inodes.handle(found.fd),
        )
        assert record.born or record.handle
        assert inode_records.is_same(record, found.fd, MANIFEST)
        later = record.with_use(born=record.born and record.born - 1, handle="1:" + "00" * 8)
        assert not inode_records.is_same(later, found.fd, MANIFEST)
        bare = record.with_use(born=0, handle="")
        assert not inode_records.is_same(bare, found.fd, MANIFEST)
    assert judged(file) is not None
    assert judged(file, known={str(file): record}) is None
    assert place.is_dir()


def test_flags_that_no_open_file_has() -> None:
    """CRIU would empty the file as it opens it."""
    for flags in (os.O_TRUNC, os.O_CREAT, os.O_EXCL):
        with pytest.raises(Damaged):
            check_flags([HeldFile(1, "/x", 0, os.O_WRONLY | flags, ())])
    check_flags([HeldFile(1, "/x", 0, os.O_WRONLY | os.O_APPEND, ())])


@pytest.mark.parametrize(("name", "fine"), [("status", True), ("mem", False)])
def test_a_file_of_proc_that_its_process_opened_with_root_s_rights(name: str, fine: bool) -> None:
    """It is judged like one that CRIU opened: the user may not open another's memory."""
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/{name}"
    late = LateFile(path, os.O_RDONLY, 0, ((7, 0, False),))
    judge = Judge(MANIFEST, {}, {}, {7: OWN}, certain=True)
    with open(path, "rb") as file, subprocess.Popen(["sleep", "60"], stdin=file) as holder:
        try:
            with (
                nullcontext()
                if fine
                else pytest.raises(RestoreFailed, match="may not open it so now")
            ):
                compare_late(
                    [late],
                    judge,
                    {7: holder.pid},
                    Views(MountSpaces({}, {}), {7: holder.pid}, holder.pid),
                )
        finally:
            holder.kill()


@pytest.mark.parametrize("name", ["environ", "cmdline"])
def test_what_the_kernel_fills_is_judged_by_the_user_s_rights(name: str) -> None:
    """Neither root's path nor the inode proves that it is what it was; wherever it is mounted."""
    path = Path(f"/proc/{os.getpid()}/{name}")
    fine = name == "cmdline"
    with open(path) as file:
        status = os.fstat(file.fileno())
        record = InodeRecord(path=str(path), device=status.st_dev, inode=status.st_ino)
        for known in ({}, {str(path): record}):
            refused = judged(path, flags=os.O_RDONLY, known=known, certain=True)
            assert (refused is None) is fine
        assert judged(path, ROOT, known=known, certain=True) is None
