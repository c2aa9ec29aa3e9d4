"""Ports that are blocked by closed connections of the tree itself.

When a server closes a connection first, the kernel keeps it for a minute (FIN_WAIT2 until its
client closes it, too, then TIME_WAIT), and if the server had not set SO_REUSEADDR, no process can
bind to the port meanwhile, whatever options it sets: the tree's listener would not come back.  No
process has such a socket open any more, so it is destroyed.

One whose data a peer has not acknowledged yet (FIN_WAIT1, LAST_ACK) is not: that data would be
lost.  The acknowledgement is waited for briefly.
"""

from __future__ import annotations

import errno
import functools
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from ..checkpoint.connection_record import ConnectionRecord, endpoint
from ..criu.images import ImageSet
from ..proc import sockdiag
from ..proc.namespace_sockets import socket_inside

_PATIENCE, _PAUSE = 2.0, 0.05  # seconds for peers to acknowledge: a few round trips


def free_ports(
    records: Iterable[ConnectionRecord], images: ImageSet, namespace: int | None
) -> None:
    """Free the ports of the TCP listeners among `records`, in the net namespace of that descriptor
    (None: criuctl's).
    """
    listeners = [r for r in records if r.protocol == "tcp" and r.waits]
    only6 = _only6(images) if any(r.family == "inet6" for r in listeners) else set()
    deadline = time.monotonic() + _PATIENCE
    for local, v6only in {(r.local, r.inode in only6) for r in listeners}:
        while is_taken(local, socket.SOCK_STREAM, namespace, v6only=v6only):
            coming = False
            # an older kernel: CRIU will be refused, and the reason is reported
            with suppress(OSError):
                coming = sockdiag.end_waits(*endpoint(local), namespace, v6only=v6only)
            if not coming or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)


def free_pairs(records: Iterable[ConnectionRecord], namespace: int | None) -> None:
    """Destroy what is left of these TCP connections, whose both ends are restored: no process has
    them open any more, and none can have a connection with the same addresses before they are gone.
    """
    pairs = {(r.local, r.peer) for r in records if r.protocol == "tcp"}
    if pairs:
        with suppress(OSError):  # an older kernel: CRIU will be refused, and the reason is reported
            sockdiag.end_pairs(pairs, namespace)


def _only6(images: ImageSet) -> set[int]:
    """Return the inodes of the sockets that leave IPv4 to others."""
    return {entry.isk.ino for entry in images.files() if entry.HasField("isk") and entry.isk.v6only}


def is_taken(
    local: str, kind: socket.SocketKind, namespace: int | None = None, *, v6only: bool
) -> bool:
    """Return whether a socket (IPv6 only if `v6only`) cannot be bound as CRIU binds it: the port is
    not shared.
    """
    host, port = endpoint(local)
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(socket.AF_INET6 if ":" in host else socket.AF_INET, kind, 0) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if probe.family == socket.AF_INET6 and v6only:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
