"""When the tree's first process ends, and how, whoever's child it is.

Of a child of the holder the reaping tells.  A restored one may be another's: its pidfd tells that it has ended, and newer kernels
how.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from ...errors import CriuctlError
from ...proc.tree import children
from .event_loop import READ
from .processes import exit_code, reap

if TYPE_CHECKING:
    from .holder import Holder

_MAX_LOOKS, _LOOK_PAUSE = 100, 0.02  # seconds


class RootWatch:
    """Tells one holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._fd = -1
        self._looks = 0

    def begin(self) -> None:
        """Be told when the tree's first process ends."""
        holder = self._holder
        assert holder.tree.root is not None
        try:
            self._fd = holder.tree.root.open_pidfd()
        except CriuctlError:
            holder.loop.soon(self._is_gone)
            return
        self._looks = 0
        holder.loop.watch(self._fd, READ, self._on_end)

    def close(self) -> None:
        """It is known to have ended."""
        if self._fd >= 0:
            self._holder.loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _is_gone(self) -> None:
        """It ended before it could be watched; if a child of ours ends with its status, the reaping of that one tells."""
        if self._holder.init not in _own_children():
            self._holder.root_ended(None, None)

    def _on_end(self, events: int) -> None:
        """The root has ended; if it is our child the reaping tells how, else the kernel may."""
        holder = self._holder
        reap(holder.on_reaped)
        if self._fd < 0:
            return
        if holder.init in _own_children():
            holder.loop.unwatch(self._fd)  # its reaping will tell
            holder.tree.end_with_root(holder.init)
            return
        code, number = _exit_by_pidfd(self._fd)
        if code is None and self._looks < _MAX_LOOKS:
            # Somebody else's child, and not reaped yet: only then does the kernel tell.
            self._looks += 1
            holder.loop.unwatch(self._fd)
            holder.loop.after(_LOOK_PAUSE, lambda: self._on_end(0))
        else:
            holder.root_ended(code, number)


def _own_children() -> list[int]:
    try:
        return children(os.getpid())
    except CriuctlError:
        return []


def _exit_by_pidfd(fd: int) -> tuple[int | None, int | None]:
    """How the process behind a pidfd ended, if this kernel tells (Linux 6.15) and it has been reaped."""
    import fcntl

    request, info_exit = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO with the first version of its structure
    buffer = bytearray(struct.pack("=Q", info_exit).ljust(64, b"\0"))
    try:
        fcntl.ioctl(fd, request, buffer)
    except OSError:
        return None, None
    if not struct.unpack_from("=Q", buffer)[0] & info_exit:
        return None, None
    return exit_code(struct.unpack_from("=i", buffer, 60)[0])
