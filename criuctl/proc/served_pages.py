"""The missing pages of one process, filled in from a memory file when they are touched.

A userfaultfd whose memory is registered for missing pages reports the first touch of each absent
page, and the thread waits. `ServedPages` copies that page and its neighbours in from a file that
holds the memory of the process (`Source`), or a page of zeros where the file has nothing. What the
process does to its address space is reported as events, in their order, and the thread waits for
that, too: what it moved is looked up at its new place, what it gave back reads as zeros, and a
forked child gets its own `ServedPages`.

Invariants: a page is copied at most once, and never after the process has given it back; while the
descriptor is open, no touch of a page that was not copied reads anything. The kernel takes a
missing page for zeros as soon as the last copy of the descriptor is closed, so it may be closed
only when `left` is empty, or when the process has ended.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, Self

from . import missing_pages
from .memory import PAGE
from .missing_pages import FAULT, FORK, REMAP, REMOVE, UNMAP
from .syscalls import address_of

_AROUND = 16 * PAGE  # bytes that come with a touched page
_ZEROS = 64 * PAGE  # bytes of zeros that come with one
_FILL = 512 * PAGE  # bytes that are copied at once when nothing waits for them
_SOMEWHERE = 1 << 20  # an address at which to ask whether there is an address space


class Span(NamedTuple):
    """Pages that are not copied yet, and where the file has them."""

    start: int
    end: int
    offset: int


class ProcessEnded(Exception):
    """The process, or its program, is not there any more."""


class Source:
    """The mapped memory file that pages come from."""

    def __init__(self, mapped: memoryview) -> None:
        """`mapped`: all of it, writable for this process, which does not write to it."""
        self._mapped = mapped
        self.address = address_of(mapped)


class ServedPages:
    """The missing pages of one process; `close` it."""

    def __init__(self, fd: int, spans: Iterable[Span], source: Source) -> None:
        """`fd`: its userfaultfd, non-blocking; `spans`: in ascending order."""
        self.fd, self._source = fd, source
        self.left = list(spans)
        self._events = missing_pages.EventReader(fd)
        self._waiting: list[int] = []  # touched addresses that could not be served yet
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether it may be closed: every page is there, or the process has ended."""
        return self._ended or not self.left

    @property
    def waits(self) -> bool:
        """Whether `serve` is to be called again although nothing was reported."""
        return bool(self._waiting)

    def close(self) -> None:
        """Close the descriptor: the kernel handles all pages of the process from now on."""
        os.close(self.fd)

    def serve(self) -> list[Self]:
        """Handle what was reported; return the children that were forked."""
        children = []
        try:
            for kind, first, second, third in self._events.read():
                if kind == FAULT:
                    self._waiting.append(second & -PAGE)
                elif kind == FORK:
                    children.append(type(self)(first & 0xFFFFFFFF, self.left, self._source))
                elif kind == REMAP:
                    self._move(first, second, third)
                elif kind in (REMOVE, UNMAP):
                    self._give_back(first, second)
            waiting, self._waiting = self._waiting, []
            for address in waiting:
                if not self._touched(address):
                    self._waiting.append(address)
        except ProcessEnded:
            self._ended = True
        return children

    def fill(self) -> None:
        """Copy some of what is missing; call it, and `serve`, until `done`."""
        try:
            if self.left:
                span = self.left[-1]
                self._bring(max(span.start, span.end - _FILL), span.end)
        except ProcessEnded:
            self._ended = True

    def look(self) -> None:
        """Notice whether the process has ended, which nothing reports."""
        place = _SOMEWHERE
        while (at := self._at(place)) >= 0 and place < self.left[at].end:
            place = self.left[at].end
        try:  # a page that is not left reads as zeros anyway
            missing_pages.zero(self.fd, place, PAGE)
        except OSError as error:
            self._ended = self._ended or error.errno == errno.ESRCH

    # -- touched pages ----------------------------------------------------------------------------

    def _touched(self, address: int) -> bool:
        """Serve a touched page; return whether that was possible now."""
        at = self._at(address)
        if at < 0 or address >= self.left[at].end:
            return self._zeros(address, at)
        span, block = self.left[at], address - address % _AROUND
        done = self._bring(max(span.start, block), min(span.end, block + _AROUND))
        if done:
            # Its page was there already, or is not registered any more: nothing else wakes it.
            self._wake(address)
        return done

    def _zeros(self, address: int, at: int) -> bool:
        """Serve a page that the file does not have, with the ones after it."""
        end = address - address % _ZEROS + _ZEROS
        if at + 1 < len(self.left):
            end = min(end, self.left[at + 1].start)
        for last in (end, address + PAGE):
            try:
                missing_pages.zero(self.fd, address, last - address)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return False
                if error.errno == errno.ESRCH:
                    raise ProcessEnded from error
                if error.errno == errno.ENOENT and last > address + PAGE:
                    continue  # it ends, or another mapping begins, before
                if error.errno not in (errno.ENOENT, errno.EEXIST):
                    raise
            break
        self._wake(address)
        return True

    def _wake(self, address: int) -> None:
        with suppress(OSError):
            missing_pages.wake(self.fd, address, PAGE)

    def _bring(self, start: int, end: int) -> bool:
        """Copy this part of one span, and note that; return False if events have to be read
        first.
        """
        span = self.left[self._at(start)]
        place, step, absent = start, end - start, -1
        try:
            while place < end:
                step = min(step, end - place)
                source = self._source.address + span.offset + place - span.start
                try:
                    place += missing_pages.copy(self.fd, place, source, step)
                    step = end - place
                except OSError as error:
                    if error.errno == errno.EAGAIN:
                        return False
                    if error.errno == errno.ESRCH:
                        raise ProcessEnded from error
                    if error.errno == errno.ENOENT and step > PAGE:
                        step = max(PAGE, step // 2 // PAGE * PAGE)  # several mappings
                    elif error.errno == errno.ENOENT and place != absent:
                        # A move that ran while the call waited for it looks like this, too. Its
                        # event is not read yet: the second call fails with EAGAIN.
                        absent = place
                    elif error.errno in (errno.EEXIST, errno.ENOENT):
                        place += PAGE  # it is there already, or nothing can miss it any more
                    else:
                        raise
        finally:
            self._give_back(start, place)
        return True

    # -- what is left -----------------------------------------------------------------------------

    def _at(self, address: int) -> int:
        """Return the index of the last span that begins at or before `address`, or -1."""
        return bisect_right(self.left, (address, 1 << 63, 0)) - 1

    def _cut(self, start: int, end: int) -> list[Span]:
        """Take this range out of what is left, and return it."""
        first = max(0, self._at(start))
        last = bisect_right(self.left, (end - 1, 1 << 63, 0))
        taken, kept = [], []
        for span in self.left[first:last]:
            low, high = max(start, span.start), min(end, span.end)
            if low >= high:
                kept.append(span)
                continue
            taken.append(Span(low, high, span.offset + low - span.start))
            if span.start < low:
                kept.append(Span(span.start, low, span.offset))
            if high < span.end:
                kept.append(Span(high, span.end, span.offset + high - span.start))
        self.left[first:last] = kept
        return taken

    def _give_back(self, start: int, end: int) -> None:
        if start < end:
            self._cut(start, end)

    def _move(self, old: int, new: int, length: int) -> None:
        """Follow mremap(2)."""
        moved = self._cut(old, old + length)
        self._give_back(new, new + length)
        by = new - old
        self.left = sorted(
            [*self.left, *(Span(one.start + by, one.end + by, one.offset) for one in moved)]
        )
