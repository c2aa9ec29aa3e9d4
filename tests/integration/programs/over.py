"""TCP connections that are over, with something left to read; nothing else of this program knows
the network.
"""

from __future__ import annotations

import socket

from animal import Check, serve

with socket.create_server(("127.0.0.1", 0)) as listening:
    near = socket.create_connection(listening.getsockname())
    far = listening.accept()[0]
near.sendall(b"last words")
near.shutdown(socket.SHUT_WR)
far.shutdown(socket.SHUT_WR)
unread = b"last words"


def check(found: Check) -> None:
    global unread
    found.equal("what was left", far.recv(64), unread)
    unread = b""
    found.equal("the end", (far.recv(64), near.recv(64)), (b"", b""))
    for end in (near, far):
        try:
            end.send(b"more", socket.MSG_NOSIGNAL)
            found.true("nothing can be sent", False)
        except OSError:
            pass


serve(check)
