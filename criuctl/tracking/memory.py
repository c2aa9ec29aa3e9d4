"""The private memory of a tree, read while it runs; frozen, only what was written to since.

A round protects the pages that are not protected yet, reads them, and stores them as loose pages
(`CheckpointWriter.loose`). A page that the program writes to afterwards is not protected any more,
so the next round, or the look at the frozen tree, finds it. Of the frozen tree each page that has
contents is either still protected, and then it equals what was read, or it is read now.

Tracked are large private anonymous mappings that hold no code, of processes that allow it
(`userfault.take`) and have nothing that writes to memory past the page tables
(`written_pages.pins`). All else counts as written and is left to CRIU: small and shared mappings,
those of files, stacks, and what was mapped, moved, forked or executed since the last round.

Order matters in a round: first pages are protected, then the process is asked for what could write
past that, and only then they are read.

Known limit: a write by process_vm_writev(2), ptrace(2) or direct I/O that has looked a page up
before its protection, lasts longer than `_SETTLE`, and is gone from the descriptors of the process
before `pins` looks, is missed.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.buffers import PageBuffer
from ..checkpoint.writer import CheckpointWriter, WriterStats
from ..criu.memory_ahead import Cut, cut, joined
from ..criu.pages import PAGE, WINDOW, ImageKey
from ..errors import CriuctlError, NoSuchProcess
from ..proc import userfault, written_pages
from ..proc.mappings import Mapping, each_mapping
from ..proc.memory import Run, TaskMemory
from ..proc.tree import Process, ProcessIdentity, read_tree
from ..report import Reporter
from .rounds import Round

LEAST = WINDOW  # bytes of a mapping that is tracked
_SETTLE = 0.01  # seconds for calls that write to another process's memory to end
_PATIENCE = 0.5  # seconds for direct I/O to end
_ROUNDS = 8
_SECONDS = 600.0
_LITTLE = 1 << 20  # bytes of a round after which another one is not worth it
_SHRINK = 0.7
_SCATTERED = WINDOW // 4  # a smaller part of a window shares a chunk with others

Range = tuple[int, int]


class Task(Struct, eq=False):
    """A process whose writes are tracked."""

    identity: ProcessIdentity
    inside: int  # its PID in its namespace
    uffd: int
    memory: TaskMemory
    ranges: list[Range]  # registered, ascending
    # number of a window -> 1 + number of each of its loose pages; 0: not read
    read: dict[int, array[int]] = field(default_factory=dict)
    unread: list[Range] = field(default_factory=list)  # protected, but could not be read
    # of the frozen process: pages with contents, ascending, and the number of the first one if
    # they were read only now
    last: list[tuple[int, int, int]] = field(default_factory=list)
    hidden: list[Range] = field(default_factory=list)

    @property
    def key(self) -> ImageKey:
        """Its image."""
        return ImageKey("task", self.inside)

    def close(self) -> None:
        """End the tracking: the kernel forgets all."""
        if self.uffd >= 0:
            os.close(self.uffd)
            self.uffd = -1
            self.memory.close()

    def note(self, pieces: Sequence[Range], number: int) -> None:
        """Note the pages of one window: the number of the first; -1: they were not read."""
        window = pieces[0][0] // WINDOW
        numbers = self.read.get(window)
        if numbers is None:
            numbers = self.read[window] = array("Q", bytes(WINDOW // PAGE * 8))
        base = window * WINDOW
        for start, end in pieces:
            pages = (end - start) // PAGE
            first = (start - base) // PAGE
            numbers[first : first + pages] = array(
                "Q", range(number + 1, number + 1 + pages) if number >= 0 else [0] * pages
            )
            if number >= 0:
                number += pages
            else:
                self.unread.append((start, end))


class TrackedMemory:
    """The tracked memory of one tree, from the first round to its assembly; `close` it."""

    def __init__(self, writer: CheckpointWriter, root: int, reporter: Reporter) -> None:
        self.tasks: dict[int, Task] = {}  # by our PID
        self.refused: dict[int, str] = {}  # processes that are left to CRIU, and why
        self.rounds: list[Round] = []
        self.dirty = 0  # bytes that were read of the frozen tree
        self._writer, self._root, self._reporter = writer, root, reporter

    def close(self) -> None:
        """Forget everything; nothing is left in the processes."""
        for task in self.tasks.values():
            task.close()
        self.tasks.clear()

    def stop(self) -> None:
        """Stop the tracking; what was read is kept."""
        for task in self.tasks.values():
            task.close()

    # -- while the tree runs -----------------------------------------------------------------------

    def prepare(self, *, step: str = "track", durable: bool = False) -> None:
        """Read the tree's memory in rounds, until little is left to read.

        `step`: the name of a round in reports. With `durable` each round waits until all is in the
        store, and the compression is adapted to its speed.
        """
        try:
            self._register()
        except OSError as error:  # no process for it could be started
            self.refused[self._root] = str(error)
        deadline = time.monotonic() + _SECONDS
        while self.tasks and not self._enough() and time.monotonic() < deadline:
            began, before = time.monotonic(), replace(self._writer.stats)
            size = self._round(first=not self.rounds)
            if durable or not self.rounds:
                self._writer.flush()  # else it would compete with the freeze
            self.rounds.append(self._measured(size, before, time.monotonic() - began))
            made = self.rounds[-1]
            self._reporter.step(step, round=made.number, read=made.read, changed=made.new)
            if durable:
                self._writer.adapt(before)
        self._writer.wait_hashed()

    def _measured(self, size: int, before: WriterStats, seconds: float) -> Round:
        after = self._writer.stats
        new, stored = (
            after.bytes_new - before.bytes_new,
            after.bytes_stored - before.bytes_stored,
        )
        return Round(len(self.rounds) + 1, size, new, stored, seconds)

    def _enough(self) -> bool:
        if not self.rounds:
            return False
        last = self.rounds[-1].read
        return (
            len(self.rounds) >= _ROUNDS
            or (len(self.rounds) > 1 and last <= _LITTLE)
            or (len(self.rounds) > 2 and last > _SHRINK * self.rounds[-2].read)
        )

    def _register(self) -> None:
        """Begin to track the processes of the tree that have memory worth it."""
        wanted: dict[int, tuple[Process, list[Range]]] = {}
        for process in read_tree(self._root):
            with suppress(CriuctlError):
                ranges = [] if process.zombie else _ranges(process.pid)
                if ranges:
                    wanted[process.pid] = process, ranges
        for pid, taken in userfault.take(list(wanted)).items():
            process, ranges = wanted[pid]
            if isinstance(taken, str):
                self.refused[pid] = taken
                continue
            try:
                memory = TaskMemory(pid)
            except CriuctlError as error:
                os.close(taken)
                self.refused[pid] = error.message
                continue
            done = [one for one in ranges if written_pages.register(taken, *one)]
            self.tasks[pid] = Task(process.identity, process.ns_pid, taken, memory, done)

    def _round(self, *, first: bool) -> int:
        """Protect and read what is not protected; return how many bytes were read."""
        found: dict[int, list[Cut]] = {}
        for pid, task in list(self.tasks.items()):
            try:
                found[pid] = list(cut(_protected(task, every=first)))
            except OSError as error:
                self._leave(pid, str(error))
        time.sleep(_SETTLE)
        size = 0
        for pid, windows in found.items():
            if why := _pinned(pid):
                self._leave(pid, why)
            else:
                size += self._read(self.tasks[pid], windows, whole=first)
        return size

    def _leave(self, pid: int, why: str) -> None:
        """Leave a process to CRIU."""
        self.refused[pid] = why
        self.tasks.pop(pid).close()

    def _read(self, task: Task, windows: Sequence[Cut], *, whole: bool) -> int:
        """Read and store these windows; return how many bytes could be read."""
        at, total = 0, 0
        while at < len(windows):
            buffer = self._writer.acquire()
            try:
                end, size = at, 0
                while end < len(windows) and size + windows[end].size <= len(buffer.view):
                    size += windows[end].size
                    end += 1
                got = task.memory.read(joined(windows[at:end]), buffer.view)
                place = 0
                for window in windows[at:end]:
                    number = -1
                    if place + window.size <= got:
                        number = self._writer.loose(
                            buffer,
                            place,
                            place + window.size,
                            scattered=not whole and window.size <= _SCATTERED,
                        )
                    task.note(window.pieces, number)
                    place += window.size
                at, total = end, total + got
            finally:
                self._writer.release(buffer)
        return total

    # -- frozen ------------------------------------------------------------------------------------

    def frozen(self, tree: Sequence[Process]) -> dict[int, list[Range]]:
        """Read what was written to since the last round; return what CRIU need not look at, by our
        PIDs.
        """
        self.dirty = 0
        identities = {process.pid: process.identity for process in tree if not process.zombie}
        hidden = {}
        for pid, task in self.tasks.items():
            task.last, task.hidden = [], []
            if identities.get(pid) != task.identity:
                continue
            try:
                self._look(task)
            except (OSError, CriuctlError) as error:  # CRIU reads it all
                self.refused[pid] = str(error)
            else:
                hidden[pid] = task.hidden
        return hidden

    def _look(self, task: Task) -> None:
        pid = task.identity.pid
        found = [
            (max(start, low), min(end, high))
            for low, high in ((m.start, m.end) for m in each_mapping(pid) if _trackable(m))
            for start, end in task.ranges
            if start < high and low < end
        ]
        with TaskMemory(pid) as memory:  # of the program that it runs now
            areas: list[tuple[int, int, bool]] = []
            for start, end in found:
                areas += written_pages.look(memory.pagemap, start, end)
            if task.unread:
                areas = list(_divided(areas, task.unread))
            self._read_frozen(task, memory, areas)
        task.hidden = found

    def _read_frozen(
        self, task: Task, memory: TaskMemory, areas: Sequence[tuple[int, int, bool]]
    ) -> None:
        """Read those of these areas that are not clean, and note all of them."""
        buffer: PageBuffer | None = None
        fill = 0
        try:
            for start, end, clean in areas:
                if clean:
                    task.last.append((start, end, -1))
                    continue
                while start < end:
                    if buffer is None or fill == len(buffer.view):
                        if buffer is not None:
                            self._writer.release(buffer)
                        buffer, fill = self._writer.acquire(), 0
                    stop = min(
                        end, start + len(buffer.view) - fill, start // WINDOW * WINDOW + WINDOW
                    )
                    size = stop - start
                    if memory.read([(start, stop)], buffer.view[fill : fill + size]) != size:
                        raise NoSuchProcess(
                            f"the memory of PID {task.identity.pid} is not readable"
                        )
                    number = self._writer.loose(
                        buffer, fill, fill + size, scattered=size <= _SCATTERED
                    )
                    task.last.append((start, stop, number))
                    fill += size
                    self.dirty += size
                    start = stop
        finally:
            if buffer is not None:
                self._writer.release(buffer)


def _trackable(mapping: Mapping) -> bool:
    """Return whether it is private anonymous memory without code, and nothing special."""
    return (
        not mapping.inode
        and mapping.perms[2:] == "-p"
        and (mapping.path in ("", "[heap]") or mapping.path.startswith("[anon:"))
    )


def _ranges(pid: int) -> list[Range]:
    """Return the mappings of a process that are worth tracking."""
    return [
        (m.start, m.end)
        for m in each_mapping(pid)
        if m.size >= LEAST and "w" in m.perms and _trackable(m)
    ]


def _pinned(pid: int) -> str:
    """Return what may write to the process's memory past its page tables; "" once there was a
    moment without.

    What was under way when the pages were protected has ended then.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            why = written_pages.pins(pid)
        except CriuctlError as error:
            return error.message
        if not why or time.monotonic() > until:
            return why
        time.sleep(0.001)


def _protected(task: Task, *, every: bool) -> Iterator[Run]:
    """Protect all pages, and yield those that were not; with `every` also those that were already,
    by whatever was there before: Linux before 6.13 leaves the protection to memory that has moved.
    """
    for start, end in task.ranges:
        changed = list(written_pages.protect(task.memory.pagemap, start, end))
        if every:
            changed = [
                (a.start, a.end) for a in written_pages.look(task.memory.pagemap, start, end)
            ]
        for low, high in changed:
            yield Run(low, high, dirty=True)


def _divided(
    areas: Sequence[tuple[int, int, bool]], unread: Sequence[Range]
) -> Iterator[tuple[int, int, bool]]:
    """Yield these areas; what was not read counts as written."""
    borders = sorted({border for one in unread for border in one})
    for start, end, clean in areas:
        places = [start, *(b for b in borders if start < b < end), end] if clean else [start, end]
        for low, high in pairwise(places):
            missed = any(first <= low and high <= last for first, last in unread)
            yield low, high, clean and not missed
