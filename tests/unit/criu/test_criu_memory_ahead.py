"""Memory read ahead: windows cut as the page receiver does, from processes that change
meanwhile.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keeper import wait_until

from criuctl.criu.memory_ahead import Walk, cut
from criuctl.criu.pages import (
    GAP,
    PAGE,
    PE_LAZY,
    PE_PRESENT,
    WINDOW,
    ImageKey,
    PagemapEntry,
    window_sizes,
)
from criuctl.proc.mappings import mappings
from criuctl.proc.memory import Run, TaskMemory, scans
from criuctl.proc.syscalls import address_of
from criuctl.proc.tree import read_process

MIB = 1 << 20


class Buffer:
    def __init__(self) -> None:
        self.view = memoryview(bytearray(4 * MIB))


class Sink:
    """Keeps all windows; `on_window` is called before each."""

    def __init__(self, on_window: Callable[[int], None] = lambda number: None) -> None:
        self.windows: list[bytes] = []
        self.places: list[tuple[ImageKey, int]] = []
        self.out = 0
        self._on_window = on_window

    def acquire(self) -> Buffer:
        self.out += 1
        return Buffer()

    def ahead(self, buffer: Buffer, start: int, end: int, key: ImageKey, at: int) -> None:
        self._on_window(len(self.windows))
        self.windows.append(bytes(buffer.view[start:end]))
        self.places.append((key, at))

    def release(self, buffer: Buffer) -> None:
        self.out -= 1


def walk(sink: Sink, *pids: int) -> Walk[Buffer]:
    made = Walk(sink, dirty_only=False, track=False, going=lambda: True)
    made.tree({pid: pid for pid in pids})
    assert sink.out == 0
    assert sum(map(len, sink.windows)) <= made.bytes
    return made


@contextmanager
def forked() -> Iterator[int]:
    """A child of ours, with all of our memory, that waits."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        wait_until(lambda: read_process(pid).state == "S", 60, "it keeps still")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@given(
    st.integers(0, 200),
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 3, 15, 16, 63, 64, 65, 1000]),
            st.integers(1, 200) | st.integers(1, 8),
            st.booleans(),
        ),
        max_size=20,
    ),
)
def test_windows_are_those_that_the_receiver_makes(
    first: int, steps: list[tuple[int, int, bool]]
) -> None:
    runs, entries, at = [], [], first * PAGE
    for gap, pages, flag in steps:
        at += gap * PAGE
        runs.append(Run(at, at + pages * PAGE, flag))
        entries.append(PagemapEntry(at, pages, PE_PRESENT | (PE_LAZY if flag else 0)))
        at += pages * PAGE
    windows = list(cut(runs))
    assert [w.size for w in windows] == list(window_sizes(entries))
    assert [p for w in windows for s, e in w.pieces for p in range(s, e, PAGE)] == [
        p for r in runs for p in range(r.start, r.end, PAGE)
    ]
    for window in windows:
        assert {start // WINDOW for start, _end in window.pieces} == {window.number}
        touched = [
            r for r in runs if r.start < window.pieces[-1][1] and r.end > window.pieces[0][0]
        ]
        assert window.dirty == any(r.dirty for r in touched)
        assert all(after[0] - before[1] < GAP for before, after in pairwise(window.pieces))
    for one, other in pairwise(windows):
        assert one.number < other.number or other.pieces[0][0] - one.pieces[-1][1] >= GAP


def test_both_ways_to_find_pages_find_the_same() -> None:
    """PAGEMAP_SCAN and, as on older kernels, the pagemap itself; pages of zeros and of files are
    neither's.
    """
    with mmap.mmap(-1, 40 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        start = address_of(memory)
        for page in (0, 1, 2, 7, 9, 39):
            memory[page * PAGE] = 1
        assert memory[20 * PAGE] == 0  # there now, but the kernel's page of zeros
        wanted = [(0, 3), (7, 8), (9, 10), (39, 40)]
        with forked() as pid, TaskMemory(pid) as task:
            found = list(task._pagemap_runs(start, start + len(memory)))
            assert [((r.start - start) // PAGE, (r.end - start) // PAGE) for r in found] == wanted
            if scans():
                ranges = [
                    (m.start, m.end)
                    for m in mappings(pid)
                    if not m.shared and not m.path.startswith("[v")
                ]
                scanned = [(r.start, r.end) for r in _joined(task.runs(ranges))]
                assert scanned == [
                    (r.start, r.end)
                    for r in _joined(r for s, e in ranges for r in task._pagemap_runs(s, e))
                ]


def _joined(runs: Iterator[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].end == run.start:
            joined[-1] = Run(joined[-1].start, run.end, dirty=False)
        else:
            joined.append(Run(run.start, run.end, dirty=False))
    return joined


def test_forked_and_shared_memory_are_read_once() -> None:
    with (
        mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private,
        mmap.mmap(-1, 8 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared,
        mmap.mmap(-1, 4096 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as hollow,
    ):
        hollow[-1] = 1
        with open("/dev/urandom", "rb", buffering=0) as source, memoryview(shared) as view:
            # by way of no other memory, in which it would be found again
            assert source.readinto(private) == 16 * MIB
            assert source.readinto(view[2 * MIB : 6 * MIB]) == 4 * MIB
        first = -address_of(private) % WINDOW
        with forked() as one, forked() as two:
            # reading ends no sharing: a second look still finds the frames of the first
            for _ in range(2):
                seen = Sink()
                # nothing is read that was never written
                assert walk(seen, one, two).bytes < len(hollow)
                for at in (first, first + 8 * MIB):
                    assert seen.windows.count(private[at : at + WINDOW]) == 1
                assert seen.windows.count(shared[2 * MIB : 2 * MIB + WINDOW]) == 1


def test_a_process_that_ends_while_it_is_read_is_left_out() -> None:
    with mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = os.urandom(16 * MIB)
        with forked() as one, forked() as two:

            def kill(number: int) -> None:
                if number == 0:
                    os.kill(one, signal.SIGKILL)
                    os.waitid(os.P_PID, one, os.WEXITED | os.WNOWAIT)

            sink = Sink(kill)
            walk(sink, one, two)
            assert memory[-64:] in sink.windows[-1] or any(memory[-64:] in w for w in sink.windows)


def test_where_the_kernel_tells_only_what_was_written_to_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soft-dirty pages do; this kernel may not know them."""
    cleared = []
    with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = os.urandom(8 * MIB)
        at = -(-address_of(memory) // WINDOW) * WINDOW
        with forked() as pid:
            runs = [
                Run(at, at + WINDOW + 8 * PAGE, False),
                Run(at + WINDOW + 8 * PAGE, at + WINDOW + 9 * PAGE, True),
            ]
            runs.append(Run(at + 2 * WINDOW, at + 4 * WINDOW, False))
            monkeypatch.setattr(TaskMemory, "runs", lambda _self, _ranges: iter(runs))
            monkeypatch.setattr(TaskMemory, "clear_dirty", lambda _self: cleared.append(pid))
            sink = Sink()
            Walk(sink, dirty_only=True, track=True, going=lambda: True).tree({pid: 7})
            begin = at - address_of(memory) + WINDOW
            assert memory[begin : begin + 9 * PAGE] in sink.windows
            assert memory[begin - WINDOW : begin] not in sink.windows
            assert cleared == [pid]
            # as CRIU calls it, and where it begins
            assert (ImageKey("task", 7), at + WINDOW) in sink.places


def test_a_walk_ends_on_request() -> None:
    with mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = os.urandom(16 * MIB)
        with forked() as pid:
            sink = Sink()
            Walk(sink, dirty_only=False, track=False, going=lambda: not sink.windows).tree(
                {pid: pid}
            )
            assert 0 < sum(map(len, sink.windows)) <= 4 * MIB
