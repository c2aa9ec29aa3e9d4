"""A server that listens over IPv6 alone, and leaves its port to others over IPv4: ``six.py
FOLDER``.  Its report tells the port.

It has closed a connection first, whose client has not, and has not set SO_REUSEADDR.
"""

from __future__ import annotations

import socket

from animal import Check, serve

listening = socket.socket(socket.AF_INET6)
listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
listening.bind(("::", 0))
listening.listen()
port = listening.getsockname()[1]
slow = socket.create_connection(("::1", port))
listening.accept()[0].close()


def check(found: Check) -> None:
    """A visitor is let in over IPv6."""
    with socket.create_connection(("::1", port)) as visitor:
        listening.accept()[0].close()
        found.equal("end", visitor.recv(1), b"")
    found.facts["port"] = port


serve(check)
