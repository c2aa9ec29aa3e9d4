"""The mount namespaces that the files and the processes of a set of images belong to.

CRIU numbers the mount namespaces that it saves. ``mountpoints-N.img`` has the mounts of number N,
by the ids that they had at the dump; each file of files.img has the id of its mount, and
``ids-PID.img`` has the number of the process's namespace. The path of a file belongs to its mount's
namespace, not to its process's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from .images import ImageSet, read

_MOUNTS = re.compile(r"mountpoints-(\d+)\.img")


class MountSpaces(Struct, frozen=True):
    """The saved mount namespaces of a tree, by CRIU's numbers."""

    by_mount: Mapping[int, int]  # id of a mount -> namespace
    by_task: Mapping[int, int]  # the tree's own PID -> namespace

    def of(self, mount: int, pid: int) -> int:
        """Return the namespace in which a path on this mount is looked up.

        That of `pid` for a mount that is in none.
        """
        return self.by_mount.get(mount, self.by_task.get(pid, 0))


def mount_spaces(images: ImageSet) -> MountSpaces:
    """Return the mount namespaces in the images."""
    names = images.names()
    by_mount: dict[int, int] = {}
    for name in names:
        if match := _MOUNTS.fullmatch(name):
            by_mount |= {mount.mnt_id: int(match[1]) for mount in read(images.folder, name, "MNTS")}
    tasks = [pid for pid in images.pids() if f"ids-{pid}.img" in names]  # a zombie has none
    by_task = {pid: read(images.folder, f"ids-{pid}.img", "IDS")[0].mnt_ns_id for pid in tasks}
    return MountSpaces(by_mount, by_task)
