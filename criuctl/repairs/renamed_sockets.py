"""Unix sockets whose file was renamed after they were bound, or has another name instead.

CRIU saves the name that bind(2) was given, and binds that again.  A program that publishes a socket
by a rename (haproxy binds ``X.PID.tmp`` and calls it ``X``), or by a link, after which the first
name is removed (supervisord), would come back where no client looks, while the old file at ``X``
refuses connections.  So the images get the present name.  A restore then also removes the old file
there, which CRIU does for every name that it binds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from ..criu.images import ImageSet
from ..criu.socketimages import TCP_ESTABLISHED
from ..proc.socketfiles import renamed
from ..proc.tree import Process
from ..report import Reporter
from .base import FrozenTree, Repair

_LONGEST = 107  # bytes of a path that bind(2) takes, without the NUL


class RenamedSockets(Repair):
    """Unix sockets whose file now has another name than bind(2) was given."""

    loses = "CRIU 4.2 binds a renamed unix socket under its first name again."

    def amend_frozen(self, images: ImageSet, frozen: FrozenTree) -> None:
        """Put the present names into the images; a name that is too long to bind is a warning."""
        if any(d.kind == "socket" for held in frozen.opened.values() for d in held):
            follow_renamed(images, frozen.processes, frozen.reporter)


def follow_renamed(images: ImageSet, tree: Sequence[Process], reporter: Reporter) -> None:
    """Put the present names of the frozen tree's socket files into the images."""
    candidates = {
        entry.id: _text(entry.usk.name)
        for entry in images.files()
        if entry.HasField("usk") and _is_bound(entry.usk)
    }
    if not candidates:
        return
    pids = {process.ns_pid: process.pid for process in tree}
    held = images.holders()
    names: dict[int, bytes] = {}
    for file_id, name in candidates.items():
        holder = next(((pids[pid], fd) for pid, fd in held.get(file_id, ()) if pid in pids), None)
        path = renamed(*holder, name) if holder else None
        if path is None:
            continue
        if len(os.fsencode(path)) > _LONGEST:
            reporter.warning(
                f"the unix socket {name} is called {path} now, which is too long to be bound; "
                "a restore brings it back under its old name",
                hint=f"Have the program use a path of at most {_LONGEST} bytes.",
            )
            continue
        names[file_id] = os.fsencode(path)
    if not names:
        return

    def edit(entry: Any) -> None:
        if entry.id in names and entry.HasField("usk"):
            old = entry.usk.name
            # the kernel usually counts a NUL
            entry.usk.name = names[entry.id] + old[len(old.rstrip(b"\0")) :]
            # that was its old name, and CRIU would remove what it has bound
            entry.usk.ClearField("deleted")

    images.edit_files(edit)


def _is_bound(usk: Any) -> bool:
    """Return whether CRIU will bind it to a full path.

    An accepted connection only has its listener's name; it must not get the new one, which CRIU
    would remove, although the listener may be another process's.
    """
    return bool(
        usk.name.startswith(b"/")
        and (usk.type == socket.SOCK_DGRAM or usk.state != TCP_ESTABLISHED)
    )


def _text(name: bytes) -> str:
    return os.fsdecode(name.rstrip(b"\0"))
