"""Check open files of /proc that are about a process outside the tree, and files that the kernel
fills which their holder could not open again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...criu.procfiles import About, about, outlives
from ...files.kernel_files import is_kernels
from ...proc import file_access, trustedpath
from ...proc.credentials import Credentials, credentials_of
from ...proc.descriptors import Descriptor
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

_HINT = (
    "Dump a tree that has it, too; a program that watches others opens them again when it reads "
    "that they have ended."
)
_ENDED = "Have the program close it; only a program of root's has it again after a restore."
_REFUSED = "Have the program close it, or give its user the right to open it before the restore."


def check_proc_files(scene: Scene) -> Iterator[Finding]:
    """Report files that read, after a restore, as those of a process that has ended."""
    reported: set[int] = set()
    for process, d in scene.descriptors():
        what = about(d.target) if d.target.startswith("/proc/") else None
        if what is None or d.deleted or outlives(what) or what.pid in reported:
            continue
        command = _outside(scene, process, what)
        if command:
            reported.add(what.pid)
            text = (
                f"{d.target} is about process {command}, which is not part of the tree; after a "
                "restore that finds it ended, "
            )
            text += (
                "or takes place in a PID namespace of its own, reading says that it has ended "
                "(ESRCH)"
            )
            yield Finding("warning", "proc-outside", text, _HINT, pid=process.pid, fd=d.fd)


def check_refused_files(scene: Scene) -> Iterator[Finding]:
    """Report files that the kernel fills and that their holder's user may not open now: a restore
    has the process open them again.
    """
    for process in scene.living:
        user = credentials_of(process.pid)
        for d in () if user.opens_all else scene.opened[process.pid]:
            if not d.target.startswith(("/proc/", "/sys/")) or _may_open(process, user, d):
                continue
            text = f"{d.target}: user {user.uid} may not open it so now; "
            code, text, hint = (
                ("kernel-file-refused", f"{text}a restore would be refused", _REFUSED)
                if about(d.target) is None
                else ("proc-refused", f"{text}after a restore it is of an ended process", _ENDED)
            )
            yield Finding("warning", code, text, hint, pid=process.pid, fd=d.fd)


def _may_open(process: Process, user: Credentials, d: Descriptor) -> bool:
    try:
        fd = os.open(f"/proc/{process.pid}/root{d.target}", os.O_PATH | os.O_CLOEXEC)
    except OSError:  # its process has ended
        return True
    try:
        last = trustedpath.component(fd, d.target)
        return not is_kernels(fd) or file_access.may_open(
            user, [last], file_access.access_of(d.flags)
        )
    finally:
        os.close(fd)


def check_proc_folders(scene: Scene) -> Iterator[Finding]:
    """Report working folders that are about a thread: CRIU changes to them before it creates
    threads.
    """
    for process in scene.living:
        what = about(process.cwd)
        if what is None:
            continue
        group = _group(process, what)
        if what.tid not in (0, what.pid) or (group is not None and group[0] != what.pid):
            text = (
                f"the working folder of {process}, {process.cwd}, is about a thread, which CRIU "
                "makes only afterwards"
            )
            yield Finding(
                "error",
                "proc-folder",
                text,
                "Have the program go elsewhere (chdir).",
                pid=process.pid,
            )


def _outside(scene: Scene, process: Process, what: About) -> str:
    """Return ``PID (command)`` of the process that the path is about; "" if it is of the tree, or
    has ended.
    """
    group = _group(process, what)
    inner = scene.entered("pid")
    if group is None or group[0] in {p.ns_pid if inner else p.pid for p in scene.tree}:
        return ""
    return f"{group[0]} ({group[1]})"


def _group(process: Process, what: About) -> tuple[int, str] | None:
    """Return the process that the number is of, or of a thread of, as `process` sees it, and its
    name.
    """
    place = f"/proc/{process.pid}/root/proc/{what.pid}/status"
    try:
        with open(place, encoding="ascii", errors="replace") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return None
    return int(status.get("Tgid", what.pid)), status.get("Name", "")
