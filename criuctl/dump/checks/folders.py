"""Check the working and root folders of processes, their programs and the files that they have
mapped.

CRIU opens all of them again by their paths, as it opens files (criu/cr-dump.c, dump_task_fs).  For
files on a mount of another namespace there is no way to hand them over instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set

from ...errors import NoSuchProcess
from ...proc.mounts import Mount
from ...proc.procfs import read_link
from ...proc.tree import Process
from ...report import Finding
from .open_paths import mount_of
from .scene import Scene

_MEMORY_FILE = "/memfd:"  # of memfd_create
_FOLDERS = {"cwd": "working folder", "root": "root folder"}


def check_folders(scene: Scene) -> Iterator[Finding]:
    """Report folders, programs and mapped files to which no path leads."""
    devices = {mount.device for mount in scene.mounts.values()}
    for process in scene.living:
        for name, words in _FOLDERS.items():
            yield from _folder(scene, process, name, words)
        if process.exe_deleted and process.exe.startswith(_MEMORY_FILE):
            text = (
                f"{process} runs a program from a memory file ({process.exe}), which CRIU cannot "
                "save"
            )
            yield _error(
                process,
                "program-in-memory",
                text,
                "Have the program written to a file, and start it from there.",
            )
        elif scene.knows_mounts_of(process.pid):
            yield from _program(scene, process, devices)


def _error(process: Process, code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=process.pid)


def _folder(scene: Scene, process: Process, name: str, words: str) -> Iterator[Finding]:
    link = f"/proc/{process.pid}/{name}"
    try:
        path, status = read_link(process.pid, name), os.stat(link)
    except (NoSuchProcess, OSError):
        return
    mnt_id = mount_of(link)
    if mnt_id is None:  # it has ended
        return
    leave = f"Have the program change its {words}, or start it from another one."
    if not path:
        text = (
            f"the path of the {words} of {process} is longer than 4096 bytes: the kernel does not "
            "report such a path, and CRIU cannot save it"
        )
        yield _error(process, "path-too-long", text, leave)
    elif (mount := scene.mounts.get(mnt_id)) is None:
        if scene.knows_mounts_of(process.pid):
            text = (
                f"the {words} of {process}, {path}, is on a mount that is not in its mount "
                "namespace (any more)"
            )
            yield _error(process, "mount-namespace", text, leave)
    elif scene.hides(mount) or (
        status.st_nlink and _hidden(scene, mount, path, status) and _stays(process, name, path)
    ):
        text = (
            f"{path}, the {words} of {process}, leads to another folder now, or to none: "
            "something was mounted over it"
        )
        yield _error(process, "path-hidden", text, f"Unmount what hides it. {leave}")


def _hidden(scene: Scene, mount: Mount, path: str, status: os.stat_result) -> bool:
    """Return whether the path leads elsewhere in the mount namespace with this mount; False if that
    cannot be found out.
    """
    root = scene.root_of(mount.id)
    if root is None:
        return False
    try:
        return not os.path.samestat(os.stat(root + path), status)
    except FileNotFoundError:
        return not path.endswith(" (deleted)")
    except OSError:
        return False


def _stays(process: Process, name: str, path: str) -> bool:
    """Return whether it is still there: a program may leave, and remove the folder, meanwhile."""
    try:
        return read_link(process.pid, name) == path
    except (NoSuchProcess, OSError):
        return False


def _program(scene: Scene, process: Process, devices: Set[int]) -> Iterator[Finding]:
    """Check programs and mapped files on a mount that their process's namespace does not have
    (``unshare --mount``, ``umount -l``).
    """
    mnt_id = mount_of(f"/proc/{process.pid}/exe")
    if mnt_id is not None and mnt_id not in scene.mounts:
        yield _error(
            process,
            "mount-namespace",
            f"{process} runs {process.exe} from a mount (id {mnt_id}) that is not in its mount "
            "namespace: it moved there without starting a new program",
            "Start the program inside the namespace: `unshare --mount program`, or nsenter.",
        )
        return
    reported: set[str] = set()
    for m in scene.mapped[process.pid]:
        # A file shown as deleted may be on a mount of the kernel's own, which CRIU handles.
        if (
            m.path in reported
            or not m.path.startswith("/")
            or m.deleted
            or not m.inode
            or m.device in devices
        ):
            continue
        reported.add(m.path)
        mnt_id = mount_of(f"/proc/{process.pid}/map_files/{m.start:x}-{m.end:x}")
        if mnt_id is not None and mnt_id not in scene.mounts:
            text = (
                f"{process} has {m.path} mapped, from a mount (id {mnt_id}) that is not in its "
                "mount namespace (any more)"
            )
            yield _error(
                process,
                "mount-namespace",
                text,
                "Have the program let go of the file, or restart it.",
            )
