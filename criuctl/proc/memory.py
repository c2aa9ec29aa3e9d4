"""The memory of a running process: which pages exist, their contents, and which were written to.

Nothing here stops the process or changes its pages: the kernel walks the page tables
(``PAGEMAP_SCAN`` where it has it, Linux 6.7, else ``/proc/PID/pagemap``) and copies the contents.
So every answer is about a moment that has passed; a caller that needs one moment freezes the
process.

Contents are read through ``/proc/PID/mem``. ``process_vm_readv`` is a third faster, but it pins the
pages, and since Linux 5.19 a pin ends the sharing of pages since a fork: a tree of forked workers
would need a multiple of its memory. Both files stay with the address space they were opened on, so
neither a reused PID nor an exec mixes in other memory.

Written pages are known only by the soft-dirty bit, where the kernel was built with it
(`soft_dirty`). ``PAGEMAP_SCAN`` has ``PAGE_IS_WRITTEN``, which means "not write-protected by
userfaultfd": without a userfaultfd that the process itself has registered on its memory every page
counts as written, so it is of no use to another process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import NamedTuple, Self

from .procfs import reading
from .syscalls import address_of

PAGE = 4096
ENTRY_SIZE = 8  # bytes per page in pagemap

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_SCAN = struct.Struct("<12Q")
_REGION = struct.Struct("<3Q")
_REGIONS = 4096  # regions requested at once, at most
_FILE, _PRESENT, _SWAPPED, _ZERO, _SOFT_DIRTY, _GUARD = (
    1 << 2,
    1 << 3,
    1 << 4,
    1 << 5,
    1 << 7,
    1 << 8,
)
_TOP = (1 << 47) - PAGE  # all pages of a process are below, except vsyscall's
_PIECE = 1 << 30  # bytes of address space whose pagemap is read at once

# The highest byte of a pagemap entry: present 0x80, swapped 0x40, file page 0x20, guard 0x04.
_EXISTS = bytes(b & 0xC0 != 0 and not b & 0x24 for b in range(256))
# the next lower byte: soft-dirty is its highest bit
_DIRTY = bytes((b & 0x80) >> 6 for b in range(256))
_RUNS = re.compile(b"\1+|\3+")
# Exists, and is not marked as mapped by this process alone (0x01; never set for swapped pages).
_MAYBE_SHARED = bytes(b & 0xC0 != 0 and not b & 0x01 for b in range(256))
_OWN = re.compile(b"\0+")
_FRAME = (1 << 55) - 1


class Run(NamedTuple):
    """A run of adjacent pages that exist."""

    start: int
    end: int
    dirty: bool  # written to since `TaskMemory.clear_dirty`, where the kernel shows it


class TaskMemory:
    """The memory of one process. The constructor raises `NoSuchProcess` and `PreflightRefused`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with reading(pid):
            self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._mem = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            except BaseException:
                os.close(self._pagemap)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close both files."""
        os.close(self._pagemap)
        os.close(self._mem)

    @property
    def pagemap(self) -> int:
        """The descriptor of its pagemap, see `criuctl.proc.written_pages`."""
        return self._pagemap

    def runs(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Run]:
        """Yield the pages in these ascending ranges that are in memory or swapped out.

        Without pages of a file and pages of zeros.
        """
        if not scans():
            for start, end in ranges:
                yield from self._pagemap_runs(start, end)
            return
        found = self._scanned()
        run = next(found, None)
        for start, end in ranges:
            while run is not None and run.start < end:
                if run.end > start:
                    yield Run(max(run.start, start), min(run.end, end), run.dirty)
                if run.end > end:
                    break
                run = next(found, None)

    def frames(self, start: int, end: int) -> bytes:
        """Return the pagemap entries of this range.

        Two processes that share its page frames have the same entries.
        """
        return os.pread(
            self._pagemap, (end - start) // PAGE * ENTRY_SIZE, start // PAGE * ENTRY_SIZE
        )

    def own(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of this range without pages that another process may share since a
        fork.
        """
        for at in range(start, end, _PIECE):
            for found in _OWN.finditer(
                self.frames(at, min(at + _PIECE, end))[7::8].translate(_MAYBE_SHARED)
            ):
                yield at + found.start() * PAGE, at + found.end() * PAGE

    def read(self, pieces: Sequence[tuple[int, int]], target: memoryview) -> int:
        """Read these ranges, one after the other, into `target`.

        Returns the number of bytes up to the first page that cannot be read.
        """
        done = 0
        for start, end in pieces:
            while start < end:
                try:
                    count = os.preadv(self._mem, [target[done : done + end - start]], start)
                except OSError:  # EIO: the page does not exist (any more)
                    return done
                if count == 0:  # the process has ended
                    return done
                done, start = done + count, start + count
        return done

    def clear_dirty(self) -> None:
        """Restart the tracking of writes for `Run.dirty`.

        Costs the process a fault per written page.
        """
        with reading(self._pid):
            fd = os.open(f"/proc/{self._pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"4")
            finally:
                os.close(fd)

    def _scanned(self) -> Iterator[Run]:
        """Yield the runs of all of the address space, by PAGEMAP_SCAN."""
        regions = bytearray(_REGIONS * _REGION.size)
        at = 0
        while at < _TOP:
            try:
                count, at = _scan(self._pagemap, at, _TOP, regions)
            except ProcessLookupError:
                return  # the process has ended
            for start, end, categories in _REGION.iter_unpack(
                memoryview(regions)[: count * _REGION.size]
            ):
                if not categories & _GUARD:
                    yield Run(start, end, bool(categories & _SOFT_DIRTY))

    def _pagemap_runs(self, start: int, end: int) -> Iterator[Run]:
        """Yield the runs of one range by pagemap, testing the bits of many pages at a time."""
        for at in range(start, end, _PIECE):
            data = self.frames(at, min(at + _PIECE, end))
            there, dirty = data[7::8].translate(_EXISTS), data[6::8].translate(_DIRTY)
            marks = bytearray((int.from_bytes(there) | int.from_bytes(dirty)).to_bytes(len(there)))
            for page in _zero_pages(data):
                marks[page] = 0
            for found in _RUNS.finditer(marks):
                yield Run(
                    at + found.start() * PAGE, at + found.end() * PAGE, marks[found.start()] == 3
                )


def _scan(fd: int, start: int, end: int, regions: bytearray) -> tuple[int, int]:
    """Run one PAGEMAP_SCAN; return the number of regions found, and the address reached.

    It requests the same categories as CRIU does.
    """
    found = memoryview(regions)
    address = address_of(regions)
    wanted = _PRESENT | _SWAPPED
    categories = wanted | _SOFT_DIRTY | (_GUARD if guards() else 0)
    arguments = bytearray(
        _SCAN.pack(
            96,
            0,
            start,
            end,
            0,
            address,
            len(found) // _REGION.size,
            0,
            _ZERO | _FILE,
            _ZERO | _FILE,
            wanted,
            categories,
        )
    )
    count = fcntl.ioctl(fd, _PAGEMAP_SCAN, arguments, True)
    # The kernel's own "walk_end" may lie before regions that it has returned.
    room = len(found) // _REGION.size
    return count, end if count < room else _REGION.unpack_from(found, (count - 1) * _REGION.size)[1]


def _zero_pages(data: bytes) -> Iterator[int]:
    """Yield the indexes of pagemap entries that refer to the kernel's zero page."""
    frame = zero_frame()
    if not frame:
        return
    pattern = frame.to_bytes(8, "little")[:6]
    at = data.find(pattern)
    while at >= 0:
        if (
            at % ENTRY_SIZE == 0
            and int.from_bytes(data[at : at + ENTRY_SIZE], "little") & _FRAME == frame
        ):
            yield at // ENTRY_SIZE
        at = data.find(pattern, at + 1)


@cache
def scans() -> bool:
    """Return whether the kernel has PAGEMAP_SCAN."""
    return _probe(0)


@cache
def guards() -> bool:
    """Return whether PAGEMAP_SCAN reports guard pages."""
    return _probe(_GUARD)


def _probe(categories: int) -> bool:
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(
            fd,
            _PAGEMAP_SCAN,
            bytearray(_SCAN.pack(96, 0, 0, 0, 0, 0, 0, 0, 0, 0, _PRESENT, _PRESENT | categories)),
            True,
        )
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _own_entry(written: bool) -> int:
    """Return the pagemap entry of a page of ours that was written to, or only read."""
    with mmap.mmap(-1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[0] = 1 if written else memory[PAGE]
        start = address_of(memory) + (0 if written else PAGE)
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int.from_bytes(os.pread(fd, ENTRY_SIZE, start // PAGE * ENTRY_SIZE), "little")
        finally:
            os.close(fd)


@cache
def zero_frame() -> int:
    """Return the frame number of the kernel's zero page; 0 if frames are hidden from us."""
    return _own_entry(written=False) & _FRAME


@cache
def shows_frames() -> bool:
    """Return whether the kernel shows us page frame numbers (CAP_SYS_ADMIN)."""
    return bool(_own_entry(written=True) & _FRAME)


@cache
def soft_dirty() -> bool:
    """Return whether the kernel tracks which pages were written to."""
    return bool(_own_entry(written=True) >> 55 & 1)
