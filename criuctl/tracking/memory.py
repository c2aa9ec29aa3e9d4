"""The private memory of a tree, read while it runs; frozen, only what was written to since.

A round protects the pages that are not protected yet, reads them, and stores them as loose pages
(`CheckpointWriter.loose`). A page that the program writes to afterwards is not protected any more,
so the next round, or the look at the frozen tree, finds it. Of the frozen tree each page that has
contents is either still protected, and then it equals what was read, or it is read now.

Tracked are large private anonymous mappings that hold no code, of processes that allow it
(`userfault.take`), have no code for a userfaultfd of their own (`userfault_code`), and have nothing
that writes to memory past the page tables for long (`kernel_writers.pins`). All else counts as
written and is left to CRIU: small and shared mappings, those of files, stacks, and what was mapped,
moved, forked or executed since the last round.

Order matters in a round: first pages are protected, then calls that could write to them without a
mark are waited for (`kernel_writers.unfinished`), and only then the pages are read. Those that such
a call may still write to are read when the tree is frozen, as calls have ended then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ..checkpoint.buffers import BUFFER_SIZE
from ..checkpoint.writer import CheckpointWriter, WriterStats
from ..criu.memory_ahead import Cut, cut, joined
from ..criu.pages import PAGE, WINDOW
from ..errors import CriuctlError, NoSuchProcess
from ..proc import kernel_writers, userfault, userfault_code, written_pages
from ..proc.limits import free_descriptors
from ..proc.mappings import each_mapping
from ..proc.memory import Run, TaskMemory
from ..proc.tree import Process, read_tree
from ..report import Reporter
from .base import Base
from .protection import pinned, protected, ranges_of, trackable
from .rounds import Round
from .task import Range, Task

_DESCRIPTORS = 3  # of a process that is tracked
_ROUNDS = 8
_SECONDS = 600.0
_LITTLE = 1 << 20  # bytes of a round after which another one is not worth it
_SHRINK = 0.7
_BUSY = "too much of its memory is written to all the time"
_RUN = 16384  # bytes that are read in the time that a run of pages takes, however short
_SCATTERED = WINDOW // 4  # a smaller part of a window shares a chunk with others


class TrackedMemory:
    """The tracked memory of one tree, from the first round to its assembly; `close` it."""

    def __init__(
        self,
        writer: CheckpointWriter,
        root: int,
        reporter: Reporter,
        base: Base | None = None,
    ) -> None:
        """`base`: the tracking since an earlier checkpoint."""
        self.tasks: dict[int, Task] = {}  # by our PID
        self.refused: dict[int, str] = {}  # what is left to the freeze, at least in part: why
        self.rounds: list[Round] = []
        self.dirty = 0  # bytes that were read of the frozen tree
        self.known = 0  # bytes that an earlier checkpoint has
        self.busy = False  # a process was left to CRIU because it writes too much
        self._code: dict[int, int] = {}  # by our PID
        self._files: dict[userfault_code.File, bool] = {}
        self._writer, self._root, self._reporter, self._base = writer, root, reporter, base

    def close(self) -> None:
        """Forget everything; nothing is left in the processes, except by `hand_over`."""
        for task in self.tasks.values():
            task.close()
        self.tasks.clear()

    def stop(self) -> None:
        """Stop the tracking; what was read is kept."""
        for task in self.tasks.values():
            task.close()

    def hand_over(self) -> dict[int, tuple[Task, int]]:
        """Give the tracking away: the tasks that are worth it, by our PIDs, and their descriptors,
        which the caller closes.
        """
        given = {}
        for pid, task in self.tasks.items():
            if task.uffd >= 0 and task.hidden:
                given[pid] = task, task.uffd
                task.forget()
        return given

    # -- while the tree runs -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to track the tree's processes."""
        try:
            self._register()
        except OSError as error:  # no process for it could be started
            self.refused[self._root] = str(error)
        for pid in list(self.tasks):
            if why := pinned(pid):
                self._leave(pid, why)

    def read(self, *, step: str = "track", durable: bool = False) -> None:
        """Read the tree's memory in rounds, until little is left to read.

        `step`: the name of a round in reports. With `durable` each round waits until all is in the
        store, and the compression is adapted to its speed.
        """
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
        self._leave_busy()
        for task in self.tasks.values():
            task.settle()
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
        last, more = self.rounds[-1].read, len(self.rounds) > 1
        return (
            len(self.rounds) >= _ROUNDS
            or (last <= _LITTLE and (more or self.known > 0))
            or (more and last > _SHRINK * self.rounds[-2].read)
        )

    def _register(self) -> None:
        """Begin to track the processes of the tree that have memory worth it."""
        wanted: dict[int, tuple[Process, list[Range]]] = {}
        for process in read_tree(self._root):
            with suppress(CriuctlError):
                ranges = [] if process.zombie else ranges_of(process.pid)
                if ranges and self._quiet(process):
                    wanted[process.pid] = process, ranges
        if self._base is not None:
            self._continue(self._base, wanted)
        fresh = [pid for pid in wanted if pid not in self.tasks]
        fresh.sort(
            key=lambda pid: sum(start - end for start, end in wanted[pid][1])
        )  # largest first
        room = free_descriptors() // _DESCRIPTORS
        self.refused |= dict.fromkeys(fresh[room:], "there are not enough descriptors for it")
        fresh = fresh[:room]
        for pid, taken in userfault.take(fresh).items() if fresh else ():
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
            self.tasks[pid] = Task(
                process.identity, process.ns_pid, taken, memory, done, self._code[pid]
            )

    def _quiet(self, process: Process) -> bool:
        """Return whether no code of this process asks for a userfaultfd of its own."""
        pid = process.pid
        self._code[pid] = userfault_code.code_of(pid)
        if self._base is not None and self._base.code(process.identity) == self._code[pid]:
            return True
        if userfault_code.may_ask(pid, self._files):
            self.refused[pid] = "its program may make a userfaultfd of its own"
            return False
        return True

    def _continue(self, base: Base, wanted: Mapping[int, tuple[Process, list[Range]]]) -> None:
        """Go on with the tracking of these processes where an earlier snapshot has left it."""
        for pid, (process, ranges) in wanted.items():
            uffd = base.descriptor(process.identity)
            if uffd < 0:
                continue
            done = [one for one in ranges if written_pages.register(uffd, *one)]
            try:
                # Without any, its descriptor is of the program that it has run before.
                memory = TaskMemory(pid) if done else None
            except CriuctlError:
                memory = None
            if memory is None:
                os.close(uffd)
                continue
            task = self.tasks[pid] = Task(
                process.identity, process.ns_pid, uffd, memory, done, self._code[pid]
            )
            self.known += base.fill(task, self._writer)

    def _round(self, *, first: bool) -> int:
        """Protect and read what is not protected; return how many bytes were read."""
        found: dict[int, list[Cut]] = {}
        for pid, task in list(self.tasks.items()):
            try:
                found[pid] = list(cut(protected(task, every=first and not task.based)))
            except OSError as error:
                self._leave(pid, str(error))
        calls = kernel_writers.unfinished([pid for pid, windows in found.items() if windows])
        size = 0
        for pid, windows in found.items():
            task, why = self.tasks[pid], calls.processes.get(pid, "")
            if (why_pinned := pinned(pid)) or (why and not task.read):
                self._leave(pid, why_pinned or why)
            elif why:
                self.refused[pid] = f"what was written last was read frozen: {why}"
                for window in windows:
                    task.note(window.pieces, -1)
            else:
                size += self._read(task, windows, whole=first)
                for start, end in calls.ranges.get(pid, ()):
                    if task.doubt(start, end):
                        self.refused[pid] = "what a call was reading into was read frozen"
        return size

    def _leave_busy(self) -> None:
        """Leave to CRIU what was written to so much since the last round that CRIU reads it
        sooner.
        """
        for pid, task in list(self.tasks.items()):
            areas = [
                area
                for start, end in task.ranges
                for area in written_pages.look(task.memory.pagemap, start, end)
            ]
            if _slower(areas):
                self._leave(pid, _BUSY)
                self.busy = True

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
                why = self._look(task)
            except (OSError, CriuctlError) as error:
                why = str(error)
            if why:
                self.refused[pid] = why
            else:
                hidden[pid] = task.hidden
        return hidden

    def _look(self, task: Task) -> str:
        """Read what was written to; return why it is CRIU that has to read all of it."""
        pid = task.identity.pid
        found = [
            (max(start, low), min(end, high))
            for low, high in ((m.start, m.end) for m in each_mapping(pid) if trackable(m))
            for start, end in task.ranges
            if start < high and low < end
        ]
        with TaskMemory(pid) as memory:  # of the program that it runs now
            areas: list[tuple[int, int, bool]] = []
            for start, end in found:
                for area in written_pages.look(memory.pagemap, start, end):
                    areas += task.known(area.start, area.end) if area.clean else [area]
            if _slower(areas):
                self.busy = True
                return _BUSY
            self._read_frozen(task, memory, areas)
        task.hidden = found
        return ""

    def _read_frozen(
        self, task: Task, memory: TaskMemory, areas: Sequence[tuple[int, int, bool]]
    ) -> None:
        """Read those of these areas that are not clean, and note all of them.

        As few calls as possible for each: there may be tens of thousands, of a page each.
        """
        task.last += [(start, end, -1) for start, end, clean in areas if clean]
        found = cut(Run(start, end, dirty=True) for start, end, clean in areas if not clean)
        for windows in _filling(found, BUFFER_SIZE):
            self._read_windows(task, memory, windows)
        task.last.sort()

    def _read_windows(self, task: Task, memory: TaskMemory, windows: Sequence[Cut]) -> None:
        """Read these windows of the frozen tree into one buffer."""
        buffer = self._writer.acquire()
        try:
            wanted = sum(window.size for window in windows)
            if memory.read(joined(windows), buffer.view) != wanted:
                raise NoSuchProcess(f"the memory of PID {task.identity.pid} is not readable")
            place = 0
            for window in windows:
                size = window.size
                number = self._writer.loose(
                    buffer, place, place + size, scattered=size <= _SCATTERED
                )
                for start, end in window.pieces:
                    task.last.append((start, end, number))
                    number += (end - start) // PAGE
                place += size
            self.dirty += wanted
        finally:
            self._writer.release(buffer)


def _slower(areas: Sequence[tuple[int, int, bool]]) -> bool:
    """Return whether CRIU reads all of these areas sooner than we read those that are not clean."""
    dirty = [end - start for start, end, clean in areas if not clean]
    return sum(dirty) + len(dirty) * _RUN > sum(end - start for start, end, _clean in areas)


def _filling(windows: Iterable[Cut], size: int) -> Iterator[list[Cut]]:
    """Yield as many windows at a time as fit into `size` bytes."""
    held: list[Cut] = []
    total = 0
    for window in windows:
        if total + window.size > size:
            yield held
            held, total = [], 0
        held.append(window)
        total += window.size
    if held:
        yield held
