"""Every repair, and the order in which an operation calls them.

`ALL` is the order in every phase but the last; a place that matters has its reason next to it, and
a new repair may stand anywhere else.  `_RELEASE` has the repairs with a `release`, and their order.
"""

from __future__ import annotations

import textwrap

from ..criu.images import ImageSet
from .ambient_capabilities import AmbientCapabilities
from .base import FrozenTree, Repair, RestoredTree, RestoreImages
from .closed_peers import ClosedPeers
from .descriptor_flags import DescriptorFlags
from .descriptor_owners import DescriptorOwners
from .epoll_watches import EpollWatches
from .eventfd_semaphores import EventfdSemaphores
from .file_locks import FileLocks
from .interrupted_calls import InterruptedCalls
from .large_mappings import LargeMappings
from .late_signals import LateSignals
from .memfd_seals import MemfdSeals
from .openssl_generators import OpensslGenerators
from .parent_death_signal import ParentDeathSignal
from .processor_affinity import ProcessorAffinity
from .removed_segments import RemovedSegments
from .renamed_sockets import RenamedSockets
from .resource_limits import ResourceLimits
from .socket_pairs import SocketPairs
from .thread_attributes import ThreadAttributes
from .timerfds import TimerDescriptors
from .wiped_memory import WipedMemory

ALL: tuple[type[Repair], ...] = (
    LateSignals,  # first at a dump: what comes later is lost
    AmbientCapabilities,
    FileLocks,
    EventfdSemaphores,
    MemfdSeals,
    RenamedSockets,
    TimerDescriptors,
    LargeMappings,
    SocketPairs,
    EpollWatches,
    DescriptorOwners,
    DescriptorFlags,  # after the owners: O_ASYNC arms the signal of an owner that must be there
    ParentDeathSignal,
    RemovedSegments,
    ClosedPeers,
    ResourceLimits,
    ProcessorAffinity,
    ThreadAttributes,
    WipedMemory,
    OpensslGenerators,
    InterruptedCalls,
)

_RELEASE: tuple[type[Repair], ...] = (
    InterruptedCalls,  # uses the CRIU that holds the threads
    TimerDescriptors,  # last: their time runs from here on
)


def losses() -> str:
    """Return what CRIU loses, a Markdown list of each repair's `loses`, for the page of limits."""
    return "\n".join(
        textwrap.fill(kind.loses, 100, initial_indent="- ", subsequent_indent="  ") for kind in ALL
    )


class Repairs:
    """The repairs of one dump or one restore."""

    def __init__(self) -> None:
        self._all = {kind: kind() for kind in ALL}
        self._frozen: FrozenTree | None = None

    def record(self, frozen: FrozenTree) -> None:
        """Call `record`: the tree is frozen, and CRIU has read nothing of it yet."""
        self._frozen = frozen
        for repair in self._all.values():
            repair.record(frozen)

    def amend_frozen(self, images: ImageSet) -> None:
        """Call `amend_frozen`: all images are written; the tree is still frozen."""
        assert self._frozen is not None
        for repair in self._all.values():
            repair.amend_frozen(images, self._frozen)

    def amend_dump(self, images: ImageSet) -> None:
        """Call `amend_dump`: the images are about to be stored; the tree may run again."""
        assert self._frozen is not None
        for repair in self._all.values():
            repair.amend_dump(images, self._frozen)

    def amend_restore(self, restore: RestoreImages) -> None:
        """Call `amend_restore`: CRIU is about to read the images."""
        for repair in self._all.values():
            repair.amend_restore(restore)

    def mend(self, tree: RestoredTree) -> None:
        """Call `mend`: CRIU holds every restored process before its first instruction."""
        for repair in self._all.values():
            repair.mend(tree)

    def release(self, tree: RestoredTree) -> None:
        """Call `release`: CRIU is about to let go, and no repair may fail the restore any more."""
        for kind in _RELEASE:
            self._all[kind].release(tree)
