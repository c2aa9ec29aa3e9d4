"""Check open files of /proc that are about a process outside the tree."""

from __future__ import annotations

from collections.abc import Iterator

from ...criu.procfiles import About, about, outlives
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

_HINT = (
    "Dump a tree that has it, too; a program that watches others opens them again when it reads "
    "that they have ended."
)


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
