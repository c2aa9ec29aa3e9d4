"""Pages that are moved by one thread while they are being copied in."""

from __future__ import annotations

import ctypes
import mmap
import queue
import random
import select
import threading
import time

import pytest
from support.served import _DONTNEED, _FIXED, _MAYMOVE, PAGE, Program, _libc

from criuctl.proc import missing_pages
from criuctl.proc.served_pages import ServedPages, Source, Span
from criuctl.proc.syscalls import has_userfaultfd

pytestmark = pytest.mark.skipif(not has_userfaultfd(), reason="the kernel allows no userfaultfd")
_TRIALS = 500
_PAGES = 8192
_PATIENCE = 60.0
_SIZE = _PAGES * PAGE
_LAST = _SIZE - PAGE  # the missing page; the others are there, so that a move takes a while


class _Mover(threading.Thread):
    """Move the memory to a new place, and read its last page there.

    No call holds Python's lock: another thread of this process serves the page.
    """

    def __init__(self, start: int) -> None:
        super().__init__(daemon=True)
        self.at = start
        self.turns: queue.Queue[bool] = queue.Queue()
        self.bytes: queue.Queue[bytes] = queue.Queue()
        self.begins = threading.Event()

    def run(self) -> None:
        first = ctypes.create_string_buffer(1)
        while self.turns.get():
            # Not on a boundary of a page table, which the kernel would move as a whole.
            to = Program._map(_PAGES + 1) + PAGE
            self.begins.set()
            assert _libc.mremap(self.at, _SIZE, _SIZE, _MAYMOVE | _FIXED, to) == to
            _libc.memcpy(first, ctypes.c_void_p(to + _LAST), ctypes.c_size_t(1))
            self.at = to
            _libc.madvise(to + _LAST, PAGE, _DONTNEED)
            self.bytes.put(first.raw)


def test_a_page_that_moves_while_its_copy_waits_is_not_lost() -> None:
    """The kernel reports ENOENT, as for memory in which nothing can miss any more."""
    program = Program(0, _PAGES)
    fd = program.register()
    memory = mmap.mmap(-1, _SIZE)
    memory[:1] = b"x"
    source = Source(memoryview(memory))
    missing_pages.copy(fd, program.start, source.address, _LAST)
    mover = _Mover(program.start)
    mover.start()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    until = time.monotonic() + _PATIENCE
    space = ServedPages(fd, [], source)
    for trial in range(_TRIALS):
        space.left = [Span(mover.at + _LAST, mover.at + _SIZE, 0)]
        mover.begins.clear()
        mover.turns.put(True)
        mover.begins.wait()
        moment = time.perf_counter() + random.random() * 0.002
        while time.perf_counter() < moment:
            pass
        space.fill()
        while mover.bytes.empty():
            assert time.monotonic() < until, "the program hangs"
            poller.poll(5)
            space.serve()
        assert mover.bytes.get() == b"x", f"trial {trial}: zeros instead of the page"
    mover.turns.put(False)
    mover.join()
    space.close()


def test_a_page_that_moves_to_where_another_left_is_not_lost() -> None:
    """The kernel reports that the place was left once more, after it is taken again."""
    program = Program(0, 2)
    fd = program.register()
    memory = mmap.mmap(-1, 2 * PAGE)
    memory[:1], memory[PAGE : PAGE + 1] = b"x", b"y"
    first, second, aside = program.start, program.start + PAGE, Program._map(1)
    space = ServedPages(fd, [Span(first, second + PAGE, 0)], Source(memoryview(memory)))
    read = ctypes.create_string_buffer(1)
    follows = threading.Event()

    def leave() -> None:
        assert _libc.mremap(first, PAGE, PAGE, _MAYMOVE | _FIXED, aside) == aside

    def follow() -> None:
        follows.set()
        assert _libc.mremap(second, PAGE, PAGE, _MAYMOVE | _FIXED, first) == first
        _libc.memcpy(read, ctypes.c_void_p(first), ctypes.c_size_t(1))

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    threads = [threading.Thread(target=action, daemon=True) for action in (leave, follow)]
    threads[0].start()
    assert poller.poll(_PATIENCE * 1000)  # it has left, and waits until that is read
    threads[1].start()
    follows.wait()
    time.sleep(0.05)  # its move is reported as well
    until = time.monotonic() + _PATIENCE
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < until, "the program hangs"
        poller.poll(5)
        space.serve()
    space.close()
    assert read.raw == b"y"
