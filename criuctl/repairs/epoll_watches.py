"""Epoll descriptors that a process shares with its children.

CRIU has the process with the lowest PID make such an epoll, with the watches that it read from the
first process of the tree.  The maker may not have a watched descriptor, or have another file under
its
number: then the restore fails, or the epoll watches something else.  Those watches are taken out of
the images, and the process that CRIU read them from adds them itself.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from ..criu.images import ImageSet
from ..errors import RestoreFailed
from ..proc import inject
from .base import Repair, RestoredTree, RestoreImages

_EPOLL_EVENT = struct.Struct("=IQ")  # events, data; packed on x86-64
_EPOLL_CTL_ADD = 1

_Watches = dict[tuple[int, int], list[Any]]  # (PID, epoll) -> CRIU's eventpoll_tfd_entry of each


class EpollWatches(Repair):
    """Watches that the epoll's maker could not add."""

    loses = "CRIU 4.2 makes a shared epoll in a process that may not have what it watches."

    def __init__(self) -> None:
        self._watches: _Watches = {}

    def amend_restore(self, restore: RestoreImages) -> None:
        """Take out the watches on what the maker does not have."""
        self._watches = _take_out(restore.images)

    def mend(self, tree: RestoredTree) -> None:
        """Have each process add its watches; `RestoreFailed` if one cannot."""
        for (inner, epoll), watches in self._watches.items():
            pid = tree.pids[inner]
            with inject.stopped(pid):
                for watch in watches:
                    _add(pid, inner, epoll, watch)


def _take_out(images: ImageSet) -> _Watches:
    if not any(e.HasField("epfd") and e.epfd.tfd for e in images.files()):
        return {}
    holders = images.holders()
    numbers = {(pid, fd): number for number, held in holders.items() for pid, fd in held}
    taken: _Watches = {}

    def edit(entry: Any) -> None:
        held = holders.get(entry.id, ())
        if not entry.HasField("epfd") or not held:
            return
        # CRIU reads from the first process of the tree, and makes in the one of the lowest PID.
        reader, maker = held[0], min(held)[0]
        watches = list(entry.epfd.tfd)
        strange = [
            w for w in watches if numbers.get((maker, w.tfd)) != numbers.get((reader[0], w.tfd))
        ]
        if strange:
            taken[reader] = strange
            del entry.epfd.tfd[:]
            entry.epfd.tfd.extend(w for w in watches if w not in strange)

    images.edit_files(edit)
    return taken


def _add(pid: int, inner: int, epoll: int, watch: Any) -> None:
    with inject.placed(pid, _EPOLL_EVENT.pack(watch.events, watch.data)) as event:
        result = inject.call(pid, inject.EPOLL_CTL, epoll, _EPOLL_CTL_ADD, watch.tfd, event)
    if result < 0:
        raise RestoreFailed(
            f"PID {inner}: epoll {epoll} cannot watch descriptor {watch.tfd} again: "
            f"{os.strerror(-result)}"
        )
