"""Where a tree finds its workspace, besides at its path: a copy with a workspace of its own
(``fork --fork-workspace``) has it mounted where its original has that of the original, in its own
mount namespace. `criuctl.restore.relocation` shows it again after the next dump.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..proc.mounts import Mount, read_mounts


def points(root: int, workspace: str) -> tuple[str, ...]:
    """Return the mount points at which the process `root` finds that folder."""
    return tuple(
        dict.fromkeys(
            mount.point
            for mount in read_mounts(root)
            if shown_at(f"/proc/{root}/root{mount.point}", mount) == workspace
        )
    )


def shown_at(seen: str, mount: Mount) -> str:
    """Return the path of the copy's workspace that a mount shows, "" for another mount.

    `seen`: a path that leads criuctl to the mount point.
    """
    above, name = os.path.split(mount.point)
    folder = os.path.join(above, os.path.basename(mount.root))
    if os.path.basename(folder).startswith(f"{name}."):  # as the fork has named it
        with suppress(OSError):
            if os.path.samestat(os.lstat(folder), os.lstat(seen)):
                return folder
    return ""
