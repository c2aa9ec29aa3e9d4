"""Large reads and writes without the page cache.

A pack is written once and read, if ever, by another process much later. Through the page cache it
costs a copy and new pages on both ways, which on a busy host takes memory from the very programs
that are dumped. Here the disk reads and writes the buffer directly.

Direct transfers need addresses, offsets and lengths in whole blocks; the rest, and file systems
without direct transfers, use ordinary calls. Both ways see the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

ALIGNMENT = 4096
_WORTHWHILE = 1 << 20  # bytes; below, the page cache costs nothing
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def _direct(fd: int) -> Iterator[bool]:
    """Put `fd` into direct mode inside the block; yield False where that is impossible."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def write(fd: int, view: memoryview) -> int:
    """Write the part of `view` that can go directly to the start of a new file.

    Returns the bytes written, maybe 0.
    """
    end = view.nbytes - view.nbytes % ALIGNMENT
    if end < _WORTHWHILE:
        return 0
    done = 0
    with _direct(fd) as possible:
        while possible and done < end:
            try:
                done += os.write(fd, view[done:end])
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                break
            if done % ALIGNMENT:
                break
    return done


def read(fd: int, offset: int, target: memoryview) -> int:
    """Read the part of `target` that can come directly from `offset`.

    Returns the bytes read, maybe 0.
    """
    end = target.nbytes - target.nbytes % ALIGNMENT
    if end < _WORTHWHILE or offset % ALIGNMENT or _cached(fd, offset, target[:ALIGNMENT]):
        return 0
    done = 0
    with _direct(fd) as possible:
        while possible and done < end:
            try:
                count = os.preadv(fd, [target[done:end]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                break
            done += count
            if not count or count % ALIGNMENT:
                break
    return done


def _cached(fd: int, offset: int, target: memoryview) -> bool:
    """Return whether the page cache holds the beginning.

    Then it most likely holds the rest, and is faster.
    """
    try:
        return os.preadv(fd, [target], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return True  # unknown: the ordinary way is always right
