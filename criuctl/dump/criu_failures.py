"""CRIU's failures at a dump: which of them pass by themselves, and what the others mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import Config
from ..criu import driver
from ..criu.images import ImageSet, read
from ..errors import CriuctlError, DumpFailed, NoSuchProcess
from ..proc.descriptors import Descriptor
from ..proc.limits import effective_capabilities
from ..proc.tree import Process, ProcessIdentity
from .checks.limits import descriptor_limit, many_shared

PAUSES = (0.1, 0.2, 0.5, 1.0)  # seconds before another try, where the obstacle passes by itself
PASSES = "It passes by itself: try again."
LONG = 5.0  # seconds; a tree that was frozen for longer is not frozen again
_NOT_UNDONE = "from parasite"  # CRIU could not remove what it had injected into a process
_SHARED = 1 << 8 | 1 << 14  # CRIU: VMA_ANON_SHARED and VMA_AREA_MEMFD in criu/include/image.h
_MANY_MAPPINGS = 1 << 14  # bytes of the image of a task that has a few hundred mappings


def refuse_unrestorable(
    images: ImageSet,
    tree: Sequence[Process],
    opened: Mapping[int, Sequence[Descriptor]],
) -> None:
    """Raise `DumpFailed`, while the tree can still run on, if a restore would lack descriptors.

    The preflight checks the same; what is found here has appeared since.
    """
    limit: int | None = None
    for process in tree:
        name = f"mm-{process.ns_pid}.img"
        if process.zombie or images.size(name) < _MANY_MAPPINGS:
            continue
        limit = descriptor_limit(effective_capabilities()) if limit is None else limit
        memories = read(images.folder, name, "MM")
        shared = {area.shmid for mm in memories for area in mm.vmas if area.status & _SHARED}
        for finding in many_shared(process, len(opened.get(process.pid, ())), len(shared), limit):
            raise DumpFailed(
                f"{finding.text}; the tree runs on", hint=finding.hint, pid=finding.pid
            )


def passing(error: driver.CriuFailed, tries: int) -> str:
    """Return why CRIU has refused the tree, if that passes by itself and the tree runs on; else "".

    An unknown reason next to one that passes is tried only once more.
    """
    from ..host.failures import diagnosis  # a table of regular expressions that only failures need

    if not error.undone or _NOT_UNDONE in error.log:
        return ""
    found = diagnosis.diagnose(error.log, str(error))
    return found.text if found.passes and (found.code != diagnosis.UNKNOWN or tries == 1) else ""


def explain(
    config: Config,
    error: driver.CriuFailed,
    session: str,
    root: int,
    tree: Sequence[Process],
    tries: int = 1,
) -> CriuctlError:
    """Return CRIU's failure as an error of criuctl, with the tree's state after `tries` tries."""
    # CRIU, as a guest in its PID namespace, has ended with it, or met a zombie
    if not tree and _ended(root):
        return NoSuchProcess(f"PID {root} has ended before it was frozen")
    from ..host.failures import diagnosis

    kept = diagnosis.kept(config, error.log, f"dump-{session}")
    found = diagnosis.diagnose(error.log, str(error))
    alive = tree[0].identity.alive() if tree else not _ended(root)
    fate = "the tree runs on" if alive else "the tree is gone"
    often = f" in {tries} tries" if tries > 1 else ""
    return DumpFailed(
        f"CRIU could not dump PID {root}{often}: {found.text}; {fate}",
        hint=found.hint,
        pid=found.pid,
        fd=found.fd,
        **kept,
    )


def _ended(pid: int) -> bool:
    """Return whether the process is gone, or is a zombie."""
    try:
        return ProcessIdentity.of(pid).doomed()
    except NoSuchProcess:
        return True
