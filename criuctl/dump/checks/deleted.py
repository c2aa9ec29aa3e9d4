"""Check files that are deleted and still open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from ...proc.credentials import CAP_MKNOD, credentials_of
from ...proc.descriptors import Descriptor
from ...proc.path_control import PathLookup
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

_GHOST_MAXIMUM = (1 << 32) - 1  # CRIU's limit is an unsigned 32-bit number
_MIB = 1 << 20


def ghost(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    """Report a deleted file, which travels inside the checkpoint, or a deleted device."""
    if d.kind != "file":
        yield from _device(scene, process, d)
        return
    # st_blocks is not known here, so holes make the estimate too high
    allocated = d.size
    if allocated > _GHOST_MAXIMUM:
        yield Finding(
            "warning",
            "ghost-files",
            f"{d.target} is deleted and {allocated // _MIB} MiB long; no more than 4 GiB of its "
            "data can travel along",
            f"Copy /proc/{process.pid}/fd/{d.fd} to a name and have the program open the copy.",
            pid=process.pid,
            fd=d.fd,
        )
    elif allocated > _MIB:
        yield Finding(
            "info",
            "ghost-files",
            f"{d.target} is deleted but open; its {allocated // _MIB} MiB travel in the checkpoint",
            pid=process.pid,
            fd=d.fd,
        )


def _device(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    """Refuse a deleted device in a folder that others control, for a process that could not make
    it itself (`criuctl.files.deleted_files`).
    """
    if d.kind != "device" or not others_control(scene, folder := os.path.dirname(d.target)):
        return
    if not credentials_of(process.pid).has(CAP_MKNOD):
        text = (
            f"{d.target} is a deleted device, others than root can write to {folder}, and "
            f"{process} may make no devices (CAP_MKNOD); a restore makes none there for it"
        )
        hint = (
            "Have the program close it before the dump, or make the device where only root can "
            "write."
        )
        yield Finding("error", "deleted-device", text, hint, pid=process.pid, fd=d.fd)


def others_control(scene: Scene, folder: str) -> bool:
    """Return whether criuctl, and not CRIU, makes deleted files of that folder again
    (`criuctl.files.deleted_files`).
    """
    if scene.saved("mnt") and scene.saved("pid"):  # CRIU makes them in mounts that it makes
        return False
    with suppress(OSError), ExitStack() as stack:
        view: int | None = None
        if scene.foreign("mnt"):
            view = os.open(f"/proc/{scene.root.pid}/root", os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, view)
        return not stack.enter_context(PathLookup(view)).is_roots(folder)
    return False
