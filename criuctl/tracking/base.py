"""The memory of an earlier checkpoint, which the next one takes over where it was not written to.

A page is taken over if it is protected, and was so at the freeze of that checkpoint: then it is
what was stored. A page that was written to before that freeze is not protected since, and one that
was mapped or moved afterwards is not either (`written_pages.forgets_moved`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.writer import CheckpointWriter
from ..criu.pages import PAGE, unpack_entries
from ..errors import CriuctlError
from ..proc.tree import ProcessIdentity
from .keeping import Kept, KeptTask
from .task import Task


class Base(Struct, eq=False):
    """What an earlier snapshot has left; `close` it."""

    kept: Kept
    # of the repository that has that checkpoint; None: it is another one
    reader: CheckpointReader | None

    def close(self) -> None:
        """End the tracking of processes that was not continued."""
        self.kept.close()

    def descriptor(self, identity: ProcessIdentity) -> int:
        """Return the userfaultfd of this process, for the caller to close; -1 if there is none."""
        task = self._of(identity)
        if task is None:
            return -1
        uffd, task.uffd = task.uffd, -1
        return uffd

    def code(self, identity: ProcessIdentity) -> int | None:
        """Return the code of this process that was looked at (`userfault_code`)."""
        task = self._of(identity)
        return None if task is None else task.code

    def fill(self, task: Task, writer: CheckpointWriter) -> int:
        """Note where the pages of a process are stored; return how many bytes were found.

        Where that is not known, or the store does not have all of it, nothing is noted, and the
        task is not `based`: all of its pages are read.
        """
        kept = self._of(task.identity)
        if kept is None or self.reader is None:
            return 0
        try:
            entries = list(unpack_entries(self.reader.read(kept.entries)))
            if sum(entry.pages for entry in entries) * PAGE != kept.data.size:
                return 0
            number = writer.take_over(self.reader.extents(kept.data))
        except (CriuctlError, ValueError):  # it was removed, or is damaged
            return 0
        if number is None:
            return 0
        for entry in entries:
            task.note_run(entry.vaddr, entry.pages, number)
            number += entry.pages
        task.based = True
        return kept.data.size

    def _of(self, identity: ProcessIdentity) -> KeptTask | None:
        return next((task for task in self.kept.tasks if task.identity == identity), None)


def kept_of(manifest: Manifest, repository: str, given: Mapping[int, tuple[Task, int]]) -> Kept:
    """Return what is to be left of these tasks, whose memory is in this checkpoint."""
    images = {image.id: image for image in manifest.memory if image.kind == "task"}
    tasks = []
    for task, uffd in given.values():
        image = images.get(task.inside)
        if image is None:
            os.close(uffd)
            continue
        tasks.append(KeptTask(task.identity, image.entries, image.data, task.code, uffd))
    return Kept(repository, manifest.id, tasks)
