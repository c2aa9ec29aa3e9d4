"""Event counters that are semaphores (EFD_SEMAPHORE): CRIU makes them plain ones, of which one read takes all.

The kind is fixed when an eventfd is made.  So a dump notes it in the images, as the flag that eventfd(2) takes and that nobody
else heeds; a restore makes those itself, and tells CRIU that they are files to be inherited, which eventfds cannot be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ..criu.images import REGULAR, ImageSet
from ..proc.descriptors import Descriptor
from ..proc.tree import Process

_NAME = "criuctl-semaphore-{}"


def mark(images: ImageSet, tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]) -> None:
    """In post-dump: note which eventfds of the frozen tree are semaphores."""
    found = {(p.ns_pid, d.fd) for p in tree for d in opened.get(p.pid, ()) if "eventfd-semaphore: 1" in d.extra}
    if found:
        numbers = {number for number, held in images.holders().items() if found.intersection(held)}
        entries = images.files()
        for entry in entries:
            if entry.HasField("efd") and entry.id in numbers:
                entry.efd.flags |= os.EFD_SEMAPHORE
        images.write_files(entries)


def stands_for_one(path: str) -> bool:
    """Whether a file of the images is one of these by now: at its path, which only root could make, is nothing."""
    return path.startswith("/" + _NAME.format(""))


def make(images: ImageSet, stack: ExitStack) -> dict[str, int]:
    """Make those of the images; returns what CRIU inherits: key -> descriptor, closed with `stack`."""
    entries = images.files()
    made: dict[str, int] = {}
    numbers = set()
    for entry in entries:
        if not entry.HasField("efd") or not entry.efd.flags & os.EFD_SEMAPHORE:
            continue
        fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC | (entry.efd.flags & os.O_NONBLOCK))
        stack.callback(os.close, fd)
        if entry.efd.counter:
            os.eventfd_write(fd, entry.efd.counter)
        made[_NAME.format(entry.id)] = fd
        numbers.add(entry.id)
        entry.type = REGULAR
        entry.reg.id, entry.reg.flags, entry.reg.pos = entry.id, os.O_RDWR, 0
        entry.reg.fown.CopyFrom(entry.efd.fown)
        entry.reg.name = "/" + _NAME.format(entry.id)
        entry.ClearField("efd")
    if made:
        images.write_files(entries)
        images.make_regular(numbers)
    return made
