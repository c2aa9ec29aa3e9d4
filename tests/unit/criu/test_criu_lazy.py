"""What brings the pages of a lazy restore, with a stand-in for CRIU."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.keeper import wait_until

from criuctl.criu.lazy import LazyPages, Put, Skip
from criuctl.errors import RestoreFailed
from criuctl.proc.tree import Process, ProcessIdentity, read_tree

FINISHED = struct.pack("=I", 0x52535446)


class Source:
    """Pages that are all the same, or an error."""

    def __init__(self, runs: Mapping[int, Sequence[tuple[int, int]]], error: Exception | None):
        self.runs, self._error = runs, error

    def bring(self, pid: int, address: int, put: Put) -> None:
        if self._error is not None:
            raise self._error
        put(pid, address, b"p" * mmap.PAGESIZE)

    def fill(self, put: Put, skip: Skip) -> None:
        for pid, runs in self.runs.items():
            for start, end in runs:
                put(pid, start, b"p" * (end - start))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def _below() -> list[Process]:
    return read_tree(os.getpid())[1:]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no process and no descriptor is left that was made meanwhile."""
    before = {process.identity for process in _below()}
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert [process for process in _below() if process.identity not in before] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _connect(tmp_path: Path) -> socket.socket:
    criu = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    criu.connect(str(tmp_path / "lazy-pages.socket"))
    return criu


def test_a_host_that_has_no_thread_left(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher runs by then."""

    def exhausted(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", exhausted)
    with pytest.raises(RuntimeError), LazyPages(folder, Source({}, None)):
        pass


def test_a_restore_that_fails_before_criu_comes(folder: int) -> None:
    with pytest.raises(KeyboardInterrupt), LazyPages(folder, Source({}, None)):
        raise KeyboardInterrupt


def test_one_that_is_never_entered_starts_nothing(folder: int) -> None:
    """A signal may come before it is."""
    LazyPages(folder, Source({}, None)).stop()


def test_a_criu_that_ends_early(folder: int, tmp_path: Path) -> None:
    with LazyPages(folder, Source({}, None)) as pages:
        _connect(tmp_path).close()
        with pytest.raises(RestoreFailed, match="CRIU has ended"):
            pages.finish()
        pages.stop()


def test_a_criu_that_sends_nothing_usable(folder: int, tmp_path: Path) -> None:
    """Zombies have no memory; every other process has to come with a userfaultfd."""
    with LazyPages(folder, Source({}, None)) as pages, _connect(tmp_path) as criu:
        criu.sendall(struct.pack("=ii", -5, 6) + b"\0")
        criu.close()
        with pytest.raises(RestoreFailed, match="PID 6"):
            pages.finish()
        pages.stop()


def test_a_tree_that_has_ended(folder: int, tmp_path: Path) -> None:
    """Nothing is left to bring, and that is no failure."""
    with LazyPages(folder, Source({}, None)) as pages:
        with _connect(tmp_path) as criu:
            criu.sendall(FINISHED)
        pages.watch(ProcessIdentity(1, 0))  # no process that is there
        pages.watched()
        pages.about_to_run()
        pages.finish()


_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
import ctypes, fcntl, mmap, os, socket, struct
from criuctl.proc.syscalls import address_of, userfaultfd
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
fd = userfaultfd(os.O_CLOEXEC | os.O_NONBLOCK)
fcntl.ioctl(fd, 0xC018AA3F, bytearray(struct.pack("<3Q", 0xAA, 0x2E, 0)))
start = address_of(memory)
fcntl.ioctl(fd, 0xC020AA00, bytearray(struct.pack("<4Q", start, len(memory), 1, 0)))
channel = socket.socket(fileno=int(sys.argv[2]))
socket.send_fds(channel, [struct.pack("<Q", start)], [fd])
os.close(fd)
channel.recv(1)
channel.sendall(memory[:1])  # waits for the page
channel.recv(1)
channel.sendall(b"y" if memory[:] == b"p" * len(memory) else b"n")
"""


class Program:
    """A process that needs a page, as CRIU would hand it over."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).parents[3])
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        where, (self.fd,), _, _ = socket.recv_fds(self.channel, 8, 1)
        (self.start,) = struct.unpack("<Q", where)
        self.runs = {5: [(self.start, self.start + (1 << 20))]}

    def hand_over(self, tmp_path: Path) -> None:
        with _connect(tmp_path) as criu:
            criu.sendall(struct.pack("=i", 5))
            socket.send_fds(criu, [b"\0"], [self.fd])
            os.close(self.fd)
            criu.sendall(FINISHED)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()


@pytest.fixture
def program(nothing_left: None) -> Iterator[Program]:
    program = Program()
    yield program
    program.end()


def test_a_page_that_is_touched_comes_and_then_all(
    folder: int, tmp_path: Path, program: Program
) -> None:
    with LazyPages(folder, Source(program.runs, None)) as pages:
        program.hand_over(tmp_path)
        program.channel.sendall(b"x")
        assert program.channel.recv(1) == b"p"
        pages.finish()
    program.channel.sendall(b"x")
    assert program.channel.recv(1) == b"y"


@pytest.mark.parametrize("error", [MemoryError(), OSError("the store is gone")])
def test_whatever_keeps_pages_from_coming_ends_the_tree(
    folder: int, tmp_path: Path, program: Program, error: Exception
) -> None:
    """The program reads no zeros first."""
    with LazyPages(folder, Source(program.runs, error)) as pages:
        program.hand_over(tmp_path)
        pages.watch(ProcessIdentity.of(program.process.pid))
        pages.watched()
        program.channel.sendall(b"x")

        def failed() -> bool:
            try:
                pages._arrival.check()
            except type(error):
                return True
            return False

        wait_until(failed, 60, "the page could not be brought")
        with pytest.raises(type(error)):
            pages.finish()
        pages.stop()
    assert program.process.wait(60) == -9
    assert program.channel.recv(1) == b""


def test_pages_that_nothing_brings(folder: int, tmp_path: Path, program: Program) -> None:
    source = Source(program.runs, None)
    source.fill = lambda put, skip: None  # type: ignore[method-assign]
    with LazyPages(folder, source) as pages:
        program.hand_over(tmp_path)
        with pytest.raises(RestoreFailed, match="nothing has brought"):
            pages.finish()
        pages.stop()


def test_a_watcher_that_was_killed_harms_no_success(
    folder: int, tmp_path: Path, program: Program
) -> None:
    with LazyPages(folder, Source(program.runs, None)) as pages:
        program.hand_over(tmp_path)
        assert pages._watcher is not None
        pages._watcher.kill()
        pages.finish()
    program.channel.sendall(b"xx")
    assert program.channel.recv(1) == b"p"
    assert program.channel.recv(1) == b"y"


def test_processes_whose_root_has_ended(folder: int) -> None:
    """They need their pages as well, and are ended with the rest."""
    tree = ["sh", "-c", "sleep 1000 & echo $!; read nothing"]
    with subprocess.Popen(tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        child = ProcessIdentity.of(int(root.stdout.readline()))
        with LazyPages(folder, Source({}, None)) as pages:
            pages.watch(ProcessIdentity.of(root.pid))
            pages.watched()
            root.kill()
            root.wait()
            assert child.alive()
            pages.stop()
    wait_until(lambda: not child.alive(), 60, "it is ended")
