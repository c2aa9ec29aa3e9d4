"""Connections of a tree to its own server, which has not accepted them yet: ``unaccepted.py
FOLDER``.

Two wait silently, over each family; one has sent something.
"""

from __future__ import annotations

import socket

from animal import Check, serve

listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
address = listening.getsockname()[1]
waiting = [socket.create_connection((host, address)) for host in ("127.0.0.1", "::1")]
sent = socket.create_connection(("127.0.0.1", address))
sent.sendall(b"lost")


def check(found: Check) -> None:
    """Who waited is accepted, in any order, and served; who has sent something sees the end."""
    listening.settimeout(20)
    sent.settimeout(20)
    for one in waiting:
        one.settimeout(20)
        one.sendall(b"%d" % one.family)
    for _ in waiting:
        with listening.accept()[0] as accepted:
            accepted.sendall(b"for " + accepted.recv(64))
    for one in waiting:
        found.equal("answer", one.recv(64), b"for %d" % one.family)
    found.equal("of what was lost", sent.recv(64), b"")


serve(check)
