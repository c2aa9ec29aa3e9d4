"""Sealed memory files (memfd_create): CRIU maps them with more rights than the program had.

CRIU opens the file of a mapping as the descriptor that the program mapped was opened, and adds the
seals when everything is mapped.  A shared mapping of a descriptor that is open for writing counts
as one that can be written to, even if it is read-only: mprotect(2) could make it so.  While there
is one the kernel refuses ``F_SEAL_WRITE`` (EBUSY); it permits ``F_SEAL_FUTURE_WRITE``, and a
process that had been given nothing but a read-only view could write to it after the restore.

So such mappings are made of descriptors that are open for reading only; the kernel then keeps them
as they were.  Under ``F_SEAL_WRITE`` there can be no others, which the images show at a restore.
Under ``F_SEAL_FUTURE_WRITE`` there are both kinds, and only the kernel distinguishes them (``mw``
among the VmFlags in smaps): the dump notes that in the images.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..criu.images import ImageSet, read, write
from ..errors import NoSuchProcess
from ..proc.mappings import vm_flags
from .base import FrozenTree, Repair, RestoreImages

_F_SEAL_WRITE, _F_SEAL_FUTURE_WRITE = 0x8, 0x10
_IMAGE, _KIND = "memfd.img", "MEMFD_INODE"
_MEMORY_FILE, _SHARED = 1 << 14, 1 << 7  # VMA_AREA_MEMFD, VMA_FILE_SHARED: a vma's status
_MAY_WRITE = "mw"


class MemfdSeals(Repair):
    """Read-only shared mappings of memory files that are sealed against writing."""

    loses = "CRIU 4.2 maps sealed memory files with more rights than the program had."

    def amend_frozen(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Mark the mappings of files sealed with F_SEAL_FUTURE_WRITE that can never become
        writable.
        """
        files = _sealed(images, _F_SEAL_FUTURE_WRITE)
        if not files:
            return
        outer = {process.ns_pid: process.pid for process in frozen.processes}
        flags: dict[int, dict[int, frozenset[str]]] = {}

        def never_writable(pid: int, area: Any) -> bool:
            if area.shmid not in files or area.prot & mmap.PROT_WRITE or pid not in outer:
                return False
            if pid not in flags:  # of those processes only: reading smaps is slow
                flags[pid] = {}
                with suppress(NoSuchProcess):
                    flags[pid] = vm_flags(outer[pid])
            return area.start in flags[pid] and _MAY_WRITE not in flags[pid][area.start]

        _read_only(images, images.pids(), never_writable)

    def amend_restore(self, restore: RestoreImages) -> None:
        """Map what is sealed with F_SEAL_WRITE through descriptors that are open for reading."""
        images = restore.images
        files = _sealed(images, _F_SEAL_WRITE)
        if files:
            _read_only(images, images.pids(), lambda pid, area: area.shmid in files)


def _sealed(images: ImageSet, seals: int) -> set[int]:
    """Return the ids in files.img of memory files with one of these seals."""
    if not images.size(_IMAGE):
        return set()
    inodes = {e.inode_id for e in read(images.folder, _IMAGE, _KIND) if e.seals & seals}
    if not inodes:
        return set()
    return {e.id for e in images.files() if e.HasField("memfd") and e.memfd.inode_id in inodes}


def _read_only(images: ImageSet, pids: Sequence[int], wanted: Callable[[int, Any], bool]) -> None:
    """Have CRIU map these shared memory files through descriptors that are open for reading."""
    kinds = _MEMORY_FILE | _SHARED
    for pid in pids:
        name = f"mm-{pid}.img"
        if not images.size(name):
            continue  # it has ended
        memories = read(images.folder, name, "MM")
        areas = [area for memory in memories for area in memory.vmas]
        found = [a for a in areas if a.status & kinds == kinds and wanted(pid, a)]
        for area in found:
            area.fdflags = area.fdflags & ~os.O_ACCMODE | os.O_RDONLY
        if found:
            write(images.folder, name, "MM", memories)
