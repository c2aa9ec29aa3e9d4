"""Mappings larger than memory and swap: address space that a program has reserved.

CRIU makes each mapping at once and writable, which the kernel refuses where it could never have
memory for it.  Such mappings are made without a reservation.
"""

from __future__ import annotations

import re

from ..criu.images import read, write
from ..proc.procfs import memory_info
from .base import Repair, RestoreImages

_MAP_PRIVATE, _MAP_NORESERVE = 0x2, 0x4000


class LargeMappings(Repair):
    """A private mapping with more bytes than MemTotal and SwapTotal."""

    loses = "CRIU 4.2 cannot restore a mapping larger than memory and swap."

    def amend_restore(self, restore: RestoreImages) -> None:
        """Have the kernel reserve nothing for them."""
        images, memory = restore.images, memory_info()
        room = sum(int(memory[key].split()[0]) for key in ("MemTotal", "SwapTotal")) << 10
        for name in images.names():
            if not re.fullmatch(r"mm-\d+\.img", name):
                continue
            memories = read(images.folder, name, "MM")
            areas = [v for m in memories for v in m.vmas]
            large = [v for v in areas if v.flags & _MAP_PRIVATE and v.end - v.start > room]
            for area in large:
                area.flags |= _MAP_NORESERVE
            if large:
                write(images.folder, name, "MM", memories)
