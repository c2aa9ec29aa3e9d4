"""Read the memory that CRIU would send while the tree runs, cut into the same windows.

Only with the same cuts (`criu.pages`) does the frozen pass find the same windows. So the rules here
are CRIU's own: of each private mapping the pages that are in memory or swapped out, not a file's
own, not of zeros (``should_dump_page`` in its ``criu/mem.c``); the vDSO and rings of asynchronous
I/O whole; mappings of the kernel (vvar, uprobes, devices) not at all; shared memory and memfds by
their objects, the parts that were ever written (``criu/shmem.c``). Windows are cut out of
addresses, or out of the object, by the same rule (`criu.pages.parted`).

A missed rule breaks nothing: a window that CRIU never sends is never referred to, and what was not
sent ahead is sent by the frozen pass. So memory that cannot be read, or is gone, is left out
silently. One rule is missed knowingly: MAP_DROPPABLE memory, which CRIU skips (newer C libraries
keep the state of their random numbers in a few pages of it), shows in ``smaps`` alone, which walks
all page tables. It costs one window of a process.

Each object of shared memory is read once; so are the page frames that processes share since a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field

from ..errors import NoSuchProcess, PreflightRefused
from ..proc.descriptors import descriptors
from ..proc.mappings import Mapping as Mapped
from ..proc.mappings import mappings
from ..proc.memory import ENTRY_SIZE, Run, TaskMemory, shows_frames
from .pages import PAGE, WINDOW, ImageKey, PageBuffer, parted

B = TypeVar("B", bound=PageBuffer)

_KERNEL_AREAS = frozenset({"[vsyscall]", "[vvar]", "[vvar_vclock]", "[uprobes]"})
_WHOLE = frozenset({"[vdso]", "/[aio]"})
_SYSV = "/SYSV"


class AheadSink(Protocol[B]):
    """The receiver of the windows; see `criuctl.checkpoint.writer`."""

    def acquire(self) -> B:
        """Return a free buffer; blocks while none is free."""

    def ahead(self, buffer: B, start: int, end: int, key: ImageKey, at: int) -> None:
        """Take ``buffer.view[start:end]``, a window that CRIU will probably send.

        `key`: its image; `at`: the address of its first page.
        """

    def release(self, buffer: B) -> None:
        """Take the buffer back: nothing more is written into it."""


class Cut(Struct):
    """One window: its pages, in order."""

    number: int  # address / WINDOW
    pieces: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0
    dirty: bool = False
    mark: int = 0  # identifies its page frames


def cut(runs: Iterable[Run]) -> Iterator[Cut]:
    """Yield the windows that these ascending runs make."""
    current = Cut(-1)
    for start, end, dirty in runs:
        while start < end:
            if not current.pieces or parted(current.pieces[-1][1], start):
                if current.size:
                    yield current
                current = Cut(start // WINDOW)
            stop = min(end, (current.number + 1) * WINDOW)
            if current.pieces and current.pieces[-1][1] == start:
                current.pieces[-1] = (current.pieces[-1][0], stop)
            else:
                current.pieces.append((start, stop))
            current.size += stop - start
            current.dirty |= dirty
            start = stop
    if current.size:
        yield current


class Walk(Generic[B]):
    """One walk over the memory of a tree; `bytes` were read.

    `dirty_only` leaves out the windows of private memory that were not written to since the
    previous walk, `without` those of private memory of these processes. `going` is called now and
    then; when it returns False, the walk ends.
    """

    def __init__(
        self,
        sink: AheadSink[B],
        *,
        dirty_only: bool,
        track: bool,
        going: Callable[[], bool],
        without: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
    ) -> None:
        self.bytes = 0
        self._sink = sink
        self._dirty_only = dirty_only
        self._track = track
        self._going = going
        self._without = without
        self._objects: set[tuple[int, int]] = set()
        self._frames: set[int] | None = None

    def tree(self, processes: Mapping[int, int]) -> None:
        """Read the memory of these processes: our PID of each, and the tree's own."""
        if len(processes) > 1 and shows_frames():
            self._frames = set()
        for pid, inside in processes.items():
            if not self._going():
                return
            with suppress(NoSuchProcess, PreflightRefused):
                self._process(pid, ImageKey("task", inside))

    def _process(self, pid: int, key: ImageKey) -> None:
        found = mappings(pid)
        private = [
            m
            for m in found
            if not m.shared and m.path not in _KERNEL_AREAS and m.path not in _WHOLE
        ]
        if left_out := self._without.get(pid):
            private = [m for m in private if not _within(m, left_out)]
        with TaskMemory(pid) as memory:
            if self._track and not self._dirty_only:
                memory.clear_dirty()
            runs = _with_whole(
                memory.runs([(m.start, m.end) for m in private]),
                [m for m in found if m.path in _WHOLE],
            )
            windows = list(cut(runs))
            if self._track and self._dirty_only:
                # Writes between the look and this call are missed until the tree is frozen.
                memory.clear_dirty()
                windows = [w for w in windows if w.dirty]
            self._windows(memory, key, self._unshared(memory, windows))
        self._shared(pid, found)

    def _unshared(self, memory: TaskMemory, windows: list[Cut]) -> list[Cut]:
        """Return the windows without those whose page frames were read in another process."""
        seen = self._frames
        if seen is None:
            return windows
        fresh = []
        width = WINDOW // PAGE * ENTRY_SIZE
        for first, last in _stretches(windows):
            frames = memory.frames(
                windows[first].number * WINDOW, (windows[last].number + 1) * WINDOW
            )
            for window in windows[first : last + 1]:
                at = (window.number - windows[first].number) * width
                window.mark = hash((window.pieces[0][0], window.size, frames[at : at + width]))
                if window.mark not in seen:
                    fresh.append(window)
        return fresh

    def _windows(self, memory: TaskMemory, key: ImageKey, windows: Sequence[Cut]) -> None:
        """Read private windows, as many at once as fit into a buffer."""
        at = 0
        while at < len(windows) and self._going():
            buffer = self._sink.acquire()
            try:
                end, size = at, 0
                while end < len(windows) and size + windows[end].size <= len(buffer.view):
                    size += windows[end].size
                    end += 1
                got = memory.read(joined(windows[at:end]), buffer.view)
                self.bytes += got
                place = 0
                while at < end and place + windows[at].size <= got:
                    self._sink.ahead(
                        buffer, place, place + windows[at].size, key, windows[at].pieces[0][0]
                    )
                    if self._frames is not None:
                        self._frames.add(windows[at].mark)
                    place += windows[at].size
                    at += 1
                if at < end:
                    at += 1  # a page of this window is unreadable
            finally:
                self._sink.release(buffer)

    def _shared(self, pid: int, found: Sequence[Mapped]) -> None:
        """Read the objects of shared memory that this process maps or has open."""
        device = _shmem_device()
        base = f"/proc/{pid}"
        paths = {
            m.inode: (f"{base}/map_files/{m.start:x}-{m.end:x}", m.path)
            for m in found
            if m.device == device
        }
        for d in descriptors(pid):
            if d.kind == "memfd" and d.device == device:
                paths[d.inode] = (f"{base}/fd/{d.fd}", d.target)
        for inode, (path, name) in paths.items():
            if (device, inode) not in self._objects and self._going():
                self._objects.add((device, inode))
                with suppress(OSError):  # closed, unmapped, or its process is gone
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        if os.fstat(fd).st_ino == inode:
                            self._object(fd, inode, whole=name.startswith(_SYSV))
                    finally:
                        os.close(fd)

    def _object(self, fd: int, inode: int, *, whole: bool) -> None:
        key = ImageKey("shmem", inode)  # CRIU's ids of such objects are their inodes
        size = os.fstat(fd).st_size
        runs = [Run(0, _up(size), dirty=True)] if whole else _data(fd, size)
        windows = list(cut(runs))
        at = 0
        while at < len(windows) and self._going():
            buffer = self._sink.acquire()
            try:
                place = 0
                while at < len(windows) and place + windows[at].size <= len(buffer.view):
                    begin = place
                    for start, end in windows[at].pieces:
                        _read(fd, buffer.view[place : place + end - start], start)
                        place += end - start
                    self._sink.ahead(buffer, begin, place, key, windows[at].pieces[0][0])
                    at += 1
                self.bytes += place
            finally:
                self._sink.release(buffer)


def _with_whole(runs: Iterator[Run], whole: Sequence[Mapped]) -> Iterator[Run]:
    """Yield `runs` and all of these mappings, which do not overlap them, by address."""
    waiting = [Run(m.start, m.end, dirty=False) for m in whole]
    for run in runs:
        while waiting and waiting[0].start < run.start:
            yield waiting.pop(0)
        yield run
    yield from waiting


def _stretches(windows: Sequence[Cut]) -> Iterator[tuple[int, int]]:
    """Yield first and last of adjacent windows."""
    first = 0
    for n in range(1, len(windows) + 1):
        if n == len(windows) or windows[n].number != windows[n - 1].number + 1:
            yield first, n - 1
            first = n


def joined(windows: Sequence[Cut]) -> list[tuple[int, int]]:
    """Return the pieces of these windows, adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for window in windows:
        for start, end in window.pieces:
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
    return found


def _shmem_device() -> int:
    """Return the device of the kernel's own tmpfs.

    It holds memfds, shared anonymous memory and System V shared memory.
    """
    fd = os.memfd_create("criuctl", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _data(fd: int, size: int) -> Iterator[Run]:
    """Yield the written parts of a sparse file, in whole pages."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no more data
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield Run(start // PAGE * PAGE, _up(min(at, size)), dirty=True)


def _up(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def _read(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` from the file, with zeros after its end."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            target[done:] = bytes(len(target) - done)
            return
        done += count


def _within(mapping: Mapped, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(start <= mapping.start and mapping.end <= end for start, end in ranges)
