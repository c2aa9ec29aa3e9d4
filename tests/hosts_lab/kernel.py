"""The system calls about namespaces and mounts that Python 3.11 has no function for."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    """New namespaces for the calling thread (a new PID namespace for its next children)."""
    _done(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Put the calling thread into the namespace that `fd` is open on."""
    _done(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = [text.encode() if text else None for text in (source, target, kind)]
    _done(
        _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None),
        f"mount {kind or source} on {target}",
    )


def detach(target: str) -> None:
    """Unmount, with all below it, as soon as it is not used."""
    _done(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace; the old one appears at `old`."""
    _done(_libc.pivot_root(new.encode(), old.encode()), f"pivot_root {new}")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _done(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")
