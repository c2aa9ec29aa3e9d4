"""The short freeze of a dump, where it is possible: memory is read while the tree runs, and frozen
only what was written to since (`criuctl.tracking`).

In every case of doubt the tree, or one process of it, is dumped as always: all of its memory is
read when it is frozen. The manifest records which way it was, and why (`ShortFreeze.record`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.buffers import PageBuffer
from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..checkpoint.writer import CheckpointWriter
from ..criu.pages import PAGE, ImageKey, PageImage, PageSink
from ..criu.scan_hook import ScanHook
from ..proc import written_pages
from ..proc.tree import Process
from ..tracking import keeping
from ..tracking.assembly import Sent, assemble
from ..tracking.base import Base, kept_of
from ..tracking.memory import TrackedMemory
from ..tracking.rounds import Round
from ..tracking.task import Range
from .checks.scene import Scene
from .job import DumpJob
from .manifest_of_tree import with_memory
from .parts import uses_devices


def prevented(job: DumpJob, scene: Scene) -> str:
    """Return why the freeze of this tree cannot be short, or need not be; "" if it can."""
    if not job.config.track_writes_mib:
        return "the configuration's track_writes_mib is 0"
    if uses_devices(scene.opened):
        return "the tree uses a GPU"
    if sum(process.rss for process in scene.living) < job.config.track_writes_mib << 20:
        return "the tree is small"
    if not written_pages.supported():
        return "the kernel does not track writes (Linux 6.7, x86-64)"
    if not job.request.precopy and keeping.busy(job.config, job.root):
        return "too much of its memory was written to when it was tried last"
    return ""


class ShortFreeze(Struct, eq=False):
    """What makes the freeze of one dump short; `close` it. Without `scans` it does nothing."""

    job: DumpJob
    why: str = ""  # it is not short
    scans: ScanHook | None = None
    memory: TrackedMemory | None = None
    _sent: Sent | None = None

    @classmethod
    def of(cls, job: DumpJob, scene: Scene) -> ShortFreeze:
        """Return one for this tree."""
        why = prevented(job, scene)
        return cls(job, why, None if why else ScanHook())

    @property
    def tracks(self) -> bool:
        """Whether memory was read ahead."""
        return self.memory is not None and bool(self.memory.rounds)

    def close(self) -> None:
        """End the tracking; nothing is left in the processes."""
        if self.memory is not None:
            self.memory.close()
        if self.scans is not None:
            self.scans.close()

    def begin(self, writer: CheckpointWriter, repository: Repository) -> dict[int, list[Range]]:
        """Begin to track the tree's writes; return the ranges that are tracked, by our PIDs."""
        if self.scans is None:
            return {}
        if not writer.layered:
            self.why = "the store takes no pages apart from their windows"
            return {}
        self._sent = Sent(writer)
        base = self._base(repository)
        try:
            self.memory = TrackedMemory(writer, self.job.root.pid, self.job.reporter, base)
            self.memory.begin()
        finally:
            if base is not None:
                base.close()
        return {pid: task.ranges for pid, task in self.memory.tasks.items()}

    def read(self) -> list[Round]:
        """Read and store the tracked memory while the tree runs; return the rounds."""
        if self.memory is None:
            return []
        ahead = self.job.request.precopy
        self.memory.read(step="precopy" if ahead else "track", durable=ahead)
        return self.memory.rounds

    def _base(self, repository: Repository) -> Base | None:
        """Return what the snapshot before has left of this tree."""
        kept = keeping.take(self.job.config, self.job.root)
        if kept is None:
            return None
        here = kept.repository == repository.id
        return Base(kept, repository.reader(self.job.reporter) if here else None)

    def leave(self, manifest: Manifest, repository: Repository) -> None:
        """Leave the tracking to the next snapshot, now that this one exists."""
        if not (self._keeps() and self.memory is not None and self._sent is not None):
            return
        given = self.memory.hand_over()
        keeping.leave(self.job.config, self.job.root, kept_of(manifest, repository.id, given))

    def _keeps(self) -> bool:
        request = self.job.request
        return request.leave_running and request.keep_tracking and written_pages.forgets_moved()

    def sink(self, writer: CheckpointWriter) -> PageSink[PageBuffer]:
        """Return what takes CRIU's pages."""
        return self._sent if self._sent is not None else writer

    def frozen(self, tree: Sequence[Process]) -> None:
        """Read what was written to since, and hide from CRIU what need not be read again."""
        if self.scans is None or self.memory is None or self._sent is None:
            return
        self._sent.begin(frozenset())
        if self.scans.unavailable:
            self.why = self.scans.unavailable
            return
        hidden = self.memory.frozen(tree)
        self._sent.begin(frozenset(self.memory.tasks[pid].key for pid in hidden))
        self.scans.hide(hidden)
        if self.memory.busy:
            keeping.note_busy(self.job.config, self.job.root)

    def give_up(self) -> str:
        """Dump as always from now on, as CRIU has failed; return why another try may help, "" if it
        was so already.
        """
        if self.scans is None or self.memory is None:
            return ""
        self.why = "CRIU failed when memory was hidden from it"
        self.memory.close()
        self.scans.hide({})
        self.memory = self._sent = None
        return self.why

    def left(self, memory: Sequence[PageImage]) -> list[PageImage]:
        """Return the images that are complete as CRIU has sent them."""
        keys = self._sent.keys if self._sent is not None else frozenset()
        return [image for image in memory if image.key not in keys]

    def completed(
        self,
        manifest: Manifest,
        memory: Sequence[PageImage],
        folder: int,
        writer: CheckpointWriter,
        own: Mapping[int, Sequence[tuple[int, int]]],
    ) -> Manifest:
        """Return the manifest with the memory of the processes that were tracked; the tree may run,
        or be about to end.

        `memory`: what CRIU has sent; `folder`: its images.
        """
        if self.memory is not None and self._sent is not None and self._sent.keys:
            # a tree that ends need not wait for that
            if self.job.request.leave_running and not self._keeps():
                self.memory.stop()
            images = {image.key: image for image in memory}
            whole = [
                assemble(
                    task,
                    images.get(task.key, PageImage(task.key)),
                    self._sent.numbers.get(task.key, ()),
                    folder,
                    writer,
                )
                for task in self.memory.tasks.values()
                if task.key in self._sent.keys
            ]
            manifest = with_memory(manifest, whole, writer, own)
        sent = sum(image.pages for image in memory)
        return replace(manifest, criu=manifest.criu | {"memory": self.record(sent)})

    def record(self, sent: int) -> dict[str, Any]:
        """Return how the memory was read, for the manifest; `sent`: pages that CRIU has sent."""
        keys: frozenset[ImageKey] = self._sent.keys if self._sent is not None else frozenset()
        if self.memory is None or not keys:
            why = self.why or self._refusals() or "nothing to track"
            pages = {"read_running": 0, "read_frozen": sent}
            return {"way": "frozen", "why": why, "pages": pages}
        ahead = sum(one.read for one in self.memory.rounds)
        record: dict[str, Any] = {
            "way": "tracked",
            "rounds": len(self.memory.rounds),
            "read_ahead": ahead,
            "read_frozen": self.memory.dirty,
            "known": self.memory.known,
            "pages": {
                "read_running": ahead // PAGE,
                "read_frozen": self.memory.dirty // PAGE + sent,
            },
        }
        refusals = self._refusals()
        return record | ({"why": refusals} if refusals else {})

    def _refusals(self) -> str:
        if self.memory is None or not self.memory.refused:
            return ""
        pid, why = next(iter(self.memory.refused.items()))
        more = len(self.memory.refused) - 1
        return f"PID {pid}: {why}" + (f", and {more} more" if more else "")
