"""Event counters that are semaphores (``EFD_SEMAPHORE``).

CRIU makes them plain counters, and one read of a plain counter takes all. The kind is fixed when an
eventfd is made. So a dump records it in the images, as the flag of eventfd(2), which CRIU ignores.
A restore makes these itself, and presents them to CRIU as inherited files, because CRIU cannot
inherit eventfds.
"""

from __future__ import annotations

import os

from ..criu.images import REGULAR, ImageSet
from .base import FrozenTree, Repair, RestoreImages

_NAME = "criuctl-semaphore-{}"


class EventfdSemaphores(Repair):
    """Eventfds with EFD_SEMAPHORE."""

    loses = "CRIU 4.2 restores an EFD_SEMAPHORE eventfd as a plain counter."

    def amend_dump(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Mark the semaphores in the images."""
        semaphores = {
            (p.ns_pid, d.fd)
            for p in frozen.processes
            for d in frozen.opened.get(p.pid, ())
            if "eventfd-semaphore: 1" in d.extra
        }
        if not semaphores:
            return
        numbers = {
            number for number, held in images.holders().items() if semaphores.intersection(held)
        }
        entries = images.files()
        for entry in entries:
            if entry.HasField("efd") and entry.id in numbers:
                entry.efd.flags |= os.EFD_SEMAPHORE
        images.write_files(entries)

    def amend_restore(self, restore: RestoreImages) -> None:
        """Make those of the images, and have CRIU inherit them as files."""
        entries = restore.images.files()
        numbers = set()
        for entry in entries:
            if not entry.HasField("efd") or not entry.efd.flags & os.EFD_SEMAPHORE:
                continue
            fd = os.eventfd(
                0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC | (entry.efd.flags & os.O_NONBLOCK)
            )
            restore.resources.callback(os.close, fd)
            if entry.efd.counter:
                os.eventfd_write(fd, entry.efd.counter)
            restore.inherit[_NAME.format(entry.id)] = fd
            numbers.add(entry.id)
            entry.type = REGULAR
            entry.reg.id, entry.reg.flags, entry.reg.pos = entry.id, os.O_RDWR, 0
            entry.reg.fown.CopyFrom(entry.efd.fown)
            entry.reg.name = "/" + _NAME.format(entry.id)
            entry.ClearField("efd")
        if numbers:
            restore.images.write_files(entries)
            restore.images.make_regular(numbers)


def represents_semaphore(path: str) -> bool:
    """Return whether a regular file of the images is one of these; only root could make a file at
    its path.
    """
    return path.startswith("/" + _NAME.format(""))
