"""Who holds a lock that a checkpoint wants: asked of real locks of another process."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from criuctl.repairs import file_locks
from criuctl.repairs.file_locks import WantedLock

POSIX, FLOCK, OFD = 1, 2, 4
F_OFD_SETLK = 37


def _description(fd: int) -> None:
    fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 10, 20, 0))


TAKEN: dict[str, Callable[[int], None]] = {
    "exclusive": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX),
    "shared": lambda fd: fcntl.flock(fd, fcntl.LOCK_SH),
    "range": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX, 20, 10),
    "description": _description,
}


@contextmanager
def held(path: Path, take: Callable[[int], None]) -> Iterator[int]:
    """Another process that has the file locked; its PID."""
    done, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            take(os.open(path, os.O_RDWR))
            os.write(done_write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done_write)
    try:
        assert os.read(done, 1) == b"x"
        yield pid
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("taken", "flag", "type_", "start", "length", "refused"),
    [
        ("exclusive", FLOCK, fcntl.F_WRLCK, 0, 0, True),
        ("exclusive", FLOCK, fcntl.F_RDLCK, 0, 0, True),
        ("exclusive", POSIX, fcntl.F_WRLCK, 0, 0, False),  # the two kinds do not see each other
        ("shared", FLOCK, fcntl.F_RDLCK, 0, 0, False),
        ("shared", FLOCK, fcntl.F_WRLCK, 0, 0, True),
        ("range", POSIX, fcntl.F_WRLCK, 29, 1, True),
        ("range", OFD, fcntl.F_RDLCK, 0, 0, True),
        ("range", POSIX, fcntl.F_WRLCK, 30, 0, False),
        ("range", FLOCK, fcntl.F_WRLCK, 0, 0, False),
        ("description", POSIX, fcntl.F_RDLCK, 10, 1, True),
        ("description", OFD, fcntl.F_WRLCK, 0, 10, False),
    ],
)
def test_what_another_process_holds(
    taken: str,
    flag: int,
    type_: int,
    start: int,
    length: int,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lock that cannot be had is an error that names the file and who has it; nothing is waited
    for, nothing stays taken.
    """
    path = tmp_path / "locked"
    path.touch()
    lock = WantedLock(str(path), 7, 3, flag, type_, start, length)
    monkeypatch.setattr(file_locks, "_PATIENCE", 0.0)
    with held(path, TAKEN[taken]) as holder:
        found = list(file_locks.errors([lock], copy=False))
        assert [(f.level, f.code, f.pid, f.fd) for f in found] == (
            [("error", "file-locked", 7, 3)] if refused else []
        )
        assert all(f"{path} is locked by process {holder} (" in f.text for f in found)
    assert list(file_locks.errors([lock], copy=False)) == []
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_what_has_the_name_now_is_no_file(tmp_path: Path) -> None:
    """Missing, a FIFO without a writer, a link: no lock is in the way, and the repair does not
    wait.
    """
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for name in ("missing", "fifo", "link"):
        lock = WantedLock(str(tmp_path / name), 7, 3, FLOCK, fcntl.F_WRLCK, 0, 0)
        assert list(file_locks.errors([lock], copy=True)) == []
