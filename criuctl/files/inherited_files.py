"""Files right before CRIU opens them: examined once more, held open, and handed over.

CRIU opens names.  If root alone controls a path, that is as good as a descriptor.  All others are
opened here, judged (`permission`), and handed to CRIU as descriptors (`heldfiles.hand_over`): no
name is looked up again, so no user can lead CRIU elsewhere in between, nor have it open a device,
or write the unread bytes of a FIFO into another one.

The inode of each path is remembered, and compared with what the processes hold when CRIU is done
(`criuctl.restore.comparison`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from msgspec import Struct, field

from ..criu import heldfiles
from ..criu.ghostimages import drop_remaps, point_watches
from ..criu.heldfiles import HeldFile, held_files
from ..criu.images import ImageSet
from ..errors import RestoreFailed
from ..proc.limits import room_for_descriptors
from ..proc.path_control import Found, PathLookup
from . import deleted_files
from .link_remaps import Provided
from .permission import HINT, Judge

Inode = tuple[int, int]  # st_dev, st_ino
_KERNELS = ("/proc/", "/sys/")  # come with processes and control groups


class Expected(Struct):
    """What CRIU is to open: by the ids of files.img."""

    files: list[HeldFile] = field(default_factory=list)
    inodes: dict[int, Inode] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)  # of what is handed over
    unlinked: set[int] = field(default_factory=set)  # deleted files that are made already

    def places(self) -> dict[str, str]:
        """Return path -> what leads to the judged file, for paths that users other than root
        control.
        """
        handed = {one.path: self.descriptors.get(one.id) for one in self.files if not one.deleted}
        return {path: f"/proc/self/fd/{fd}" for path, fd in handed.items() if fd is not None}


def expect(
    images: ImageSet,
    judge: Judge,
    root: int | None,
    links: Provided,
    stack: ExitStack,
) -> Expected:
    """Examine what CRIU is about to open in the mount namespace with this root folder.

    `links`: the helper links of deleted files.  What is missing is left to CRIU, which reports it,
    or makes it.  `RestoreFailed` for what a process may not have.
    """
    expected = Expected(files=held_files(images))
    held: dict[tuple[str, bool], Found | None] = {}
    with PathLookup(root) as lookup, room_for_descriptors(len(expected.files)), ExitStack() as now:
        for one in expected.files:
            if one.deleted or one.external:
                continue
            # of a link, or of where it leads
            key = one.path, bool(one.flags & os.O_PATH and one.flags & os.O_NOFOLLOW)
            if key not in held:
                held[key] = _found(lookup, one.path, stack, now, one.flags)
            found = held[key]
            if found is None:
                continue
            if (objection := judge.objection(one, found, root)) is not None:
                raise RestoreFailed(str(objection), hint=HINT)
            expected.inodes[one.id] = (found.status.st_dev, found.status.st_ino)
            if found.fault is not None and not one.path.startswith(_KERNELS):
                expected.descriptors[one.id] = found.fd
        expected.inodes |= deleted_files.linked(images, expected.files, judge, lookup, links)
        gone = deleted_files.made(images, expected.files, judge, lookup, links, stack)
    for number, fd in gone.items():
        status = os.fstat(fd)
        expected.inodes[number] = (status.st_dev, status.st_ino)
        expected.unlinked.add(number)
    expected.descriptors |= gone
    return expected


def hand_over(images: ImageSet, expected: Expected, *, reachable: bool) -> dict[str, int]:
    """Have CRIU use descriptors for paths that users other than root control; return key ->
    descriptor.

    `reachable`: CRIU sees this process in its /proc.
    """
    if expected.unlinked:
        watches = point_watches(
            images, {number: expected.descriptors[number] for number in expected.unlinked}
        )
        if watches and not reachable:
            raise RestoreFailed(
                f"{watches[0]} watches a deleted file of a folder in which others than root can "
                "write; criuctl cannot give it back in mounts of the tree's own",
                hint="Restore it without --as, where its PIDs are free; or have root alone write "
                "there.",
            )
        drop_remaps(images, expected.unlinked)
    return heldfiles.hand_over(images, expected.descriptors)


def _found(
    lookup: PathLookup, path: str, stack: ExitStack, judging: ExitStack, flags: int
) -> Found | None:
    """Return what is at the path, held until `stack` ends, or `judging` if root alone controls it;
    `flags` as for `PathLookup`.
    """
    try:
        with ExitStack() as now:
            found = now.enter_context(lookup.at(path, flags))
            (judging if found.fault is None else stack).push(now.pop_all())
            return found
    except OSError:
        return None
