"""When the tree's first process, its root, ends, and how.

If it is a child of the holder, reaping it says how.  A restored one may be another's child: its
pidfd says that it has ended, and newer kernels how.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

from ...errors import CriuctlError
from ...proc.tree import children
from .event_loop import READ, Loop
from .processes import Tree, exit_code, reap
from .session_state import Identity

_MAX_LOOKS, _LOOK_PAUSE = 100, 0.02  # seconds
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # with the first version of its structure


class RootWatch:
    """Watches the root of one session.

    `reaped` gets PID and wait status of each child of the holder that has ended; `ended` the code
    and the signal by which a root ended that is not the holder's child, (None, None) if it is not
    known.
    """

    def __init__(
        self,
        loop: Loop,
        tree: Tree,
        identity: Identity,
        reaped: Callable[[int, int], None],
        ended: Callable[[int | None, int | None], None],
    ) -> None:
        self._loop, self._tree, self._identity = loop, tree, identity
        self._reaped, self._ended = reaped, ended
        self._fd = -1
        self._looks = 0

    def begin(self) -> None:
        """Watch the root of now."""
        assert self._tree.root is not None
        try:
            self._fd = self._tree.root.open_pidfd()
        except CriuctlError:
            self._loop.soon(self._is_gone)
            return
        self._looks = 0
        self._loop.watch(self._fd, READ, self._on_end)

    def close(self) -> None:
        """Stop watching: the root is known to have ended."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _is_gone(self) -> None:
        """Handle a root that ended before it could be watched."""
        if self._identity.init not in _own_children():  # else reaping that one says how
            self._ended(None, None)

    def _on_end(self, events: int) -> None:
        """Handle the end of the root; the kernel may report how one ended that is no child."""
        reap(self._reaped)
        if self._fd < 0:
            return
        init = self._identity.init
        if init in _own_children():
            self._loop.unwatch(self._fd)  # reaping that one will say how
            self._tree.end_with_root(init)
            return
        code, number = _exit_by_pidfd(self._fd)
        if code is None and self._looks < _MAX_LOOKS:
            # Its parent has not reaped it yet, and the kernel says nothing before that.
            self._looks += 1
            self._loop.unwatch(self._fd)
            self._loop.after(_LOOK_PAUSE, lambda: self._on_end(0))
        else:
            self._ended(code, number)


def _own_children() -> list[int]:
    try:
        return children(os.getpid())
    except CriuctlError:
        return []


def _exit_by_pidfd(fd: int) -> tuple[int | None, int | None]:
    """Return how the process behind a pidfd ended; (None, None) if the kernel does not say.

    It does since Linux 6.15, once the process has been reaped.
    """
    buffer = bytearray(struct.pack("=Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None, None
    if not struct.unpack_from("=Q", buffer)[0] & _PIDFD_INFO_EXIT:
        return None, None
    return exit_code(struct.unpack_from("=i", buffer, 60)[0])
