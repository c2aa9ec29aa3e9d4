"""Memory on its way from the store straight into processes that CRIU has restored and that have not
run yet.

What goes this way is decided by `criuctl.criu.direct`.  The first chunks are fetched and opened
while CRIU is started and at work; from `finish` on they are written, by several threads, and so is
all that follows.

Invariants: nothing is written to a process that has run; no byte is written that was not verified
by its chunk's id; when `finish` returns all of it is in place, when it raises the tree must not
run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from ..checkpoint.chunks import Extent
from ..checkpoint.packs import Place
from ..checkpoint.reader import CheckpointReader, Targets, only_zeros, write_at
from ..errors import RestoreFailed
from ..proc.limits import room_for_descriptors
from ..store import Buffer


class Filling:
    """All memory of one restore that does not go by way of CRIU; made by
    `materialise.write_pages`.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._targets = Targets()
        # of each process its memory's descriptor, once it is in place
        self._memories: Mapping[int, int] | None = None
        self._placed = threading.Event()  # or given up
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, pid: int, vaddr: int, parts: Iterable[Extent]) -> None:
        """These parts of chunks, one behind the other, are the memory at `vaddr` of the process
        that the images call `pid`.
        """
        self._targets.add(pid, vaddr, parts)

    def begin(self) -> None:
        """Fetch and open what the threads can hold; it waits for the processes."""
        if self._targets.of:
            thread = threading.Thread(target=self._run, name="criuctl-fill", daemon=True)
            thread.start()
            self._thread = thread

    def finish(self, pids: Mapping[int, int]) -> None:
        """Fill the processes; `pids` are the tree's own PIDs -> ours.

        Raises what went wrong: `Damaged`, `ObjectMissing`, store errors, or `RestoreFailed` naming
        the process.
        """
        if self._thread is None:
            return
        with ExitStack() as stack:
            memories = {}
            stack.enter_context(room_for_descriptors(len(self._targets.ends)))
            for inner in self._targets.ends:
                try:
                    memories[inner] = os.open(f"/proc/{pids[inner]}/mem", os.O_RDWR | os.O_CLOEXEC)
                except (KeyError, OSError) as error:
                    raise RestoreFailed(
                        f"PID {inner}: its memory cannot be opened after its restore: {error}"
                    ) from error
                stack.callback(os.close, memories[inner])
            self._memories = memories
            self._placed.set()
            try:
                self._thread.join()
            finally:
                self.stop()  # before the descriptors are closed, whose numbers others may get
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give up what is not in place; for a restore that failed, without effect after
        `finish`.
        """
        self._memories = None
        self._placed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._reader.fetch(self._targets.sizes, self._put)
        except BaseException as error:
            self._error = error

    def _put(self, place: Place, content: Buffer) -> None:
        self._placed.wait()
        zeros = only_zeros(place, content)  # as fresh memory is
        view = memoryview(content)
        for inner, vaddr, skip, length in self._targets.of[place.chunk]:
            memories = self._memories
            if memories is None:
                raise RestoreFailed("the restore was given up")
            if zeros:
                continue
            try:
                write_at(memories[inner], view[skip : skip + length], vaddr)
            except OSError as error:
                raise RestoreFailed(
                    f"PID {inner}: its memory at {vaddr:#x} cannot be written: {error.strerror}",
                    hint=(
                        "The kernel ends processes for which it has no memory: see what is free, "
                        "and their group's limit."
                    ),
                ) from error
