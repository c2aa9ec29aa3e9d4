"""The processes of a lazy restore, when it fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.criu.binary import CriuBinary
from criuctl.criu.lazy import LazyImage, LazyPages, Piece
from criuctl.criu.pages import GET, HEADER, PE_LAZY, PagemapEntry
from criuctl.errors import PlatformError
from criuctl.proc.tree import Process, read_tree

NEVER = CriuBinary(("sh", "-c", "exec sleep 1000"), "a test")
ASKS = f"""
import socket, sys
open(sys.argv[sys.argv.index("-D") + 1] + "/lazy-pages.socket", "w").close()
server = socket.socket(fileno=int(sys.argv[-1]))
server.sendall({HEADER.pack(GET, 1, 0x1000, 1)!r})
while server.recv(100):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def _below() -> list[Process]:
    return read_tree(os.getpid())[1:]


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Check that no process is left that was started meanwhile."""
    before = {process.identity for process in _below()}
    yield
    assert [process for process in _below() if process.identity not in before] == []


@pytest.mark.usefixtures("no_process_left", "no_features")
def test_a_signal_while_the_daemon_starts(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon waits for a tree that will never come, and would not be ended later."""

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    pages = LazyPages(NEVER, folder, {}, [])
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt), pages:
        pass


@pytest.mark.usefixtures("no_process_left", "no_features")
def test_a_host_that_has_no_thread_left(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon runs by then."""

    def exhausted(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", exhausted)
    with pytest.raises(RuntimeError), LazyPages(NEVER, folder, {}, []):
        pass


@pytest.mark.usefixtures("no_process_left")
def test_one_that_is_never_entered_starts_nothing(folder: int) -> None:
    """A signal may come before it is."""
    LazyPages(NEVER, folder, {}, [])


def test_a_daemon_that_cannot_be_started(folder: int) -> None:
    with (
        pytest.raises(PlatformError),
        LazyPages(CriuBinary(("no-such-criu",), "a test"), folder, {}, []),
    ):
        pass


class _Exhausted:
    """A source of pages for which there is no memory."""

    def read(self, first: int, count: int) -> list[Piece]:
        raise MemoryError

    read_all = None


def test_whatever_keeps_pages_from_coming_ends_it(folder: int) -> None:
    """The daemon would wait for the page, and the tree, and we, for the daemon."""
    image = LazyImage([PagemapEntry(0x1000, 1, PE_LAZY)], _Exhausted())  # type: ignore[arg-type]
    pages = LazyPages(
        CriuBinary((sys.executable, "-S", "-c", ASKS), "a test"), folder, {1: image}, []
    )
    with pages:
        # it has met the end of the stream
        assert pages._daemon is not None and pages._daemon.wait(60) == 0
        with pytest.raises(MemoryError):
            pages.finish()
        pages.stop()
