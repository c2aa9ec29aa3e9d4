"""Memory that arrives while the program runs: page faults are answered, pages are put in place.

An `Arrival` serves the userfaultfds of several address spaces, which were registered for missing
pages. One thread reads their events. Faults are handed to a few others, which have the page brought
(`bring`); meanwhile the caller puts all pages in its own order (`put`, from several threads).

A page that the program has written, unmapped or discarded is never overwritten:

- The kernel puts no page where one is.
- Where a page belongs is looked up (`AbsentPages`) and the page put without an event being read
  between the two. While an event of a fork, mremap, munmap or madvise waits, the kernel puts
  nothing (EAGAIN), and the call that caused it does not return. So a page is put by what the
  mappings are now.
- A fault where no page will arrive gets zeros in the same way.

A forked child has an address space of its own, with all pages that its parent lacks. Spaces are
only ever appended, under the lock of the parent: a thread that puts a page in all spaces, one after
the other, finds the child after its parent.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from . import missing_pages
from .absent_pages import AbsentPages, Run
from .memory import PAGE
from .syscalls import Readable, pinned

_FAULT_THREADS = 4  # a store may need long for one page
_ZEROS = 64  # pages that are filled with zeros at once
_RETRY = 0.02  # seconds, if no event comes
_NICE = -18  # of threads that the program waits for
_YIELD = 0.005  # seconds that a page which nothing waits for gives way to faults, at most

# brings the page of an address space (by its key) whose home this is, by `Arrival.put`
Bring = Callable[[int, int], None]


class _Closed(Exception):
    """The arrival was ended."""


class _Space:
    """One address space."""

    def __init__(self, fd: int, key: int, absent: AbsentPages, check: Callable[[], None]) -> None:
        """`check` raises why pages cannot arrive any more."""
        self.fd, self.key, self.absent, self._check = fd, key, absent, check
        self.events = missing_pages.EventReader(fd)
        self.gone = False  # it has ended, or runs another program
        # Protects what follows and `absent`; held while events are read.
        self._changed = threading.Condition()
        self._putting = 0  # threads that put pages now
        self._reading = False
        self._events = 0  # how often some were read

    @contextmanager
    def mappings_stay(self) -> Iterator[None]:
        """Keep events from being read; several threads may do so at once."""
        with self._changed:
            while self._reading:
                self._changed.wait()
            self._putting += 1
        try:
            yield
        finally:
            with self._changed:
                self._putting -= 1
                self._changed.notify_all()

    @contextmanager
    def mappings_change(self) -> Iterator[None]:
        """Let no page be put."""
        with self._changed:
            self._reading = True
            while self._putting:
                self._changed.wait()
            try:
                yield
            finally:
                self._reading = False
                self._events += 1
                self._changed.notify_all()

    def put(self, home: int, address: int, length: int) -> None:
        """Put pages, which lie at `address` in our memory, where they are absent."""
        while not self.gone:
            with self._changed:
                seen = self._events
            with self.mappings_stay():
                with self._changed:
                    wanted = self.absent.located(home, home + length)
                if all(self._copy(run, address + run.home - home) for run in wanted):
                    return
            self._wait(seen)

    def resolve(self, address: int) -> int | None:
        """Return the home of the page whose fault this is; None if it has zeros now, or none."""
        size = _ZEROS * PAGE
        while not self.gone:
            with self._changed:
                seen = self._events
            with self.mappings_stay():
                with self._changed:
                    home = self.absent.home(address)
                    end = self.absent.next(address, address + size)
                if home is not None:
                    return home
                try:
                    missing_pages.zero(self.fd, address, end - address)
                except OSError as error:
                    if error.errno == errno.ENOENT and size > PAGE:
                        size = PAGE  # another mapping begins
                        continue
                    if error.errno != errno.EAGAIN:
                        self._refused(error, errno.EEXIST, errno.ENOENT)
                        return None
                else:
                    return None
            self._wait(seen)
        return None

    def wake(self, address: int) -> None:
        """Let threads that wait for this page try again."""
        with suppress(OSError):  # it has ended
            missing_pages.wake(self.fd, address, PAGE)

    def skip(self, home: int, length: int) -> None:
        """Note that these pages have only zeros, which need not be put."""
        with self.mappings_stay(), self._changed:
            for run in self.absent.located(home, home + length):
                self.absent.remove(run.start, run.end)

    def end(self) -> None:
        """Note that it has ended."""
        self.gone = True
        self.absent = AbsentPages()

    def _wait(self, seen: int) -> None:
        """Wait until events were read; the mapping call may not have caused its one yet."""
        self._check()
        with self._changed:
            self._changed.wait_for(lambda: self._events != seen, _RETRY)

    def _copy(self, run: Run, source: int) -> bool:
        """Copy one run; return False if an event has to be read first."""
        at, step = run.start, run.end - run.start
        again = False  # ENOENT may also come from a change that is known only to the next call
        while at < run.end and not self.gone:
            try:
                done = missing_pages.copy(
                    self.fd, at, source + at - run.start, min(step, run.end - at)
                )
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return False
                if error.errno == errno.ENOENT and (step > PAGE or not again):
                    again = step <= PAGE
                    step = max(step // 2 // PAGE, 1) * PAGE
                    continue
                self._refused(error, errno.EEXIST, errno.ENOENT)
                if self.gone:
                    return True
                done = PAGE  # it is there, or nothing is mapped
                self.wake(at)
            again, step = False, step * 2
            with self._changed:
                self.absent.remove(at, at + done)
            at += done
        return True

    def _refused(self, error: OSError, *harmless: int) -> None:
        if error.errno in (errno.ESRCH, errno.ENOSPC):  # the second one: before Linux 4.16
            self.end()
        elif error.errno not in harmless:
            raise error


class Arrival:
    """The address spaces of one tree whose memory arrives."""

    def __init__(self, bring: Bring, hold: Callable[[int], None]) -> None:
        """`bring` is called from several threads; `hold` gets the userfaultfd of each child."""
        self._error: BaseException | None = None  # why pages cannot arrive
        self._bring, self._hold = bring, hold
        self._spaces: dict[int, list[_Space]] = {}
        self._by_fd: dict[int, _Space] = {}
        self._faults: SimpleQueue[tuple[_Space, int] | None] = SimpleQueue()
        self._waiting = 0  # faults that are not answered
        self._answered = threading.Condition()
        self._poll = select.epoll()
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._poll.register(self._stop, select.EPOLLIN)
        self._threads = [threading.Thread(target=self._watch, name="criuctl-events", daemon=True)]
        self._threads += [
            threading.Thread(target=self._serve, name=f"criuctl-faults-{n}", daemon=True)
            for n in range(_FAULT_THREADS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise why pages cannot arrive, if they cannot."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop, and close all userfaultfds; what is absent then is zeros for the program."""
        self._fail(_Closed())
        os.write(self._stopped, b"x")
        for _ in self._threads:
            self._faults.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for fd in self._by_fd:
            os.close(fd)
        self._by_fd.clear()
        self._poll.close()
        os.close(self._stop)
        os.close(self._stopped)

    def add(self, fd: int, key: int, runs: Iterable[tuple[int, int]]) -> None:
        """Serve a userfaultfd, which is closed at the end; `runs`: of pages that are to arrive."""
        absent = AbsentPages(Run(start, end, start) for start, end in runs)
        self._append(_Space(fd, key, absent, self.check))

    def put(self, key: int, home: int, content: Readable) -> None:
        """Put whole pages in every space of this key; raise why that cannot be."""
        self._give_way()
        with pinned(content) as address:
            for space in self._of(key):
                space.put(home, address, len(content))

    def skip(self, key: int, home: int, length: int) -> None:
        """Leave pages out that have only zeros."""
        for space in self._of(key):
            space.skip(home, length)

    def absent(self) -> list[tuple[int, int, int]]:
        """Return the runs that have not arrived: key, home, length."""
        return [
            (space.key, run.home, run.end - run.start)
            for space in list(self._by_fd.values())
            for run in space.absent.runs()
        ]

    def _give_way(self) -> None:
        """Wait while faults are answered, in a thread that answers none: it would take processors,
        and Python's lock, from those that do.
        """
        if self._waiting and threading.current_thread() not in self._threads:
            with self._answered:
                self._answered.wait_for(lambda: not self._waiting, _YIELD)

    def _of(self, key: int) -> Iterator[_Space]:
        """Yield the spaces, also those that are appended meanwhile."""
        spaces, number = self._spaces.get(key, []), 0
        while number < len(spaces):
            self.check()
            yield spaces[number]
            number += 1

    def _append(self, space: _Space) -> None:
        self._by_fd[space.fd] = space
        self._spaces.setdefault(space.key, []).append(space)
        self._poll.register(space.fd, select.EPOLLIN)

    # -- threads -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        _hurry()
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd == self._stop:
                        return
                    self._read(self._by_fd[fd])
        except BaseException as error:
            self._fail(error)

    def _read(self, space: _Space) -> None:
        faults = []
        with space.mappings_change():
            for kind, first, second, third in space.events.read():
                if kind == missing_pages.FAULT:
                    faults.append(second - second % PAGE)
                elif kind == missing_pages.FORK:
                    child = first & 0xFFFFFFFF
                    self._hold(child)
                    self._append(_Space(child, space.key, space.absent.copy(), self.check))
                elif kind == missing_pages.REMAP:
                    space.absent.move(first, second, third)
                elif kind in (missing_pages.REMOVE, missing_pages.UNMAP):
                    space.absent.remove(first, second)
        with self._answered:
            self._waiting += len(faults)
        for address in faults:
            self._faults.put((space, address))

    def _serve(self) -> None:
        _hurry()
        try:
            while (fault := self._faults.get()) is not None:
                space, address = fault
                home = space.resolve(address)
                if home is not None:
                    self._bring(space.key, home)
                # The page may have moved meanwhile: then its thread faults elsewhere, or again.
                space.wake(address)
                with self._answered:
                    self._waiting -= 1
                    self._answered.notify_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Put no more pages; threads of the program that wait go on waiting."""
        self._error = self._error or error


def _hurry() -> None:
    """Run this thread before others."""
    with suppress(OSError):  # it is not allowed everywhere
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
