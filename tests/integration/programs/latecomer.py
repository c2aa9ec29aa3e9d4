"""Connects to itself when it is first asked, and talks over that connection each time:
``latecomer.py FOLDER``.
"""

from __future__ import annotations

import socket

from animal import Check, serve

listening = socket.create_server(("127.0.0.1", 0))
ends: list[socket.socket] = []
words = 0


def check(found: Check) -> None:
    """A word goes one way at once, and the word before it has waited in the queue since the last
    time.
    """
    global words
    if not ends:
        ends.append(socket.create_connection(listening.getsockname()))
        ends.append(listening.accept()[0])
    else:
        found.equal("word", ends[1].recv(64), b"word %d" % words)
    words += 1
    ends[0].sendall(b"word %d" % words)
    found.facts["words"] = words


serve(check)
