"""What CRIU must be told about a tree that it does not find out itself.

A knowing user finds these out by reading CRIU's refusals one after the other; here they are read
off /proc before the freeze (all of them are properties that do not change between now and then, or
only in a way that makes CRIU refuse, which is safe).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Config
from ..criu import binary
from ..criu.pages import PageGuard
from ..errors import NoSuchProcess
from ..proc.descriptors import Descriptor
from ..proc.mappings import each_mapping
from ..proc.mounts import read_mounts
from ..proc.procfs import read_link
from ..proc.tree import Process, read_process


def page_guards(tree: Sequence[Process]) -> dict[int, PageGuard]:
    """For each task, by its own PID, the page in which CRIU runs system calls: the start of its
    first code.
    """
    guards = {}
    for process in tree:
        if process.zombie:
            continue
        code = next((m for m in each_mapping(process.pid) if "x" in m.perms), None)
        if code is not None:
            guards[process.ns_pid] = PageGuard(process.pid, code.start)
    return guards


def needs_shell_job(root: int) -> bool:
    """Whether the root's session or process group is led from outside the tree (CRIU's
    --shell-job).
    """
    process = read_process(root)
    return process.sid != process.pid or process.pgid != process.pid


def _mounts(pid: int | None = None) -> set[int]:
    return {mount.id for mount in read_mounts(pid)}


def external_files(
    tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]
) -> dict[str, Descriptor]:
    """CRIU's key -> descriptor, for files that were opened in a mount namespace in which no process
    of the tree lives.

    CRIU cannot find such a file by path; as external resources their paths are opened by criuctl
    itself.  The key is the mount and the inode: all that the tree has of this file, folders that it
    stands in too, would be opened so.
    """
    found: dict[str, Descriptor] = {}
    known = _known_mounts(tree)
    for process in tree:
        for d in opened[process.pid]:
            if (
                d.kind in ("file", "dir", "device")
                # no path leads to it; who is in a chroot does not show us all mounts, and CRIU may
                # find it
                and not d.deleted
                and d.mnt_id not in known
                and not d.target.startswith(("/memfd:", "mnt:"))
            ):
                found[f"file[{d.mnt_id:x}:{d.inode:x}]"] = d
    return found


def _known_mounts(tree: Sequence[Process]) -> set[int]:
    """The mounts of all mount namespaces of a tree: CRIU knows a file on one of them, whichever
    process has it.
    """
    known: set[int] = set()
    ours = os.stat("/proc/self/ns/mnt").st_ino
    seen: set[tuple[int, str]] = set()
    for process in tree:
        try:
            # A chrooted process is shown only the mounts below its root: ours is read from our own
            # side.
            namespace, root = (
                os.stat(f"/proc/{process.pid}/ns/mnt").st_ino,
                read_link(process.pid, "root"),
            )
            if (namespace, root) not in seen:
                seen.add((namespace, root))
                known |= _mounts(None if namespace == ours else process.pid)
        except (OSError, NoSuchProcess):
            continue  # it has ended
    return known


def criu_info(config: Config) -> dict[str, Any]:
    """The CRIU in use, for the manifest."""
    found = binary.find(config)
    return {"origin": found.origin, "version": found.recorded_version}
