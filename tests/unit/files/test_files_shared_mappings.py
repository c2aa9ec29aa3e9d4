"""Which mappings write to their files, which files are in memory, and which ones travel because
they are small.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.files import recording, shared_mappings, used_files
from criuctl.proc.mappings import Mapping, mappings
from criuctl.proc.mounts import read_mounts


def mapping_of(path: Path) -> Mapping:
    (found,) = (m for m in mappings(os.getpid()) if m.path == str(path))
    return found


@pytest.mark.parametrize(
    ("pages", "flags", "sharing", "protection", "writes"),
    [
        (1, os.O_RDWR, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, True),
        (2, os.O_RDWR, mmap.MAP_SHARED, mmap.PROT_READ, True),  # mprotect(2) is all it takes
        (3, os.O_RDONLY, mmap.MAP_SHARED, mmap.PROT_READ, False),
        (4, os.O_RDWR, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, False),
    ],
)
def test_what_is_written_through(
    pages: int, flags: int, sharing: int, protection: int, writes: bool, tmp_path: Path
) -> None:
    """Each in a range of another length: of the same one the kernel may remember the mapping
    before.
    """
    path = tmp_path / "file"
    path.write_bytes(bytes(4096 * pages))
    fd = os.open(path, flags)
    with mmap.mmap(fd, 4096 * pages, flags=sharing, prot=protection):
        status = os.fstat(fd)
        os.close(fd)
        assert shared_mappings.writes(os.getpid(), mapping_of(path)) is writes
        entry = used_files.open_files({os.getpid(): []})[status.st_dev, status.st_ino]
        assert (entry.kind, entry.shared) == (("written", True) if writes else ("mapped", False))


def test_devices_are_no_files_of_the_tree() -> None:
    fd = os.open("/dev/zero", os.O_RDWR)
    with mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE):
        os.close(fd)
        assert "/dev/zero" in {m.path for m in mappings(os.getpid())}
        assert "/dev/zero" not in {
            entry.path for entry in used_files.open_files({os.getpid(): []}).values()
        }


def test_what_is_in_memory(tmp_path: Path) -> None:
    kinds = {mount.device: mount.kind for mount in read_mounts()}
    for place in (Path("/dev/shm"), Path("/proc"), tmp_path):
        assert shared_mappings.is_in_memory(str(place)) == (
            kinds.get(place.stat().st_dev) == "tmpfs"
        )
    (tmp_path / "link").symlink_to("/dev/shm")
    assert shared_mappings.is_in_memory(str(tmp_path / "link")) == shared_mappings.is_in_memory(
        str(tmp_path)
    )
    assert not shared_mappings.is_in_memory(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("bound", "small"), [(0, ""), (1, "ab"), (2, "ab"), (3, "abc"), (8, "abcd")]
)
def test_the_smallest_travel(bound: int, small: str, tmp_path: Path) -> None:
    entries = []
    for name, size in (("d", 5 << 20), ("b", 1 << 20), ("a", 0), ("c", 2 << 20)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
        entries.append(used_files.OpenFile(name, str(tmp_path / name), kind="written"))
    (tmp_path / "read").touch()
    entries.append(used_files.OpenFile("read", str(tmp_path / "read")))
    entries.append(used_files.OpenFile("gone", str(tmp_path / "gone"), kind="written"))
    recording.mark_small(Config(files_small_mib=bound), entries)
    assert "".join(sorted(entry.path for entry in entries if entry.small)) == small
