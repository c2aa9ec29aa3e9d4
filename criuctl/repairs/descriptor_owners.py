"""Owners of descriptors: the process or thread that gets the signal for input (``F_SETOWN``).

CRIU makes descriptors before threads, so an owner that is a thread (``F_SETOWN_EX``) fails the
restore; so does a process outside the tree that has ended.  Such owners are taken out of the
images; a thread of the tree is set again by the process itself.  A process outside is the same as
before only if it runs since before the dump; another one is reported, and gets no signal.  CRIU
also forgets owner and signal of a descriptor that it inherits from criuctl, as a terminal from
outside: they are set again, too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

from ..criu.images import ImageSet, read
from ..errors import CriuctlError
from ..proc import inject
from ..proc.tree import running_for
from ..report import Reporter
from .base import Repair, RestoredTree, RestoreImages
from .open_files import first_holder

_F_SETSIG, _F_SETOWN_EX = 10, 15
_OWNER_THREAD, _OWNER_GROUP = 0, 2  # F_OWNER_TID, F_OWNER_PGRP

_Owners = dict[tuple[int, int], Any]  # (PID, descriptor) -> CRIU's fown_entry


class DescriptorOwners(Repair):
    """Owners that do not exist, or not yet, when CRIU restores the descriptors."""

    loses = "CRIU 4.2 fails on F_SETOWN_EX with a thread, and on an owner outside that has ended."

    def __init__(self) -> None:
        self._owners: _Owners = {}

    def amend_restore(self, restore: RestoreImages) -> None:
        """Take out owners that CRIU could not set."""
        self._owners = _take_out(restore.images, restore.age, restore.reporter)

    def mend(self, tree: RestoredTree) -> None:
        """Have the processes set their owners, before `DescriptorFlags` arms the signals."""
        wanted = {
            key: owner for key, owner in self._owners.items() if owner.pid or key in tree.owners
        }
        for (inner, fd), owner in {**tree.owners, **wanted}.items():
            try:
                _set(tree.pids[inner], fd, owner)
            except (OSError, KeyError, CriuctlError) as error:
                tree.reporter.warning(
                    f"PID {inner}: no process gets a signal for descriptor {fd} (F_SETOWN, "
                    f"F_SETSIG): {error}"
                )


def _take_out(images: ImageSet, age: float | None, reporter: Reporter) -> _Owners:
    """Return what was taken out; an owner that is no thread of the tree is reported and has PID
    0.
    """
    tree = read(images.folder, "pstree.img", "PSTREE")
    processes = {entry.pid for entry in tree}
    threads = {thread for entry in tree for thread in entry.threads}
    # only the root may have an owner outside
    groups = processes | {entry.pgid for entry in tree} - {tree[0].pgid}

    def exists(owner: Any) -> bool:
        if owner.pid in (groups if owner.pid_type == _OWNER_GROUP else processes):
            return True
        return owner.pid not in threads and age is not None and running_for(owner.pid, age)

    if all(exists(owner) for entry in images.files() if (owner := _owner(entry)) is not None):
        return {}
    holder = first_holder(images)
    taken: _Owners = {}

    def edit(entry: Any) -> None:
        owner, held = _owner(entry), holder(entry)
        if owner is not None and not exists(owner):
            if held:
                taken[held] = type(owner).FromString(owner.SerializeToString())
            owner.pid = 0

    images.edit_files(edit)
    _report_gone(taken, threads, reporter)
    return taken


def _report_gone(
    taken: Mapping[tuple[int, int], Any], threads: set[int], reporter: Reporter
) -> None:
    """Warn of owners outside that are not the same any more, one line for each, and clear their
    PID.
    """
    gone: dict[str, list[tuple[int, int]]] = {}
    for held, owner in taken.items():
        if owner.pid_type != _OWNER_THREAD or owner.pid not in threads:
            what = "process group" if owner.pid_type == _OWNER_GROUP else "PID"
            gone.setdefault(f"{what} {owner.pid}", []).append(held)
            owner.pid = 0
    for name, ((pid, fd), *others) in gone.items():
        more = f" and {len(others)} more" if others else ""
        reporter.warning(
            f"PID {pid}: {name}, outside, no longer gets a signal for descriptor {fd}{more} "
            "(F_SETOWN)"
        )


def _owner(entry: Any) -> Any:
    owners = (value.fown for _, value in entry.ListFields() if hasattr(value, "fown"))
    return next((owner for owner in owners if owner.pid), None)


def _set(pid: int, fd: int, owner: Any) -> None:
    with inject.stopped(pid):
        result = 0
        if owner.pid:
            with inject.placed(pid, struct.pack("=iI", owner.pid_type, owner.pid)) as address:
                result = inject.call(pid, inject.FCNTL, fd, _F_SETOWN_EX, address)
        if result >= 0 and owner.signum:
            result = inject.call(pid, inject.FCNTL, fd, _F_SETSIG, owner.signum)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
