"""The calls of a userfaultfd whose memory is registered for missing pages.

Faults and changes of the mappings are read as events, pages are put in place. The kernel puts no
page where one is, and none (EAGAIN) while a fork, mremap, munmap or madvise has happened whose
event was not read yet.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import NamedTuple

_COPY, _ZEROPAGE, _WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_ARGUMENTS = struct.Struct("<4Qq")  # of UFFDIO_COPY: to, from, length, mode, result
_ZERO_ARGUMENTS = struct.Struct("<3Qq")  # start, length, mode, result
_RANGE = struct.Struct("<2Q")
_MESSAGE = struct.Struct("<B7x3Q")  # struct uffd_msg
_AT_ONCE = 32  # messages

FAULT, FORK, REMAP, REMOVE, UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16


class Event(NamedTuple):
    """What happened, by its kind.

    `FAULT`: in the page at `second`. `FORK`: the child has the userfaultfd `first`. `REMAP`:
    `third` bytes at `first` were moved to `second`. `REMOVE`, `UNMAP`: `first` to `second`.
    """

    kind: int
    first: int
    second: int
    third: int


class EventReader:
    """Read the events of one userfaultfd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._vacated: list[tuple[int, int]] = []  # by moves, until that is reported once more

    def read(self) -> list[Event]:
        """Return the events that wait, in order; the program that caused them goes on."""
        try:
            data = os.read(self._fd, _AT_ONCE * _MESSAGE.size)
        except BlockingIOError:
            return []
        return list(filter(self._counts, map(Event._make, _MESSAGE.iter_unpack(data))))

    def _counts(self, event: Event) -> bool:
        """Return False for the `UNMAP` that follows the `REMAP` of the same range.

        The thread that moved it sends it when it has run on, and another thread may have moved
        other pages into the range by then, whose `REMAP` came before.
        """
        if event.kind == REMAP:
            self._vacated.append((event.first, event.first + event.third))
        elif event.kind == UNMAP and (event.first, event.second) in self._vacated:
            self._vacated.remove((event.first, event.second))
            return False
        return True


def copy(fd: int, to: int, source: int, length: int) -> int:
    """Copy `length` bytes of ours at the address `source` to missing pages; return how many bytes.

    Fewer than `length`: the next page refuses. Raises `OSError` if the first one does: EEXIST (it
    is there), EAGAIN, ENOENT (it is not registered, or the range crosses mappings), ESRCH.
    """
    return _run(fd, _COPY, _ARGUMENTS, to, source, length, 0, 0)


def zero(fd: int, start: int, length: int) -> int:
    """Put zeros into missing pages; like `copy`."""
    return _run(fd, _ZEROPAGE, _ZERO_ARGUMENTS, start, length, 0, 0)


def wake(fd: int, start: int, length: int) -> None:
    """Let threads that wait for these pages try again."""
    fcntl.ioctl(fd, _WAKE, bytearray(_RANGE.pack(start, length)))


def _run(fd: int, request: int, shape: struct.Struct, *arguments: int) -> int:
    packed = bytearray(shape.pack(*arguments))
    try:
        fcntl.ioctl(fd, request, packed, True)
    except OSError as error:
        done = int(shape.unpack(packed)[-1])
        # the errno may be that of the call as a whole: the result has that of the page
        if done > 0:
            return done
        if done < 0 and error.errno == errno.EAGAIN:
            raise OSError(-done, os.strerror(-done)) from None
        raise
    return int(shape.unpack(packed)[-1])
