"""What ``--with-files`` names, walked as the tree sees it and while others move about what is
theirs.
"""

from __future__ import annotations

import base64
import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.config import Config
from criuctl.errors import DumpFailed, PreflightRefused
from criuctl.files import carried_files, recording
from criuctl.files.carried_binaries import Binaries
from criuctl.proc.descriptors import descriptors
from criuctl.report import Reporter

BOB = 65534
MAPPED = """
import mmap, os, sys
from criuctl.files.used_files import open_files
with open(sys.argv[1], "rb") as file:
    mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
try:
    for name in os.listdir("/proc/self/map_files"):
        os.stat(f"/proc/self/map_files/{name}")
except PermissionError:
    print("no right")
for key, entry in open_files({os.getpid(): []}).items():
    if entry.path == sys.argv[1]:
        status = os.stat(sys.argv[1])
        print(open(entry.source).read(), key == (status.st_dev, status.st_ino))
"""


def test_a_folder_that_becomes_a_link_during_the_walk_leads_nowhere(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    (tmp_path / "named" / "his").mkdir(parents=True)
    (tmp_path / "named" / "his" / "secret").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "secret").write_text("of somebody else")
    found = {}
    carried = carried_files.carry(
        writer, str(tmp_path / "named"), os.getpid(), {}, set(), Reporter()
    )
    for record, _identity in carried:
        found[record.path] = record
        if record.path.endswith("/his"):  # what is in it has not been looked at yet
            (tmp_path / "named" / "his").rename(tmp_path / "away")
            (tmp_path / "named" / "his").symlink_to(tmp_path / "foreign")
    assert sorted(found) == [str(tmp_path / "named"), str(tmp_path / "named" / "his")]


def test_a_link_of_another_user_on_the_way_is_not_followed(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "secret").write_text("of somebody else")
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", BOB, BOB)
    (tmp_path / "home" / "work").symlink_to(tmp_path / "foreign")
    named = str(tmp_path / "home" / "work" / "secret")
    with pytest.raises(PreflightRefused, match="symbolic link"):
        carried_files.resolve_carried([named], os.getpid())
    with pytest.raises(PreflightRefused, match="symbolic link"):
        list(carried_files.carry(writer, named, os.getpid(), {}, set(), Reporter()))
    # put there in the freeze: the tree was touched
    with pytest.raises(DumpFailed, match="symbolic link"):
        recording.collect(
            writer,
            Config(),
            {},
            [named],
            Binaries(os.getpid(), wanted=False),
            os.getpid(),
            Reporter(),
        )
    with pytest.raises(PreflightRefused, match="no such file"):
        carried_files.resolve_carried([str(tmp_path / "foreign" / "none")], os.getpid())


def test_what_is_named_by_a_link_is_taken_along_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the name that the tree has it open under; ``..`` behind a link is above what that
    leads to.
    """
    (tmp_path / "releases" / "7").mkdir(parents=True)
    (tmp_path / "releases" / "file").touch()
    (tmp_path / "releases" / "7" / "file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "current").symlink_to("newest")
    (tmp_path / "newest").symlink_to(tmp_path / "releases" / "7")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "round").symlink_to("round")
    monkeypatch.chdir(tmp_path)

    def found(*named: str) -> list[str]:
        return [
            os.path.relpath(path, tmp_path)
            for path in carried_files.resolve_carried(named, os.getpid())
        ]

    assert found("current") == found("current/") == ["current", "newest", "releases/7"]
    assert found("current/file") == ["releases/7/file"]
    assert found("current/../file") == ["releases/file"]
    assert found("current/..", "releases") == ["releases"]
    assert found("nowhere") == ["nowhere"]
    assert found(".", "releases/./7//file") == [".", "releases/7/file"]
    for named in ("/proc/self/status", "/sys/kernel/mm"):
        with pytest.raises(PreflightRefused, match="the kernel's"):
            found(named)
    assert found(f"/proc/self/root/{tmp_path}/file") == ["file"]
    for named in ("round", "gone", "file/below", "nowhere/file"):
        with pytest.raises(PreflightRefused, match="no such file"):
            found(named)


def test_an_unreadable_file_fails_the_dump(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        carried_files,
        "open_contents",
        Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")),
    )
    with pytest.raises(
        DumpFailed, match="file cannot be taken along: Permission denied; the tree runs on"
    ):
        list(
            carried_files.carry(writer, str(tmp_path / "file"), os.getpid(), {}, set(), Reporter())
        )


def test_a_link_of_another_user_does_not_take_along_what_is_not_his(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", BOB, BOB)
    (tmp_path / "home" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(PreflightRefused, match="symbolic link"):
        carried_files.resolve_carried([str(tmp_path / "home" / "link")], os.getpid())


def test_links_lead_where_they_lead_the_tree(tmp_path: Path, writer: CheckpointWriter) -> None:
    """In a tree with a root folder of its own, an absolute link and ``..`` stay in there."""
    root = tmp_path / "root"
    (root / "srv" / "data").mkdir(parents=True)
    (root / "srv" / "data" / "file").write_text("of the tree")
    (root / "absolute").symlink_to("/srv")
    (root / "upwards").symlink_to("../../../../../../srv")
    program = "import os, sys; os.chroot(sys.argv[1]); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        ["python3", "-c", program, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        for name in ("absolute", "upwards"):
            named = "/srv/data"
            assert carried_files.resolve_carried([f"/{name}/data"], child.pid) == [named]
            assert carried_files.resolve_carried(
                [f"/{name}", f"/{name}/data/../data/"], child.pid
            ) == [
                f"/{name}",
                "/srv",
                named,
            ]
            carried = carried_files.carry(writer, named, child.pid, {}, set(), Reporter())
            assert [record.path for record, _identity in carried] == [named, f"{named}/file"]
        child.stdin.close()


def test_open_files_find_their_records_without_a_search(
    tmp_path: Path, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is frozen meanwhile, and may have many thousand files open."""
    compared = 0

    def equal(one: FileRecord, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    monkeypatch.setattr(FileRecord, "__eq__", equal)
    folder, pid = tmp_path / "named", os.getpid()
    folder.mkdir()
    with ExitStack() as stack:
        held = {
            str(folder / f"{n:03}"): stack.enter_context(open(folder / f"{n:03}", "ab")).fileno()
            for n in range(100)
        }
        opened = {pid: [d for d in descriptors(pid) if d.target in held]}
        binaries = Binaries(pid, wanted=False)
        found = recording.collect(
            writer, Config(), opened, [str(folder)], binaries, pid, Reporter()
        )
    records = {record.path: record for record in found if record.kind == "carried"}
    assert sorted(records) == [str(folder), *sorted(held)]
    assert all(
        records[path].holders == ((pid, fd),) and records[path].append for path, fd in held.items()
    )
    assert compared == 0


def test_extended_attributes_come_along(tmp_path: Path, writer: CheckpointWriter) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "file").touch()
    (tmp_path / "named" / "link").symlink_to("file")
    for name in ("named", "named/file", "named/link"):
        os.setxattr(tmp_path / name, "trusted.criuctl", name.encode(), follow_symlinks=False)
    carried = carried_files.carry(
        writer, str(tmp_path / "named"), os.getpid(), {}, set(), Reporter()
    )
    found = {
        record.path: base64.b64decode(record.xattrs["trusted.criuctl"]).decode()
        for record, _identity in carried
    }
    assert found == {str(tmp_path / name): name for name in ("named", "named/file", "named/link")}


def test_mapped_files_are_read_by_their_paths_where_the_kernel_tells_no_more(
    tmp_path: Path,
) -> None:
    """As root of a container, say, which has not all rights."""
    (tmp_path / "file").write_text("mapped")
    argv = [
        "setpriv",
        "--bounding-set",
        "-sys_admin,-cap_40",
        sys.executable,
        "-c",
        MAPPED,
        str(tmp_path / "file"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("no right\nmapped True\n", "")
