"""Recorded files against present ones: judged, put back, undone."""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from criuctl.checkpoint.file_records import FileRecord, LinkRecord
from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.writer import CheckpointWriter, FileDigest
from criuctl.config import Config
from criuctl.criu.images import ImageSet
from criuctl.errors import Damaged, RestoreFailed
from criuctl.files import carried_files, link_remaps, used_files
from criuctl.files.contents import digest
from criuctl.files.deleted_names import DeletedName
from criuctl.files.judgement import Policy, judge, judge_all
from criuctl.files.put_back import Applied
from criuctl.report import Reporter
from criuctl.store import open_store

OLD = b"as it was at the freeze\n" * 100


def record(path: Path, *, kind: str = "written", append: bool = False) -> FileRecord:
    """The record of a file as it is now."""
    status = path.lstat()
    fd = os.open(path, os.O_RDONLY)
    try:
        hashed = digest(fd, status.st_size)
    finally:
        os.close(fd)
    return FileRecord(
        path=str(path),
        kind=kind,
        size=status.st_size,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        device=status.st_dev,
        digest=hashed,
        append=append,
        holders=((100, 3),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(OLD)
    path.chmod(0o640)
    return path


def grow(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"later\n")


def shrink(path: Path) -> None:
    os.truncate(path, 10)


def change(path: Path) -> None:
    path.write_bytes(OLD.upper())


def close_to_others(path: Path) -> None:
    path.chmod(0o600)


def nothing(_path: Path) -> None:
    """It stays as it is."""


@pytest.mark.parametrize(
    ("what", "kind", "append", "policy", "verdict"),
    [
        (nothing, "written", False, "restore", "same"),
        (nothing, "written", False, "refuse", "same"),
        (grow, "written", True, "restore", "grown"),
        (grow, "written", True, "refuse", "grown"),
        (grow, "written", False, "restore", "put-back"),  # its beginning is what was recorded
        (grow, "written", False, "refuse", "refuse"),
        (grow, "written", False, "keep", "moved-on"),
        (shrink, "written", True, "restore", "refuse"),
        (shrink, "written", True, "keep", "moved-on"),
        (change, "written", False, "restore", "refuse"),
        (Path.unlink, "written", False, "restore", "refuse"),
        (Path.unlink, "read", False, "restore", "refuse"),
        (grow, "read", False, "restore", "moved-on"),
        (change, "mapped", False, "restore", "same"),  # of the same size: CRIU compares build-ids
        (grow, "mapped", False, "restore", "refuse"),
        (Path.unlink, "mapped", False, "restore", "refuse"),
        (close_to_others, "written", False, "restore", "moved-on"),
        (close_to_others, "written", False, "refuse", "refuse"),
        (close_to_others, "read", False, "restore", "moved-on"),
        (close_to_others, "mapped", False, "keep", "moved-on"),
    ],
)
def test_judge(
    file: Path, what: Callable[[Path], None], kind: str, append: bool, policy: Policy, verdict: str
) -> None:
    kept = record(file, kind=kind, append=append)
    if kind == "mapped":  # programs and libraries are not hashed
        kept = kept.with_use(digest="")
    what(file)
    judged = judge(kept, policy)
    assert judged.verdict == verdict
    finding = judged.finding()
    if verdict == "refuse":
        assert finding is not None
        assert (finding.level, finding.pid, finding.fd) == ("error", 100, 3)
        assert finding.hint
        assert str(file) in finding.text


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a/./b", "/a/"])
def test_hostile_paths(file: Path, path: str) -> None:
    with pytest.raises(Damaged):
        judge(record(file).with_use(path=path), "restore")


@pytest.fixture
def reader(tmp_path: Path, file: Path) -> tuple[CheckpointReader, FileRecord]:
    """A reader of a checkpoint that carries `file`, and the record of that."""
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    repository = Repository.open(
        open_store(str(tmp_path / "store"), config), config, create_local=True
    )
    with repository.writer(Reporter()) as writer:
        fd = os.open(file, os.O_RDONLY)
        writer.add_file("file", fd, len(OLD))
        os.close(fd)
        kept = record(file, kind="carried").with_use(data=writer.stream("file"))
        writer.commit(Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), files=(kept,)))
    return repository.reader(Reporter()), kept


@pytest.mark.parametrize("what", [grow, shrink, change, Path.unlink])
def test_put_back_keeps_the_newer_copy_and_can_be_undone(
    file: Path, reader: tuple[CheckpointReader, FileRecord], what: Callable[[Path], None]
) -> None:
    source, kept = reader
    what(file)
    newer = file.read_bytes() if file.exists() else None
    applied = Applied(source, "abcd1234")
    applied.apply(judge_all([kept], "restore"))
    assert file.read_bytes() == OLD
    status = file.stat()
    assert (status.st_mode, status.st_mtime_ns) == (kept.mode, kept.mtime_ns)
    if newer is not None:
        [(path, aside)] = applied.aside
        assert path == str(file)
        assert Path(aside).read_bytes() == newer
    applied.undo()
    assert (file.read_bytes() if file.exists() else None) == newer
    assert [p.name for p in file.parent.iterdir() if "newer" in p.name] == []


def test_a_grown_file_is_put_back_from_its_own_beginning(
    file: Path, reader: tuple[CheckpointReader, FileRecord]
) -> None:
    kept = record(file)
    grow(file)
    applied = Applied(reader[0], "abcd1234")
    applied.apply(judge_all([kept], "restore"))
    assert file.read_bytes() == OLD


@pytest.mark.parametrize("carried", [True, False])
def test_an_older_copy_leaves_the_file_alone_and_can_be_undone(
    file: Path, reader: tuple[CheckpointReader, FileRecord], carried: bool
) -> None:
    kept = reader[1] if carried else record(file)
    grow(file)
    newer, inode = file.read_bytes(), file.stat().st_ino
    (judged,) = judge_all([kept], "restore")
    applied = Applied(reader[0], "abcd1234")
    applied.apply([replace(judged, verdict="beside")])
    own = Path(applied.own[str(file)])
    assert (
        own.parent == file.parent
        and own.name.startswith(f"{file.name}.older-abcd1234-")
        and not applied.aside
    )
    assert (own.read_bytes(), own.stat().st_mode, own.stat().st_mtime_ns) == (
        OLD,
        kept.mode,
        kept.mtime_ns,
    )
    assert (file.read_bytes(), file.stat().st_ino) == (newer, inode)
    applied.undo()
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(file.name)] == [
        file.name
    ]
    assert file.read_bytes() == newer


def test_what_is_set_aside_is_renamed_and_can_be_undone(
    file: Path, reader: tuple[CheckpointReader, FileRecord]
) -> None:
    (judged,) = judge_all([record(file)], "restore")
    applied = Applied(reader[0], "abcd1234")
    applied.apply(
        [
            replace(judged, verdict="set-aside"),
            replace(judged, record=record(file).with_use(path=f"{file}-gone")),
        ]
    )
    ((path, aside),) = applied.aside
    assert path == str(file) and not file.exists() and Path(aside).read_bytes() == OLD
    assert Path(aside).name.startswith(f"{file.name}.newer-abcd1234-")
    applied.undo()
    assert [one.name for one in file.parent.iterdir() if one.name.startswith(file.name)] == [
        file.name
    ]


def test_an_empty_file_comes_back_though_it_did_not_travel(
    file: Path, reader: tuple[CheckpointReader, FileRecord]
) -> None:
    file.write_bytes(b"")
    kept = record(file)
    file.unlink()
    assert judge(kept.with_use(path=str(file / "none" / "data")), "restore").verdict == "refuse"
    applied = Applied(reader[0], "abcd1234")
    applied.apply(judge_all([kept], "restore"))
    status = file.stat()
    assert (status.st_size, status.st_mode, status.st_mtime_ns) == (0, kept.mode, kept.mtime_ns)
    applied.undo()
    assert not file.exists()


def test_a_folder_with_links_is_put_back(
    tmp_path: Path, reader: tuple[CheckpointReader, FileRecord]
) -> None:
    source, kept = reader
    status = tmp_path.stat()
    place = tmp_path / "work"
    folder = kept.with_use(
        path=str(place), kind="carried", mode=0o40750, data=None, digest="", size=0
    )
    inside = kept.with_use(path=str(place / "one"))
    twin = kept.with_use(path=str(place / "two"))
    link = kept.with_use(
        path=str(place / "link"), mode=0o120777, target="one", data=None, digest="", size=3, inode=1
    )
    applied = Applied(source, "abcd1234")
    applied.apply(judge_all([twin, link, inside, folder], "restore"))
    assert (place / "one").read_bytes() == OLD
    assert (place / "one").stat().st_ino == (place / "two").stat().st_ino
    assert os.readlink(place / "link") == "one"
    assert place.stat().st_mode == 0o40750
    assert place.stat().st_mtime_ns == folder.mtime_ns
    applied.undo()
    assert not place.exists()
    assert tmp_path.stat().st_ino == status.st_ino


@pytest.mark.parametrize("verdict", ["put-back", "beside"])
@pytest.mark.parametrize("links", [True, False])
def test_two_names_are_one_file_again(
    links: bool,
    verdict: Literal["put-back", "beside"],
    file: Path,
    reader: tuple[CheckpointReader, FileRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless they are on two file systems here, which is reported."""
    (twin := file.with_name("twin")).hardlink_to(file)
    kept = record(file)
    grow(file)
    judged = [
        replace(j, verdict=verdict)
        for j in judge_all([kept, kept.with_use(path=str(twin))], "restore")
    ]
    if not links:
        monkeypatch.setattr(os, "link", raising(OSError(errno.EXDEV, "Invalid cross-device link")))
    applied = Applied(reader[0], "abcd1234")
    applied.apply(judged)
    made = [Path(applied.own.get(str(path), path)) for path in (file, twin)]
    assert [path.read_bytes() for path in made] == [OLD, OLD]
    assert made[0].samefile(made[1]) == links
    assert applied.apart == ([] if links else [(str(made[1]), str(made[0]))])
    applied.undo()
    assert file.samefile(twin) and sorted(p.name for p in file.parent.iterdir() if p.is_file()) == [
        file.name,
        "twin",
    ]


def test_a_name_that_is_gone_is_one_of_the_file_that_is_as_it_was(
    file: Path, reader: tuple[CheckpointReader, FileRecord]
) -> None:
    """Also where two paths lead to it: what is there already is not made again."""
    (twin := file.with_name("twin")).hardlink_to(file)
    (file.parent / "way").symlink_to(file.parent)
    kept = reader[1].with_use(path=str(twin))
    twin.unlink()
    applied = Applied(reader[0], "abcd1234")
    applied.apply(
        judge_all(
            [record(file), kept, kept.with_use(path=str(file.parent / "way" / "twin"))], "restore"
        )
    )
    assert twin.samefile(file) and file.stat().st_nlink == 2 and not applied.aside
    applied.undo()
    assert not twin.exists() and file.stat().st_nlink == 1


def raising(error: OSError) -> Callable[..., None]:
    def fail(*_arguments: Any, **_more: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("call", ["rename", "open"])
def test_a_signal_in_the_middle_is_undone_too(
    call: str,
    file: Path,
    reader: tuple[CheckpointReader, FileRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is served as soon as the system call returns in which it came."""
    source, kept = reader
    (change if call == "rename" else Path.unlink)(file)
    before = sorted((path, path.read_bytes()) for path in file.parent.iterdir() if path.is_file())
    judged = judge_all([kept], "restore")
    applied = Applied(source, "abcd1234")
    does = getattr(os, call)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        done = does(*arguments, **more)
        if call == "open" and not arguments[1] & os.O_CREAT:
            return done  # on the way there
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied.apply(judged)
    applied.undo()
    assert (
        sorted((path, path.read_bytes()) for path in file.parent.iterdir() if path.is_file())
        == before
    )


def test_what_takes_its_place_meanwhile_is_not_touched(
    file: Path,
    tmp_path: Path,
    reader: tuple[CheckpointReader, FileRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder may belong to another user, who replaces the file by a link to a third user's file
    at that moment.
    """
    source, kept = reader
    file.unlink()
    victim = tmp_path / "victim"
    victim.write_text("secret")
    victim.chmod(0o600)
    os.utime(victim, (1, 1))
    write_to = source.write_to

    def swapped(*arguments: Any) -> None:
        write_to(*arguments)
        file.rename(tmp_path / "made")
        file.symlink_to(victim)

    monkeypatch.setattr(source, "write_to", swapped)
    Applied(source, "abcd1234").apply(judge_all([kept], "restore"))
    status = victim.stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o600, 1)
    assert (tmp_path / "made").stat().st_mode == kept.mode


@pytest.fixture
def home(
    tmp_path: Path, reader: tuple[CheckpointReader, FileRecord]
) -> tuple[CheckpointReader, FileRecord, Path, Path]:
    """A carried file, which is gone, in a folder of another user; and a folder of root's."""
    work, etc = tmp_path / "home" / "work", tmp_path / "etc"
    work.mkdir(parents=True)
    etc.mkdir()
    for folder in (work.parent, work):
        os.chown(folder, 65534, 65534)
    source, kept = reader
    return source, kept.with_use(path=str(work / "data")), work, etc


def replaced_by_a_link(work: Path, target: Path) -> None:
    work.rename(work.with_name("moved"))
    work.symlink_to(target)
    os.chown(work, 65534, 65534, follow_symlinks=False)


def test_no_other_user_leads_it_elsewhere(
    home: tuple[CheckpointReader, FileRecord, Path, Path],
) -> None:
    _source, kept, work, etc = home
    replaced_by_a_link(work, etc)
    (judged,) = judge_all([kept], "restore")
    assert judged.verdict == "refuse" and str(work) in judged.why and judged.hint
    mine = work.with_name("mine")
    work.with_name("moved").rename(mine)
    work.unlink()
    work.symlink_to(mine)
    os.chown(work, 65534, 65534, follow_symlinks=False)
    (judged,) = judge_all([kept], "restore")
    assert judged.verdict == "put-back"  # where that user can write anyway


@pytest.mark.parametrize("below", ["", "new/newer/"])
def test_nor_in_the_last_moment(
    home: tuple[CheckpointReader, FileRecord, Path, Path], below: str
) -> None:
    source, kept, work, etc = home
    judged = judge_all([kept.with_use(path=f"{work}/{below}data")], "restore")
    assert judged[0].verdict == "put-back"
    replaced_by_a_link(work, etc)
    applied = Applied(source, "abcd1234")
    with pytest.raises(RestoreFailed, match="symbolic link"):
        applied.apply(judged)
    applied.undo()
    assert os.listdir(etc) == os.listdir(work.with_name("moved")) == []


def test_what_is_undone_is_undone_where_it_was_done(
    home: tuple[CheckpointReader, FileRecord, Path, Path],
) -> None:
    source, kept, work, etc = home
    applied = Applied(source, "abcd1234")
    applied.apply(judge_all([kept], "restore"))
    assert (work / "data").read_bytes() == OLD
    replaced_by_a_link(work, etc)
    (etc / "data").write_text("another one")
    applied.undo()
    assert (etc / "data").read_text() == "another one"


def test_a_link_in_the_place_of_a_carried_folder_is_set_aside(
    home: tuple[CheckpointReader, FileRecord, Path, Path],
) -> None:
    source, kept, work, etc = home
    folder = kept.with_use(path=str(work), mode=0o40750, data=None, digest="", size=0, inode=1)
    replaced_by_a_link(work, etc)
    applied = Applied(source, "abcd1234")
    applied.apply(judge_all([kept, folder], "restore"))
    assert work.is_dir() and not work.is_symlink()
    assert (work / "data").read_bytes() == OLD
    applied.undo()
    assert work.is_symlink()
    assert os.listdir(etc) == []


@pytest.mark.parametrize("name", ["n" * 300, "round/data"])
def test_what_cannot_be_looked_at_is_refused(file: Path, name: str) -> None:
    (file.parent / "round").symlink_to("round")
    judged = judge(record(file).with_use(path=str(file.parent / name)), "restore")
    assert judged.verdict == "refuse" and "cannot be looked at" in judged.why


def test_a_restore_does_not_wait_at_a_fifo(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put there by another user just after it was looked at."""
    kept, status = record(file), file.lstat()
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr(os, "lstat", lambda _path: status)

    def hung(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(10)
    try:
        judged = judge(kept, "restore")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert judged.verdict == "refuse" and "not a regular file" in judged.why


def test_helper_links_are_made_and_removed_where_they_were(
    home: tuple[CheckpointReader, FileRecord, Path, Path], tmp_path: Path
) -> None:
    source, kept, work, etc = home
    assert kept.data is not None
    link = LinkRecord(str(work / "link_remap.1"), kept.data, mode=0o100600, uid=65534, gid=65534)
    name = DeletedName((link,), "apart", str(work / "a"))
    (tmp_path / "images").mkdir()
    images = ImageSet(os.open(tmp_path / "images", os.O_RDONLY))
    with link_remaps.provided([name], images, source, {}, Reporter()):
        (made,) = work.iterdir()
        assert made.read_bytes() == OLD and made.name.startswith("link_remap.1.")
    assert os.listdir(work) == []
    replaced_by_a_link(work, etc)
    with (
        pytest.raises(RestoreFailed, match="symbolic link"),
        link_remaps.provided([name], images, source, {}, Reporter()),
    ):
        pass
    os.close(images.folder)
    assert os.listdir(etc) == []


def test_a_mapped_file_is_the_one_that_is_mapped(tmp_path: Path) -> None:
    """Whatever another process puts at its path between one look and the next."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "data").write_bytes(OLD)
    with (
        (tmp_path / "lib" / "data").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
    ):
        status = os.fstat(file.fileno())
        found = used_files.open_files({os.getpid(): []})
        (tmp_path / "lib").rename(tmp_path / "old")
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "data").write_bytes(b"another")
        entry = found[status.st_dev, status.st_ino]
        assert entry.path == str(tmp_path / "lib" / "data")
        assert Path(entry.source).read_bytes() == OLD


def test_a_file_that_is_made_shorter_while_it_is_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a log is by logrotate's copytruncate: it comes back with what was read, not with zeros
    behind that.
    """
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    repository = Repository.open(
        open_store(str(tmp_path / "store"), config), config, create_local=True
    )
    add_file = CheckpointWriter.add_file

    def truncated(self: CheckpointWriter, key: Hashable, fd: int, size: int) -> FileDigest:
        os.truncate(file, 10)
        return add_file(self, key, fd, size)

    monkeypatch.setattr(CheckpointWriter, "add_file", truncated)
    reporter = Reporter()
    with repository.writer(reporter) as writer:
        ((kept, _identity),) = carried_files.carry(
            writer, str(file), os.getpid(), {}, set(), reporter
        )
        writer.commit(Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), files=(kept,)))
    assert [str(file) in warning for warning in reporter.warnings] == [True]
    assert judge(kept, "restore").verdict == "same"
    file.unlink()
    Applied(repository.reader(Reporter()), "abcd1234").apply(judge_all([kept], "restore"))
    assert file.read_bytes() == OLD[:10]
