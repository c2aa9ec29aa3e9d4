"""The contract of a repair: one small thing that CRIU loses or mishandles, put right by one class
in one file.

A repair object lives for one dump or one restore and keeps its own state.  The story of the
operation calls every registered repair at fixed moments (`criuctl.repairs.registry`).

=================  =========================================  ====================================
method             when                                       what it may do
=================  =========================================  ====================================
``record``         dump: frozen, CRIU has read nothing yet    read /proc; change what CRIU will see
``amend_frozen``   dump: all images are written; the tree is  read /proc; edit the images
                   still frozen
``amend_dump``     dump: later; the tree may run again        edit the images before the commit
``amend_restore``  restore: before CRIU reads the images      edit the images; add descriptors
``mend``           restore: memory and descriptors are in     run calls inside stopped processes
                   place; groups and terminals follow
``release``        restore: just before the tree runs         only what cannot fail the restore
=================  =========================================  ====================================

During a dump CRIU traces the processes, so no call can be run inside them.  During a restore
`mend` can do that, thread by thread::

    with inject.stopped(tid):
        result = inject.call(tid, inject.PRCTL, option, value)  # negative: an errno

Two repairs write their part of the dump into the manifest instead of the images, because it
belongs to the record of a process: `processor_affinity` and `thread_attributes`
(`dump/manifest_of_tree.py` calls them).  `call_time_limits` has to look before the freeze, and
`interrupted_calls` serves a freeze that failed as well: `dump/freeze.py` calls these.

A repair has no part in the findings before a freeze or a restore.  What it mends needs none; what
it cannot mend is of a whole kind (locks, mappings, watches), which `dump/checks` and
`restore/observation` look at together.

A method that raises `CriuctlError` or `OSError` stops the operation, and the tree is safe: a dump
lets it run on, a restore leaves nothing.  What a repair can do without is a warning instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest
    from ..criu.images import ImageSet
    from ..proc.descriptors import Descriptor
    from ..proc.tree import Process
    from ..report import Reporter


class FrozenTree(Struct):
    """A tree that stands still for its dump."""

    processes: Sequence[Process]  # parents before their children
    opened: Mapping[int, Sequence[Descriptor]]  # PID -> descriptors, as /proc shows them now
    reporter: Reporter


class RestoreImages(Struct):
    """The images of a restore that CRIU has not read yet, and what else it is given."""

    images: ImageSet
    reporter: Reporter
    resources: ExitStack  # closed when the restore is over
    # seconds since the dump, if the processes around the tree may still be the same
    age: float | None = None
    in_session: bool = False  # a holder runs the tree: it is the parent that a root may be bound to
    # CRIU's key of a file -> our descriptor of it
    inherit: dict[str, int] = field(default_factory=dict)


class RestoredTree(Struct):
    """A restored tree whose processes CRIU holds before their first instruction."""

    images: ImageSet
    manifest: Manifest
    root: int  # PID of the root on this host
    pids: Mapping[int, int]  # PID in the tree -> PID on this host
    reporter: Reporter
    owners: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    """(PID, descriptor) -> CRIU's fown_entry, of descriptors that criuctl made itself and CRIU only
    inherits.
    """


class Repair:
    """One loss of CRIU's; every method does nothing by default."""

    loses: ClassVar[str] = ""
    """What CRIU loses, seen with which version: one sentence of the manual's page of limits."""

    def record(self, frozen: FrozenTree) -> None:
        """Note or change what CRIU must not see first.

        Called again with another tree if CRIU gives up and the freeze is tried again: replace what
        was noted, do not add to it.
        """

    def amend_frozen(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Complete the images of the dump with what the tree shows only while it is frozen.

        The program waits for it: return at once where there is nothing to do.
        """

    def amend_dump(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Complete the images of the dump by themselves, and by what was noted of the tree."""

    def amend_restore(self, restore: RestoreImages) -> None:
        """Take out of the images what CRIU cannot restore, and keep it for `mend`."""

    def mend(self, tree: RestoredTree) -> None:
        """Give the restored processes what CRIU could not."""

    def release(self, tree: RestoredTree) -> None:
        """Do what has to come last: what passes time, or what CRIU itself is used for."""
