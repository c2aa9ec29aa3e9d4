"""The pages that a process has written to, by asynchronous write-protection (Linux 6.7).

Memory is registered with a userfaultfd of its process (`criuctl.proc.userfault`). PAGEMAP_SCAN then
protects pages, and reports which of the protected ones were written to since: the kernel resolves
the fault of such a write by itself. What is not registered counts as written: memory that was
mapped or moved (mremap) since, that of a forked child, and of a new program (exec).

One kind of write is not seen: through a reference to the page that is older than the protection.
See `criuctl.proc.kernel_writers`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from .memory import PAGE, guards, scans
from .syscalls import USER_MODE_ONLY, address_of, moved, userfaultfd

_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_API, _WP_ASYNC, _WP_UNPOPULATED = 0xAA, 1 << 15, 1 << 13
_MODE_WP = 2

_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("<12Q")
_REGION = struct.Struct("<3Q")
_REGIONS = 16384
_WP_ALLOWED, _WRITTEN, _PRESENT, _SWAPPED, _ZERO, _GUARD = (
    1 << 0,
    1 << 1,
    1 << 3,
    1 << 4,
    1 << 5,
    1 << 8,
)
_WP_MATCHING = 1

Range = tuple[int, int]


class Area(NamedTuple):
    """A run of adjacent pages; `clean`: protected, and not written to since."""

    start: int
    end: int
    clean: bool


@cache
def supported() -> bool:
    """Return whether this kernel tracks writes this way."""
    if not scans() or os.uname().machine != "x86_64":
        return False
    try:
        fd = userfaultfd(os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY)
    except OSError:
        return False
    try:
        enable(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@cache
def forgets_moved() -> bool:
    """Return whether memory that is moved (mremap) loses its protection, as since Linux 6.13.

    Otherwise memory that is registered later may seem protected since before.
    """
    fd = userfaultfd(os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY)
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enable(fd)
        with mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory[0] = 1
            start = address_of(memory)
            if not register(fd, start, start + PAGE) or not list(
                protect(pagemap, start, start + PAGE)
            ):
                return False
            with moved(start, PAGE) as place:
                known = register(fd, place, place + PAGE)
                return known and not any(area.clean for area in look(pagemap, place, place + PAGE))
    except OSError:
        return False
    finally:
        os.close(pagemap)
        os.close(fd)


def enable(fd: int) -> None:
    """Switch a new userfaultfd to asynchronous write-protection."""
    fcntl.ioctl(
        fd, _UFFDIO_API, bytearray(struct.pack("<3Q", _API, _WP_ASYNC | _WP_UNPOPULATED, 0))
    )


def register(fd: int, start: int, end: int) -> bool:
    """Have the writes to this range tracked; return whether that was possible.

    `fd`: a userfaultfd of its process, see `take`.
    """
    try:
        fcntl.ioctl(
            fd, _UFFDIO_REGISTER, bytearray(struct.pack("<4Q", start, end - start, _MODE_WP, 0))
        )
    except OSError:  # it has changed meanwhile, or the process is gone
        return False
    return True


def protect(pagemap: int, start: int, end: int) -> Iterator[Range]:
    """Protect the pages of the registered memory in this range that are not protected (any more),
    and yield them.

    Only pages with contents: in memory or swapped out, not of zeros.
    """
    without = _ZERO | _guard()
    for first, last, _ in _scanned(
        pagemap,
        start,
        end,
        flags=_WP_MATCHING,
        without=without,
        wanted=_WP_ALLOWED | _WRITTEN,
        reported=_PRESENT,
    ):
        yield first, last


def look(pagemap: int, start: int, end: int) -> Iterator[Area]:
    """Yield the pages with contents in this range, without protecting any."""
    for first, last, found in _scanned(
        pagemap,
        start,
        end,
        flags=0,
        without=_ZERO | _guard(),
        wanted=0,
        reported=_WP_ALLOWED | _WRITTEN,
    ):
        yield Area(first, last, found & (_WP_ALLOWED | _WRITTEN) == _WP_ALLOWED)


def _guard() -> int:
    return _GUARD if guards() else 0


def _scanned(
    pagemap: int, start: int, end: int, *, flags: int, without: int, wanted: int, reported: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the regions that PAGEMAP_SCAN finds; nothing more once the process has ended."""
    regions = bytearray(_REGIONS * _REGION.size)
    address = address_of(regions)
    while start < end:
        arguments = bytearray(
            _SCAN.pack(
                _SCAN.size,
                flags,
                start,
                end,
                0,
                address,
                _REGIONS,
                0,
                without,
                without | wanted,
                _PRESENT | _SWAPPED,
                reported,
            )
        )
        try:
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arguments, True)
        except ProcessLookupError:
            return
        yield from _REGION.iter_unpack(bytes(memoryview(regions)[: count * _REGION.size]))
        # The kernel's own "walk_end" may lie before regions that it has returned.
        if count < _REGIONS:
            return
        start = _REGION.unpack_from(regions, (count - 1) * _REGION.size)[1]
