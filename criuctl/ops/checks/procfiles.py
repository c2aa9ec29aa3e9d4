"""Open files of /proc that are about a process outside of the tree."""

from __future__ import annotations

from collections.abc import Iterator

from ...criu.procfiles import About, about, outlives
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

_HINT = "Dump a tree that has it, too; a program that watches others opens them again when it reads that they have ended."


def check_proc_files(scene: Scene) -> Iterator[Finding]:
    """What a restored program will read as that of a process that has ended, if it has by then."""
    told: set[int] = set()
    for process, d in scene.descriptors():
        what = about(d.target) if d.target.startswith("/proc/") else None
        if what is None or d.deleted or outlives(what) or what.pid in told:
            continue
        command = _outside(scene, process, what)
        if command:
            told.add(what.pid)
            text = f"{d.target} is about process {command}, which is not part of the tree; after a restore that finds it ended, "
            text += "or takes place in a PID namespace of its own, reading says that it has ended (ESRCH)"
            yield Finding("warning", "proc-outside", text, _HINT, pid=process.pid, fd=d.fd)


def _outside(scene: Scene, process: Process, what: About) -> str:
    """``PID (command)`` of what the path is about, as who has it open numbers processes; "" if it is
    of the tree, or has ended.
    """
    place = f"/proc/{process.pid}/root/proc/{what.pid}/status"
    try:
        with open(place, encoding="ascii", errors="replace") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return ""
    inner = scene.entered("pid")
    tree = {p.ns_pid if inner else p.pid for p in scene.tree}
    group = int(status.get("Tgid", what.pid))
    return "" if group in tree else f"{group} ({status.get('Name', '')})"
