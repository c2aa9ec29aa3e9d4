"""Status flags that only an open descriptor can be given.

An inotify descriptor or a pidfd with more flags than it can be made with (``O_ASYNC``) fails CRIU's
restore.  What CRIU opens by a path (a terminal, a named pipe) has ``O_ASYNC`` afterwards, but sends
no
signal: open(2) does not arm it.  Elsewhere the signal carries the number of the descriptor that
CRIU made first (``si_fd``).  The flags are taken out of the images, and the process sets them
itself.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

from ..criu.images import ImageSet
from ..errors import CriuctlError
from ..proc import inject
from .base import Repair, RestoredTree, RestoreImages
from .open_files import first_holder

_MADE_WITH = {"ify": os.O_NONBLOCK | os.O_CLOEXEC, "pidfd": os.O_NONBLOCK}  # kind -> flags


class DescriptorFlags(Repair):
    """``O_ASYNC``, and what inotify_init1(2) and pidfd_open(2) do not take."""

    loses = "CRIU 4.2 fails on, or does not arm, O_ASYNC of a descriptor."

    def __init__(self) -> None:
        self._flags: dict[tuple[int, int], int] = {}  # (PID, descriptor) -> all status flags

    def amend_restore(self, restore: RestoreImages) -> None:
        """Take out the flags that CRIU cannot give."""
        self._flags = _take_out(restore.images)

    def mend(self, tree: RestoredTree) -> None:
        """Have each process set them: the signal then carries the right number."""
        for (inner, fd), flags in self._flags.items():
            try:
                with inject.stopped(tree.pids[inner]):
                    result = inject.call(tree.pids[inner], inject.FCNTL, fd, fcntl.F_SETFL, flags)
                if result < 0:
                    raise OSError(-result, os.strerror(-result))
            except (OSError, KeyError, CriuctlError) as error:
                tree.reporter.warning(
                    f"PID {inner}: descriptor {fd} lacks some of its flags (O_ASYNC, O_APPEND): "
                    f"{error}"
                )


def _take_out(images: ImageSet) -> dict[tuple[int, int], int]:
    if not any(_unopenable(e) for e in images.files()):
        return {}
    holder = first_holder(images)
    taken: dict[tuple[int, int], int] = {}

    def edit(entry: Any) -> None:
        lost, held = _unopenable(entry), holder(entry)
        if lost and held:
            taken[held] = _file(entry).flags
            _file(entry).flags &= ~lost

    images.edit_files(edit)
    return taken


def _file(entry: Any) -> Any:
    return next((value for _, value in entry.ListFields() if hasattr(value, "flags")), None)


def _unopenable(entry: Any) -> int:
    """Return those flags of the entry that its kind of file cannot be made with."""
    file = _file(entry)
    if file is None:
        return 0
    lost = next((~made for kind, made in _MADE_WITH.items() if entry.HasField(kind)), os.O_ASYNC)
    flags: int = file.flags & lost
    return flags
