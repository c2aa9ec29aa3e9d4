"""The processes that have a named pipe open, and its content."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.proc import fifos
from criuctl.proc.tree import ProcessIdentity


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fd = fifos.open_both_ways(str(path))
    yield path, fd
    os.close(fd)


def inode(path: Path) -> fifos.Inode:
    status = path.stat()
    return status.st_dev, status.st_ino


def test_who_has_it_open(pipe: tuple[Path, int], tmp_path: Path) -> None:
    path, fd = pipe
    (found,) = fifos.openers({inode(path)})[inode(path)]
    assert (found.pid, found.start_time, found.reads) == (*ProcessIdentity.of(os.getpid()), True)
    assert fifos.openers({inode(path)}, but={os.getpid()}) == {}
    for mode, expected in ((os.O_WRONLY, [False]), (os.O_PATH, [])):
        other = os.open(path, mode)
        os.dup2(other, fd)
        os.close(other)
        assert [
            opener.reads for opener in fifos.openers({inode(path)}).get(inode(path), [])
        ] == expected
    with pytest.raises(OSError):
        fifos.open_both_ways(str(tmp_path))


def test_what_is_in_it_stays(pipe: tuple[Path, int]) -> None:
    _path, fd = pipe
    assert fifos.queued(fd) == b""
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 18)
    data = os.urandom(1000)
    for _ in range(60):  # each in a page of its own, or behind another one
        os.write(fd, data)
    assert fifos.queued(fd) == data * 60 == fifos.queued(fd)
    assert fifos.room(fd) == 1 << 18
    assert os.read(fd, 1 << 20) == data * 60
    fifos.put(fd, data)
    assert os.read(fd, 1 << 20) == data
