"""Check open files and folders that CRIU opens again by their paths, and their mounts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...proc.descriptors import Descriptor
from ...proc.mounts import Mount
from ...proc.procfs import target_of
from ...proc.tree import Process
from ...report import Finding
from . import deleted
from .scene import Scene


def _error(process: Process, d: Descriptor, code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=process.pid, fd=d.fd)


def check_path(scene: Scene, process: Process, d: Descriptor) -> Iterator[Finding]:
    """Check what CRIU opens again by its path (criu/files-reg.c)."""
    mount = scene.mounts.get(d.mnt_id)
    if mount is None:
        if scene.knows_mounts_of(process.pid):
            yield from _foreign_mount(process, d)
        return
    if (over := scene.hides(mount)) is not None:
        text = f"{d.target} is on a mount that is hidden: {over.point} was mounted over it"
        yield _error(
            process,
            d,
            "path-hidden",
            text,
            "Unmount what hides it, or have the program open the file again.",
        )
        return
    if mount.kind in ("proc", "devpts"):
        return  # deleted files of these names are the kernel's own
    if d.nlink == 0:
        yield from deleted.ghost(scene, process, d)
        return
    if d.deleted:
        # It has other names: CRIU links it under a temporary one, which an overlay may not allow.
        if mount.kind == "overlay":
            yield Finding(
                "warning",
                "overlay-deleted",
                f"{d.target} was deleted from an overlay but is open; if it is of a lower layer, "
                "CRIU cannot save it",
                "Have the program open the file again (restart it after an upgrade of its files).",
                pid=process.pid,
                fd=d.fd,
            )
        return
    there = _in_its_namespace(scene, d)
    if (
        there is not None
        and (there.st_ino, there.st_dev) != (d.inode, d.device)
        and _keeps(process, d)
    ):
        over = _mounted_over(scene, mount, d.target)
        yield _error(
            process,
            d,
            "path-hidden",
            f"{d.target} is another "
            "file now than the one "
            "that is open" + (f": {over.point} was mounted over it" if over else ""),
            "Unmount what hides it, or have the program open the file again."
            if over
            else "Have the program open the file again.",
        )


def _keeps(process: Process, d: Descriptor) -> bool:
    """Return whether it is still open by that name: a program may delete and rewrite a file, or
    close it, meanwhile.
    """
    link = f"/proc/{process.pid}/fd/{d.fd}"
    try:
        status = os.stat(link)
        return (status.st_ino, status.st_dev) == (d.inode, d.device) and target_of(link) == d.target
    except OSError:
        return False


def _foreign_mount(process: Process, d: Descriptor) -> Iterator[Finding]:
    """Check a file on a mount that the tree's namespaces do not have.

    criuctl hands it to CRIU if its path leads to it from here.
    """
    try:
        here = os.stat(d.target)
        if (here.st_ino, here.st_dev) == (d.inode, d.device) and d.kind in (
            "file",
            "dir",
            "device",
        ):
            yield Finding(
                "info",
                "foreign-mount",
                f"{d.target} was opened in another mount namespace; a restore opens that path "
                "outside of the tree's again",
                pid=process.pid,
                fd=d.fd,
            )
            return
    except OSError:
        pass  # no such path here
    if _is_message_queue(process, d):
        hint = (
            "Have the program close it before the dump (mq_close); queues of System V are saved, "
            "in an IPC namespace."
        )
        yield _error(
            process,
            d,
            "message-queue",
            f"{d.target[1:]} is a POSIX message queue, which CRIU cannot save",
            hint,
        )
        return
    yield _error(
        process,
        d,
        "mount-namespace",
        f"{d.target} is on a mount (id {d.mnt_id}) that is not in the tree's mount namespace, so "
        "no path leads to it",
        "Give the program stdio and files that are opened inside its own mount namespace; have "
        "it close this one.",
    )


def _in_its_namespace(scene: Scene, d: Descriptor) -> os.stat_result | None:
    """Return the status of what the path leads to in the file's mount namespace.

    None if it leads nowhere, or if that cannot be found out.
    """
    root = scene.root_of(d.mnt_id)
    if root is None:
        return None
    try:
        return os.stat(root + d.target, follow_symlinks=d.kind != "symlink")
    except OSError:
        return None


def _is_message_queue(process: Process, d: Descriptor) -> bool:
    """Return whether it is on the kernel's own mount of an mqueue file system; a read of such a
    file shows its size.
    """
    if d.kind != "file" or d.target.count("/") != 1:
        return False
    try:
        fd = os.open(f"/proc/{process.pid}/fd/{d.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(fd, 6) == b"QSIZE:"
    except OSError:
        return False
    finally:
        os.close(fd)


def _mounted_over(scene: Scene, own: Mount, path: str) -> Mount | None:
    """Return the mount that lies between the file's own mount and its path."""
    others = [m for m in scene.mounts.values() if m.id != own.id and len(m.point) >= len(own.point)]
    above = [m for m in others if path == m.point or path.startswith(m.point.rstrip("/") + "/")]
    return max(above, key=lambda m: (len(m.point), m.id), default=None)


def mount_of(path: str) -> int | None:
    """Return the mount id behind a link of /proc, which leads to the very mount."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            return next((int(line.split()[1]) for line in info if line.startswith("mnt_id:")), None)
    finally:
        os.close(fd)
