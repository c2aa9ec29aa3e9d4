"""A server at one address: ``port.py FOLDER ADDRESS``.  Its report tells the port."""

from __future__ import annotations

import socket
import sys

from animal import Check, serve

listening = socket.socket(socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET)
listening.bind((sys.argv[2], 0))
listening.listen()
port = listening.getsockname()[1]
near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(sys.argv[2], sys.argv[2])


def check(found: Check) -> None:
    """A visitor is let in."""
    visitor = socket.create_connection((near, port))
    with listening.accept()[0] as accepted:
        visitor.close()  # first: it is the visitor's port that the kernel remembers
        found.equal("end", accepted.recv(1), b"")
    found.facts["port"] = port


serve(check)
