"""The socket over which a restore by CRIU gives its tasks' userfaultfds to ``criu lazy-pages``, or
to a program that does its work.

CRIU connects once, and sends for each task its PID, as the images have it, and then a descriptor;
for one that has ended the negative PID alone. Last of all comes a word that everything is restored.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from ..errors import RestoreFailed
from .driver import folder_path

SOCKET_NAME = "lazy-pages.socket"  # CRIU's name, in its work folder
_PID = struct.Struct("=i")


def listen(folder: int) -> socket.socket:
    """Return a socket that a restore from the images in `folder` connects to."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"{folder_path(folder)}/{SOCKET_NAME}")
        listening.listen(1)
    except BaseException:
        listening.close()
        raise
    return listening


class Received:
    """What one restore has sent on its connection; never waits."""

    def __init__(self, connection: socket.socket, tasks: int) -> None:
        """`tasks`: of the images."""
        connection.setblocking(False)
        self._connection, self._left = connection, tasks
        self._pid: int | None = None  # the descriptor that comes next is this one's

    def over(self) -> bool:
        """Return whether CRIU has closed the connection, which fails a restore if we do it."""
        if self._left:
            return False
        try:
            return not self._connection.recv(_PID.size)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield (PID, userfaultfd) of the tasks that have come; raise `RestoreFailed`."""
        while self._left:
            try:
                if self._pid is None:
                    data = self._connection.recv(_PID.size)
                    if len(data) != _PID.size:
                        raise RestoreFailed("CRIU has broken off its restore")
                    (self._pid,) = _PID.unpack(data)
                if self._pid >= 0:
                    _data, fds, _flags, _address = socket.recv_fds(self._connection, 1, 1)
                    if not fds:
                        raise RestoreFailed(f"CRIU sends no userfaultfd of PID {self._pid}")
                    os.set_inheritable(fds[0], False)
                    yield self._pid, fds[0]
            except BlockingIOError:
                return
            self._pid = None
            self._left -= 1
