"""Check mounts in namespaces that CRIU saves, but that it cannot make again (criu/mount.c,
validate_mounts).

CRIU makes a mount again in one of three ways: it binds what this host has mounted, too; it mounts
the file system, if it is of a kind that it knows; or it binds a part of a file system from a mount
of the tree that shows all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...proc.mounts import Mount
from ...report import Finding

_MADE = frozenset(
    {
        *(
            "proc",
            "sysfs",
            "devtmpfs",
            "binfmt_misc",
            "tmpfs",
            "devpts",
            "simfs",
            "pstore",
            "mqueue",
            "securityfs",
            "fusectl",
        ),
        *("debugfs", "tracefs", "cgroup", "cgroup2", "aufs", "overlay", "autofs"),
    }
)  # of the kinds of file systems
_DELETED = "//deleted"  # the suffix of a mount's root whose folder was removed; CRIU makes it again


def unsaved(
    pid: int, inside: Sequence[Mount], every: Sequence[Mount], host: Sequence[Mount]
) -> Iterator[Finding]:
    """Report the mounts that `pid` sees and CRIU cannot make again.

    `every`: the mounts of all namespaces of the tree; `host`: those of this host.
    """
    for mount in inside:
        if mount.point == "/" or mount.root.endswith(_DELETED) or mount.kind.startswith("fuse"):
            continue
        if any(
            other.device == mount.device and _is_below(mount.root, other.root) for other in host
        ):
            continue
        if mount.kind == "binfmt_misc":
            yield from _interpreters(pid, mount)
        if mount.root == "/":
            if mount.kind not in _MADE:
                text = (
                    f"a file system of the kind {mount.kind} is mounted at {mount.point}, which "
                    "this host has not mounted"
                )
                yield _error(pid, f"{text}; CRIU cannot mount it again", mount)
        elif not any(other.device == mount.device and _shows(other, mount) for other in every):
            text = (
                f"{mount.point} shows {mount.root} of a file system ({mount.kind}) that is not "
                "mounted as a whole, neither in the"
            )
            yield _error(pid, f"{text} tree nor on this host; CRIU cannot make that again", mount)


def _interpreters(pid: int, mount: Mount) -> Iterator[Finding]:
    """Warn of program formats that the tree has registered: the kernel forgets them with the last
    mount, and CRIU makes an empty one.
    """
    with suppress(OSError):
        formats = sorted(set(os.listdir(f"/proc/{pid}/root{mount.point}")) - {"register", "status"})
        if formats:
            text = (
                f"{', '.join(formats[:3])}{' and more' if formats[3:] else ''}, registered in "
                f"{mount.point} (binfmt_misc),"
            )
            hint = (
                "Mount binfmt_misc on this host, too, which keeps them, or register them again "
                "after the restore."
            )
            yield Finding(
                "warning", "formats-lost", f"{text} would be gone after a restore", hint, pid=pid
            )


def _shows(other: Mount, mount: Mount) -> bool:
    """Return whether what `mount` shows can be bound from `other`."""
    return other.root == "/" or (other.point == "/" and _is_below(mount.root, other.root))


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _error(pid: int, text: str, mount: Mount) -> Finding:
    hint = (
        f"Unmount {mount.point} before the dump, or mount the file system on this host, too, "
        "before the program is started."
    )
    return Finding("error", "mount-unsaved", text, hint, pid=pid)
