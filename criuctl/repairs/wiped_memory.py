"""Memory that a fork would wipe (MADV_WIPEONFORK): the state of random generators.

BoringSSL, AWS-LC, s2n-tls and others keep their state, or a mark that it is fresh, in such memory:
a child finds zeros there and seeds its generator again. CRIU restores the contents. A checkpoint
can be restored more than once, so each restore may be one of several copies, which would go on with
the same random numbers. To the program a restore is what a fork is: the same memory goes on in two
processes. So each restore wipes it. A program cannot rely on such memory across a fork, and one
that is the only copy seeds its generator once too often, which does no harm.

The kernel gives memory for the vDSO's getrandom (MAP_DROPPABLE) the same mark. CRIU does not dump
its contents; wiping it again does nothing.
"""

from __future__ import annotations

import os

from ..errors import CriuctlError
from ..proc import inject
from .base import Repair, RestoredTree, RestoreImages

_WIPED = 1 << 18  # MADV_WIPEONFORK, as CRIU notes it
_LOCKED = 0x2000  # MAP_LOCKED
_DONT_NEED, _DONT_NEED_LOCKED = 4, 24  # the advices; the second one since Linux 5.18


class WipedMemory(Repair):
    """Mappings with MADV_WIPEONFORK."""

    loses = (
        "CRIU 4.2 restores memory that is marked to be wiped at a fork (MADV_WIPEONFORK) with its "
        "contents, also in a second copy."
    )

    def __init__(self) -> None:
        # by PID in the tree: address, length and advice of each
        self._areas: dict[int, list[tuple[int, int, int]]] = {}

    def amend_restore(self, restore: RestoreImages) -> None:
        """Note the mappings."""
        for pid, memory in restore.images.memories():
            for area in memory.vmas:
                if area.madv & _WIPED:
                    advice = _DONT_NEED_LOCKED if area.flags & _LOCKED else _DONT_NEED
                    areas = self._areas.setdefault(pid, [])
                    areas.append((area.start, area.end - area.start, advice))

    def mend(self, tree: RestoredTree) -> None:
        """Wipe them; a warning where that is not possible."""
        for pid, areas in self._areas.items():
            if pid not in tree.pids:
                continue
            try:
                with inject.stopped(tree.pids[pid]), inject.calling(tree.pids[pid]) as run:
                    errors = [-result for area in areas if (result := run(inject.MADVISE, *area))]
                if errors:
                    raise OSError(errors[0], os.strerror(errors[0]))
            except (OSError, CriuctlError) as error:
                tree.reporter.warning(
                    f"PID {pid}: memory that a fork would wipe still has its contents: {error}",
                    "Its random numbers may be those of another copy.",
                )
