"""The page receiver against a sender that speaks CRIU's page protocol."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criuctl.criu import pages
from criuctl.criu.pages import (
    ADD_F,
    FORCE_CLOSE,
    GAP,
    HEADER,
    HOLE,
    OPEN2,
    PAGE,
    PE_LAZY,
    PE_PRESENT,
    WINDOW,
    ImageKey,
    PageGuard,
    PageProtocolError,
    PageReceiver,
    unpack_entries,
    window_sizes,
)

TASK, SHMEM = 1, 2


class Buffer:
    """A small buffer, so that windows meet its end often."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(2 * WINDOW + PAGE))


class Sink:
    """Keeps the windows of each image; counts buffers."""

    def __init__(self) -> None:
        self.windows: dict[object, list[bytes]] = {}
        self.places: dict[object, list[int]] = {}  # where each begins
        self.out = 0

    def acquire(self) -> Buffer:
        self.out += 1
        return Buffer()

    def window(self, key: object, buffer: Buffer, start: int, end: int, at: int) -> None:
        self.windows.setdefault(key, []).append(bytes(buffer.view[start:end]))
        self.places.setdefault(key, []).append(at)

    def release(self, buffer: Buffer) -> None:
        self.out -= 1


def content(vaddr: int, count: int) -> bytes:
    """Return pages that contain their address."""
    return b"".join(struct.pack("<Q", vaddr + n * PAGE) * (PAGE // 8) for n in range(count))


def send(sock: socket.socket, dst: int, runs: list[tuple[int, int, int]]) -> None:
    """What CRIU sends for one image: OPEN2 (answered by a byte), then each run behind its
    header.
    """
    sock.sendall(HEADER.pack(OPEN2, 0, 0, dst))
    assert sock.recv(1) == b"\0"
    for vaddr, count, flags in runs:
        sock.sendall(HEADER.pack(ADD_F | flags << 16, count, vaddr, dst))
        sock.sendall(content(vaddr, count))


def finish(sock: socket.socket) -> None:
    sock.sendall(HEADER.pack(FORCE_CLOSE, 0, 0, 0))
    assert sock.recv(4, socket.MSG_WAITALL) == b"\0\0\0\0"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = pages.socket_pair()
    with ours, theirs:
        yield ours, theirs


@st.composite
def page_maps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Runs in address order with gaps, some long, some touching each other with other flags."""
    runs, at = [], draw(st.integers(0, 200)) * PAGE
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0, 0, 1, 3, 15, 16, 64, 65, 1000])) * PAGE
        count = draw(st.integers(1, 200) | st.integers(1, 8))
        runs.append((at, count, draw(st.sampled_from([PE_PRESENT, PE_PRESENT | PE_LAZY]))))
        at += count * PAGE
    return runs


@settings(max_examples=60, deadline=None)
@given(st.lists(page_maps(), min_size=1, max_size=3))
def test_every_page_arrives_once_in_windows_of_its_address(
    images: list[list[tuple[int, int, int]]],
) -> None:
    ours, theirs = pages.socket_pair()
    with theirs:
        sink = Sink()
        receiver = PageReceiver(ours, sink)
        receiver.start()
        for number, runs in enumerate(images):
            send(theirs, number << 8 | (SHMEM if number == 1 else TASK), runs)
        finish(theirs)
        received = receiver.finish()
    assert len(received) == len(images)
    for image, runs in zip(received, images, strict=True):
        windows = sink.windows[image.key]
        assert b"".join(windows) == b"".join(content(vaddr, count) for vaddr, count, _flags in runs)
        assert [len(w) for w in windows] == list(window_sizes(image.entries))
        assert sink.places[image.key] == [struct.unpack_from("<Q", window)[0] for window in windows]
        for window in windows:
            addresses = [
                struct.unpack_from("<Q", window, at)[0] for at in range(0, len(window), PAGE)
            ]
            assert len({address // WINDOW for address in addresses}) == 1
            assert all(after - before < PAGE + GAP for before, after in pairwise(addresses))
        assert image.pages == sum(count for _v, count, _f in runs)
        assert unpack_entries(image.pack()) == image.entries
    assert sink.out == 0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (HEADER.pack(99, 0, 0, 0), "unknown page server command"),
        (HEADER.pack(ADD_F | PE_PRESENT << 16, 1, 0, 7 << 8 | TASK), "unexpected page run"),
        (HEADER.pack(OPEN2, 0, 0, 7 << 8 | 9), "unknown kind"),
    ],
)
def test_what_it_does_not_understand_fails_the_dump(
    pair: tuple[socket.socket, socket.socket], message: bytes, words: str
) -> None:
    ours, theirs = pair
    receiver = PageReceiver(ours, Sink())
    receiver.start()
    theirs.sendall(message)
    assert theirs.recv(1) == b""  # closed: CRIU gives up
    with pytest.raises(PageProtocolError, match=words):
        receiver.finish()


def test_a_hole_without_parent_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    receiver = PageReceiver(ours, Sink())
    receiver.start()
    theirs.sendall(HEADER.pack(OPEN2, 0, 0, 1 << 8 | TASK))
    assert theirs.recv(1) == b"\0"
    theirs.sendall(HEADER.pack(HOLE, 1, 0, 1 << 8 | TASK))
    with pytest.raises(PageProtocolError, match="hole"):
        receiver.finish()


@pytest.mark.parametrize("cut", [1, 31, 33, 32 + PAGE // 2, 32 + PAGE + 5])
def test_a_stream_that_is_cut_off_is_never_complete(
    pair: tuple[socket.socket, socket.socket], cut: int
) -> None:
    ours, theirs = pair
    receiver = PageReceiver(ours, Sink())
    receiver.start()
    theirs.sendall(HEADER.pack(OPEN2, 0, 0, 1 << 8 | TASK))
    assert theirs.recv(1) == b"\0"
    stream = HEADER.pack(ADD_F | PE_PRESENT << 16, 2, 0x1000, 1 << 8 | TASK) + content(0x1000, 2)
    theirs.sendall(stream[:cut])
    theirs.close()
    with pytest.raises(PageProtocolError):
        receiver.finish()
    receiver.raise_failure()  # that is not why CRIU failed, but the other way round


def test_an_error_of_the_sink_reaches_the_dump(pair: tuple[socket.socket, socket.socket]) -> None:
    class Full(Sink):
        def acquire(self) -> Buffer:
            raise OSError(28, "full")

    ours, theirs = pair
    receiver = PageReceiver(ours, Full())
    receiver.start()
    # More than the socket has room for, so that it cannot all be sent before the receiver fails.
    # the latter if something was not read yet
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send(theirs, 1 << 8 | TASK, [(n * 4000 * PAGE, 4000, PE_PRESENT) for n in range(16)])
    with pytest.raises(OSError, match="full"):
        receiver.finish()


def test_an_error_at_the_last_window_reaches_the_dump_too(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    class Broken(Sink):
        def release(self, buffer: Buffer) -> None:
            raise OSError(28, "full at the end")

    ours, theirs = pair
    receiver = PageReceiver(ours, Broken())
    receiver.start()
    send(theirs, 1 << 8 | TASK, [(0x1000, 2, PE_PRESENT)])
    theirs.close()
    with pytest.raises(OSError, match="full at the end"):
        receiver.finish()


def test_a_page_in_which_criu_is_running_is_read_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The page comes with CRIU's instruction in it; the memory of the process has its true
    content.
    """
    truth = os.urandom(PAGE)
    with mmap.mmap(-1, PAGE) as memory:
        memory[:] = bytes.fromhex("0f05cccccccccccc") + truth[8:]
        address = _address_of(memory)
        # CRIU puts the old bytes back
        settle = threading.Timer(0.05, lambda: memory.__setitem__(slice(None), truth))
        ours, theirs = pair
        sink = Sink()
        receiver = PageReceiver(ours, sink)
        receiver.guards = {77: PageGuard(os.getpid(), address)}
        receiver.start()
        dst = 77 << 8 | TASK
        theirs.sendall(HEADER.pack(OPEN2, 0, 0, dst))
        assert theirs.recv(1) == b"\0"
        before = address - PAGE
        theirs.sendall(HEADER.pack(ADD_F | PE_PRESENT << 16, 3, before, dst))
        theirs.sendall(content(before, 1) + memory[:] + content(address + PAGE, 1))
        settle.start()
        finish(theirs)
        receiver.finish()
        settle.join()
    stored = b"".join(sink.windows[ImageKey("task", 77)])
    assert stored == content(before, 1) + truth + content(address + PAGE, 1)


def _address_of(memory: mmap.mmap) -> int:
    """Where a mapping lies; the exporting array is gone on return, so that the mapping can be
    closed.
    """
    array = (ctypes.c_char * PAGE).from_buffer(memory)
    return ctypes.addressof(array)
