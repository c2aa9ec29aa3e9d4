"""The contract of a repair: one small thing that CRIU loses or mishandles, put right by one class
in one file.

A repair object lives for one dump or one restore and keeps its own state.  The story of the
operation calls every registered repair at fixed moments (`criuctl.repairs.registry`) and knows none
by name.

=================  =======================================  ==================================
method             when                                     what it may do
=================  =======================================  ==================================
``record``         dump: the tree is frozen                 read /proc; ask the kernel
``amend_dump``     dump: all images are written             edit the images before the commit
``amend_restore``  restore: before CRIU reads the images    edit the images; add descriptors
``mend``           restore: everything is in place          run calls inside stopped processes
``release``        restore: just before the tree runs       only what cannot fail the restore
=================  =======================================  ==================================

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
        """Note what only the frozen tree shows."""

    def amend_dump(self, images: ImageSet) -> None:
        """Complete the images of the dump, from what `record` has noted."""

    def amend_restore(self, restore: RestoreImages) -> None:
        """Take out of the images what CRIU cannot restore, and keep it for `mend`."""

    def mend(self, tree: RestoredTree) -> None:
        """Give the restored processes what CRIU could not."""

    def release(self, tree: RestoredTree) -> None:
        """Do what has to come last: what passes time, or what CRIU itself is used for."""
