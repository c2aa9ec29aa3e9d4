"""Socket pairs: a child with a lower PID has one end, and its parent still has both."""

from __future__ import annotations

import os
import socket

from animal import Check, fork_below, serve

KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)

pairs = [(end, socket.socketpair(socket.AF_UNIX, kind)) for kind in KINDS for end in (0, 1)]
for end, pair in pairs:
    pair[1 - end].send(b"queued")
control, tell = os.pipe()
child = fork_below()
if not child:
    os.close(tell)
    for end, pair in pairs:
        pair[1 - end].close()
    while os.read(control, 1):
        for end, pair in pairs:
            pair[end].send(pair[end].recv(64).upper())
    os._exit(0)


def check(found: Check) -> None:
    found.true("the child's PID is lower", child < os.getpid())
    os.write(tell, b"x")
    for end, pair in pairs:
        found.equal("answer", pair[1 - end].recv(64), b"QUEUED")
    for end, pair in pairs:
        pair[1 - end].send(b"queued")


serve(check)
