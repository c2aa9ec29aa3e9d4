"""Servers without SO_REUSEADDR that close first, each time it is asked: ``brusque.py FOLDER``.

The kernel keeps their ports from everybody for a minute after that (TIME_WAIT), or until a visitor
who takes his time closes his end, too (FIN_WAIT2).
"""

from __future__ import annotations

import socket

from animal import Check, serve

plain, both = socket.socket(), socket.socket(socket.AF_INET6)
plain.bind(("127.0.0.1", 0))
both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
both.bind(("::", 0))
for listening in (plain, both):
    listening.listen()
slow = []
for listening in (plain, both):
    slow.append(socket.create_connection(("127.0.0.1", listening.getsockname()[1])))
    with listening.accept()[0] as accepted:
        accepted.sendall(b"that was it")


def check(found: Check) -> None:
    """A visitor is sent away over each family; what was sent to the slow ones is still there to be
    read.
    """
    for visitor in slow:
        found.equal("last words", visitor.recv(64, socket.MSG_PEEK), b"that was it")
    for listening, host in ((plain, "127.0.0.1"), (both, "127.0.0.1"), (both, "::1")):
        with socket.create_connection((host, listening.getsockname()[1])) as visitor:
            listening.accept()[0].close()
            found.equal(f"end over {host}", visitor.recv(1), b"")


serve(check)
