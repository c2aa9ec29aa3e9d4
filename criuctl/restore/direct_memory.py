"""Write memory from the store straight into processes that CRIU has restored and that have not run
yet.

`criuctl.criu.direct` decides which memory goes this way.  The first chunks are fetched and opened
while CRIU starts and works; from `finish` on they are written, by several threads, and so are all
that follow.

Invariants: nothing is written to a process that has run; no byte is written that was not verified
by its chunk's id; when `finish` returns all of it is in place, when it raises the tree must not
run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from ..checkpoint.chunk_targets import Targets, only_zeros, write_at
from ..checkpoint.chunks import Extent
from ..checkpoint.packs import Place
from ..checkpoint.reader import CheckpointReader
from ..errors import RestoreFailed
from ..proc.limits import room_for_descriptors
from ..store import Buffer


class Filling:
    """The memory of one restore that CRIU does not restore; made by `materialise.write_pages`."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._targets = Targets()
        # the descriptor of each process's memory, once the process exists
        self._memories: Mapping[int, int] | None = None
        self._placed = threading.Event()  # or given up
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, pid: int, vaddr: int, parts: Iterable[Extent]) -> None:
        """Add parts of chunks that are, one after the other, the memory at `vaddr`.

        `pid`: of the process in the images.
        """
        self._targets.add(pid, vaddr, parts)

    def begin(self) -> None:
        """Fetch and open what the threads can hold; they wait for the processes."""
        if self._targets.of:
            thread = threading.Thread(target=self._run, name="criuctl-fill", daemon=True)
            thread.start()
            self._thread = thread

    def finish(self, pids: Mapping[int, int]) -> None:
        """Fill the processes; `pids`: PID in the tree -> PID on this host.

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
                self.stop()  # before the descriptors are closed: their numbers may be used again
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give up what is not in place, after a failed restore; without effect after `finish`."""
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
        zeros = only_zeros(place, content)  # fresh memory is zero already
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
                        "The kernel ends processes for which it has no memory: check what is "
                        "free, and their group's limit."
                    ),
                ) from error
