"""System V shared memory that was removed while in use (``IPC_RMID``).

Such a segment ends with its last user.  CRIU restores it without that mark, and it would stay: it
is removed again, in the IPC namespace of the tree.
"""

from __future__ import annotations

from ..criu.images import read
from ..errors import NoSuchProcess
from ..proc.namespaces import in_ipc_namespace
from ..proc.syscalls import remove_shared_memory
from .base import Repair, RestoredTree

_SHM_DEST = 0o1000  # mode of a segment that ends with its last user


class RemovedSegments(Repair):
    """Segments with the mark of IPC_RMID."""

    loses = "CRIU 4.2 restores a removed System V segment as one that stays."

    def mend(self, tree: RestoredTree) -> None:
        """Remove them again; a warning if that fails."""
        images = tree.images
        names = [name for name in images.names() if name.startswith("ipcns-shm-")]
        entries = (e for name in names for e in read(images.folder, name, "IPCNS_SHM"))
        removed = [e.desc.id for e in entries if e.desc.mode & _SHM_DEST]
        if not removed:
            return
        try:
            in_ipc_namespace(tree.root, lambda: remove_shared_memory(*removed))
        except (OSError, NoSuchProcess) as error:
            numbers = ", ".join(map(str, removed))
            tree.reporter.warning(
                f"System V shared memory (shmid {numbers}) does not end with its users: {error}"
            )
