"""Options of CRIU that depend on the tree and that CRIU does not find out by itself.

A user of CRIU finds them by reading its refusals one after the other.  Here they are read from
/proc before the freeze: all of them are properties that do not change between now and then, or
change only in a way that makes CRIU refuse, which is safe.
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
    """Return the page in which CRIU runs system calls, for each task by its PID in its namespace.

    It is the first page of the task's code.
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
    """Return whether the leader of the root's session or process group is outside the tree.

    CRIU then needs --shell-job.
    """
    process = read_process(root)
    return process.sid != process.pid or process.pgid != process.pid


def _mounts(pid: int | None = None) -> set[int]:
    return {mount.id for mount in read_mounts(pid)}


def external_files(
    tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]
) -> dict[str, Descriptor]:
    """Return CRIU's key and the descriptor of each file of a mount namespace without a process of
    the tree.

    CRIU cannot find such a file by path; criuctl opens the path and hands the file over as an
    external resource.  The key is the mount and the inode: it stands for every use that the tree
    makes of this file, also for a working folder.
    """
    found: dict[str, Descriptor] = {}
    known = _known_mounts(tree)
    for process in tree:
        for d in opened[process.pid]:
            if (
                d.kind in ("file", "dir", "device")
                # No path leads to it. A chrooted process does not show all mounts; CRIU may find
                # the file.
                and not d.deleted
                and d.mnt_id not in known
                and not d.target.startswith(("/memfd:", "mnt:"))
            ):
                found[f"file[{d.mnt_id:x}:{d.inode:x}]"] = d
    return found


def _known_mounts(tree: Sequence[Process]) -> set[int]:
    """Return the mounts of all mount namespaces of a tree.

    CRIU knows a file on one of them, whichever process has it open.
    """
    known: set[int] = set()
    own = os.stat("/proc/self/ns/mnt").st_ino
    seen: set[tuple[int, str]] = set()
    for process in tree:
        try:
            # A chrooted process sees only the mounts below its root, so criuctl's own namespace is
            # read here.
            namespace, root = (
                os.stat(f"/proc/{process.pid}/ns/mnt").st_ino,
                read_link(process.pid, "root"),
            )
            if (namespace, root) not in seen:
                seen.add((namespace, root))
                known |= _mounts(None if namespace == own else process.pid)
        except (OSError, NoSuchProcess):
            continue  # it has ended
    return known


def criu_info(config: Config) -> dict[str, Any]:
    """Return the CRIU in use, for the manifest."""
    found = binary.find(config)
    return {"origin": found.origin, "version": found.recorded_version}
