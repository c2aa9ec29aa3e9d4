"""Copies of folder trees, with and without reflinks."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.errors import PreflightRefused
from criuctl.files.clone_tree import MAX_DEPTH, CloneReport, Limits, clone_tree

BOB = 65534
ROOMY = Limits(64 << 20, 1000)


def copied(source: Path, target: Path, limits: Limits = ROOMY) -> CloneReport:
    target.mkdir(mode=0o700)
    fds = [os.open(one, os.O_PATH) for one in (source, target)]
    try:
        return clone_tree(fds[0], fds[1], limits)
    finally:
        for fd in fds:
            os.close(fd)


def skipped(report: CloneReport) -> dict[str, str]:
    return {one.path: one.reason for one in report.skipped}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A file system with reflinks."""
    image, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    image.touch()
    os.truncate(image, 320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def _fill(tree: Path) -> None:
    """Make one of everything that is kept."""
    (tree / "inner").mkdir(mode=0o2750)
    (tree / "inner" / "data").write_bytes(os.urandom(3 << 20))
    os.link(tree / "inner" / "data", tree / "same")
    (tree / "link").symlink_to("inner/data")
    os.link(tree / "link", tree / "same-link", follow_symlinks=False)
    (tree / "out").symlink_to("/etc/passwd")
    os.mkfifo(tree / "pipe", 0o640)
    with open(tree / "holes", "wb") as file:
        file.seek(8 << 20)
        file.write(b"middle")
        file.truncate(16 << 20)
    (tree / "empty").touch()
    os.setxattr(tree / "empty", "user.note", b"kept")
    os.chmod(tree / "empty", 0o4755)
    subprocess.run(["setfacl", "-m", "u:games:r", tree / "holes"], check=True)
    subprocess.run(["setfacl", "-d", "-m", "u:games:rwx", tree / "inner"], check=True)
    (tree / b"\xff\n".decode(errors="surrogateescape")).write_text("name")
    for path in sorted(tree.rglob("*"), reverse=True):
        os.chown(path, BOB, BOB, follow_symlinks=False)
    os.chmod(tree / "empty", 0o4755)  # chown has cleared it
    os.chmod(tree / "inner", 0o2750)
    os.chown(tree, BOB, BOB)
    for n, path in enumerate(sorted(tree.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18 + n, 10**18 + 2 * n + 1), follow_symlinks=False)
    os.utime(tree, ns=(10**18, 10**18 + 5))


def _described(top: Path) -> dict[str, object]:
    """Describe everything about each file but its inode number and time of change."""
    found: dict[str, object] = {}
    names: dict[int, str] = {}
    for path in [top, *sorted(top.rglob("*"))]:
        status = path.lstat()
        name = str(path.relative_to(top))
        contents: object = None
        if stat.S_ISREG(status.st_mode):
            contents = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            contents = os.readlink(path)
        attributes = {
            one: _unordered(os.getxattr(path, one, follow_symlinks=False))
            for one in os.listxattr(path, follow_symlinks=False)
            if not one.startswith("trusted.SGI_ACL_")  # the ACLs again, as xfs stores them
        }
        first = names.setdefault(status.st_ino, name)
        owner = (status.st_mode, status.st_uid, status.st_gid)
        found[name] = (owner, status.st_mtime_ns, contents, attributes, first)
    return found


def _unordered(attribute: bytes) -> list[bytes]:
    """Return the entries of an ACL, which file systems keep in an order of their own."""
    return [attribute[:4], *sorted(attribute[n : n + 8] for n in range(4, len(attribute), 8))]


def test_everything_is_kept(tree: Path, tmp_path: Path) -> None:
    _fill(tree)
    files = [path for path in tree.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
    times = {path: path.lstat().st_atime_ns for path in files}
    report = copied(tree, tmp_path / "copy")
    after = {path: path.lstat().st_atime_ns for path in times}
    assert _described(tmp_path / "copy") == _described(tree)
    assert (report.skipped, report.changed) == ([], [])
    assert report.files == len(list(tree.rglob("*")))
    assert after == times  # reading it left no trace


def test_holes_stay_holes(tree: Path, tmp_path: Path) -> None:
    with open(tree / "sparse", "wb") as file:
        file.seek(1 << 40)
        file.write(b"end")
    report = copied(tree, tmp_path / "copy")
    made = (tmp_path / "copy" / "sparse").stat()
    assert made.st_size == (1 << 40) + 3
    assert made.st_blocks * 512 < 1 << 20
    assert 3 <= report.size <= 1 << 16


def test_blocks_are_shared_where_the_file_system_can(xfs: Path) -> None:
    (xfs / "tree").mkdir()
    _fill(xfs / "tree")
    (xfs / "tree" / "large").write_bytes(os.urandom(40 << 20))
    used = _used(xfs)
    report = copied(xfs / "tree", xfs / "copy")
    assert _described(xfs / "copy") == _described(xfs / "tree")
    assert (report.cloned, report.copied) == (5, 0)
    assert report.size >= 43 << 20
    assert _used(xfs) - used < 8 << 20
    (xfs / "copy" / "large").write_bytes(b"own")
    assert (xfs / "tree" / "large").stat().st_size == 40 << 20


def _used(place: Path) -> int:
    os.sync()
    now = os.statvfs(place)
    return (now.f_blocks - now.f_bfree) * now.f_frsize


def test_another_file_system_gets_a_plain_copy(xfs: Path, tree: Path, tmp_path: Path) -> None:
    _fill(tree)
    report = copied(tree, xfs / "copy")
    back = copied(xfs / "copy", tmp_path / "back")
    assert _described(xfs / "copy") == _described(tmp_path / "back") == _described(tree)
    assert [(one.cloned, one.copied) for one in (report, back)] == [(0, 4)] * 2


def test_what_cannot_be_copied_is_reported(tree: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tree / "socket"))
    os.mknod(tree / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (tree / "mounted").mkdir()
    (tree / "file").touch()
    subprocess.run(["mount", "--bind", "/etc", tree / "mounted"], check=True)
    subprocess.run(["mount", "--bind", "/etc/passwd", tree / "file"], check=True)
    try:
        report = copied(tree, tmp_path / "copy")
    finally:
        subprocess.run(["umount", tree / "mounted"], check=True)
        subprocess.run(["umount", tree / "file"], check=True)
    elsewhere = "another file system is mounted there"
    assert skipped(report) == {
        "socket": "it is a socket",
        "null": "it is a device",
        "mounted": elsewhere,
        "file": elsewhere,
    }
    assert os.listdir(tmp_path / "copy") == []


def test_no_link_is_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("secret")
    (tree / "folder").symlink_to(tmp_path / "secret")
    (tree / "file").symlink_to(tmp_path / "secret" / "file")
    copied(tree, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == ["file", "folder"]
    assert all((tmp_path / "copy" / name).is_symlink() for name in ("file", "folder"))


def test_rights_that_only_root_could_give_stay_behind(tree: Path, tmp_path: Path) -> None:
    """A copy of root's program in a user's folder would outlive the update of the original."""
    os.chown(tree, BOB, BOB)
    for name, owner in (("roots", (0, 0)), ("own", (BOB, BOB)), ("group", (BOB, 42))):
        (tree / name).touch()
        os.chown(tree / name, *owner)
        (tree / name).chmod(0o6755)
    version, effective, net_raw = 0x02000000, 1, 1 << 13
    capability = struct.pack("<5I", version | effective, net_raw, 0, 0, 0)
    (tree / "able").touch()
    os.setxattr(tree / "able", "security.capability", capability)
    report = copied(tree, tmp_path / "copy")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "copy").iterdir()}
    assert modes == {"roots": 0o755, "own": 0o6755, "group": 0o755, "able": 0o644}
    assert os.listxattr(tmp_path / "copy" / "able") == []
    assert skipped(report).keys() == {"roots", "group", "able"}


def test_limits(tree: Path, tmp_path: Path) -> None:
    for n in range(5):
        (tree / str(n)).write_bytes(bytes(1 << 20))
    with pytest.raises(PreflightRefused, match="more than 4 files"):
        copied(tree, tmp_path / "few", Limits(64 << 20, 4))
    with pytest.raises(PreflightRefused, match="more than 4 MiB"):
        copied(tree, tmp_path / "small", Limits(4 << 20, 100))
    assert copied(tree, tmp_path / "enough", Limits(5 << 20, 5)).size == 5 << 20


def test_a_tree_without_end_is_refused(tree: Path, tmp_path: Path) -> None:
    deepest = tree.joinpath(*["d"] * (MAX_DEPTH + 1))
    deepest.mkdir(parents=True)
    with pytest.raises(PreflightRefused, match="levels deep"):
        copied(tree, tmp_path / "copy")


def test_the_error_names_the_file(tree: Path, tmp_path: Path) -> None:
    (tree / "a").mkdir()
    (tree / "a" / "taken").touch()
    (tmp_path / "copy" / "a").mkdir(parents=True)
    fds = [os.open(one, os.O_PATH) for one in (tree, tmp_path / "copy")]
    try:
        with pytest.raises(OSError, match="'a'") as raised:
            clone_tree(fds[0], fds[1], ROOMY)
    finally:
        for fd in fds:
            os.close(fd)
    assert raised.value.errno == errno.EEXIST


def test_a_leased_file_is_not_opened(tree: Path, tmp_path: Path) -> None:
    (tree / "leased").write_text("text")
    status = (tree / "leased").stat()
    (tmp_path / "copy").mkdir()
    fds = [os.open(one, os.O_PATH) for one in (tree, tmp_path / "copy")]
    try:
        report = clone_tree(fds[0], fds[1], ROOMY, {(status.st_dev, status.st_ino)})
    finally:
        for fd in fds:
            os.close(fd)
    assert "write lease" in skipped(report)["leased"]
    assert os.listdir(tmp_path / "copy") == []


def test_the_copy_has_no_acl_that_the_original_lacks(tree: Path, tmp_path: Path) -> None:
    (tree / "inner").mkdir()
    (tree / "inner" / "file").touch()
    subprocess.run(["setfacl", "-d", "-m", "u:games:rwx", tmp_path], check=True)
    copied(tree, tmp_path / "copy")
    assert _described(tmp_path / "copy") == _described(tree)
