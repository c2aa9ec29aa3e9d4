"""Ports that connections of the tree's own past keep from it.

When a server closes a connection first, the kernel remembers it for a minute (FIN_WAIT2 until its client closes it, too, then
TIME_WAIT), and where the server had not set SO_REUSEADDR, nobody can bind to the port meanwhile, whatever he sets himself: the
tree's listener would not come back.  Nobody has such a socket open any more, so the memory is given up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

from ..checkpoint.manifest import ConnectionRecord
from ..connections.rules import endpoint
from ..proc import sockdiag
from .plan import is_taken


def free_ports(records: Iterable[ConnectionRecord], namespace: int | None) -> None:
    """Free the ports of the TCP listeners among `records`, in the net namespace of that descriptor (None: ours)."""
    for local in {r.local for r in records if r.protocol == "tcp" and r.waits}:
        if is_taken(local, socket.SOCK_STREAM, namespace):
            with suppress(OSError):  # an older kernel: CRIU will be refused, and the reason is told
                sockdiag.end_waits(*endpoint(local), namespace)
