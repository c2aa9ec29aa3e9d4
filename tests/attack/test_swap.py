"""Plain images stay in memory: the private tmpfs that holds them is never swapped out, or that it
may be is said.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from criuctl.errors import PlatformError
from criuctl.proc import procfs, scratch
from criuctl.proc.scratch import Scratch

pytestmark = pytest.mark.integration

_MOVE_MOUNT, _F_EMPTY_PATH, _AT_FDCWD, _NEWNS, _PRIVATE = 429, 4, -100, 0x20000, (1 << 18) | 16384
AREAS = b"Filename\tType\tSize\tUsed\tPriority\n"
DISK = b"/dev/dm-1                               partition\t1048572\t0\t-2\n"
ZRAM = b"/dev/zram0                              partition\t1048572\t0\t100\n"


def options(fd: int, folder: Path) -> str:
    """The options of the mount behind `fd`, as the kernel tells them where it is attached: in a
    namespace of a child's.
    """
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            libc.unshare(_NEWNS)
            libc.mount(b"none", b"/", None, _PRIVATE, None)
            libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, str(folder).encode(), _F_EMPTY_PATH)
            (line,) = (
                one
                for one in Path("/proc/self/mountinfo").read_text().splitlines()
                if f" {folder} " in one
            )
            os.write(writing, line.encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, "rb") as file:
        return file.read().decode()


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The swap areas that the kernel tells of."""
    areas: list[bytes] = []
    read = procfs.read_raw

    def read_swaps(path: str, dir_fd: int | None = None) -> bytes:
        return AREAS + b"".join(areas) if path == "/proc/swaps" else read(path, dir_fd)

    monkeypatch.setattr(procfs, "read_raw", read_swaps)
    return areas


def test_the_memory_that_holds_plain_images_is_never_swapped_out(
    tmp_path: Path, swap: list[bytes]
) -> None:
    swap.append(DISK)
    with Scratch() as images:
        line = options(images.fd, tmp_path / "images")
        assert " - tmpfs none " in line and "noswap" in line.rpartition(" ")[2].split(",")
        assert list(images.findings()) == []
    # of a tree that runs: they do not stay in memory for good
    with Scratch(executable=True) as files:
        assert "noswap" not in options(files.fd, tmp_path / "files")


def test_where_the_kernel_cannot_do_that_it_is_said(
    swap: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel older than 6.4, or for root of a user namespace."""
    mount = scratch.detached_mount

    def older(kind: str, settings: tuple[tuple[str, str | None], ...], attributes: int) -> int:
        if ("noswap", None) in settings:
            raise PlatformError("a private mount cannot be made: Invalid argument")
        return mount(kind, settings, attributes)

    monkeypatch.setattr(scratch, "detached_mount", older)
    with Scratch() as images:
        assert list(images.findings()) == []  # there is no swap area
        swap.append(ZRAM)
        assert list(images.findings()) == []  # it is memory
        swap.append(DISK)
        (finding,) = images.findings()
        assert (finding.level, finding.code) == ("warning", "swap") and "/dev/dm-1" in finding.text
