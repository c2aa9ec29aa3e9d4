"""TCP connections whose peer had closed its side before the dump.

CRIU lets the restored socket see the peer's FIN again, and the kernel may delay the acknowledgement
until the firewall lock is down.  It then reaches no socket, or a listener, and is answered by a
reset.  So it is sent at once (``TCP_QUICKACK``), while the lock drops it.
"""

from __future__ import annotations

import os
import socket

from ..criu import socketimages
from ..proc.syscalls import borrow_socket
from .base import Repair, RestoredTree


class ClosedPeers(Repair):
    """Sockets in CLOSE_WAIT."""

    loses = "After CRIU 4.2's restore the peer may reset a connection that it had half closed."

    def mend(self, tree: RestoredTree) -> None:
        """Send the acknowledgement of each now."""
        for closed in socketimages.closed_by_peer(tree.images):
            for pid, fd in closed.holders[:1]:
                pidfd = os.pidfd_open(tree.pids[pid])
                try:
                    with borrow_socket(pidfd, fd) as sock:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                finally:
                    os.close(pidfd)
