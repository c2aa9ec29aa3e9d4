"""A client of a server outside the tree: ``peer.py FOLDER tcp|unix-dgram|unix-stream ADDRESS``;
reports the fate of its connection.
"""

from __future__ import annotations

import select
import socket
import sys
import time

from animal import Check, serve

kind, address = sys.argv[2:4]
if kind == "tcp":
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"hello\n")
    greeting = connection.recv(64)
elif kind == "unix-stream":
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
else:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connection.connect(address)
    connection.send(b"hello\n")
sent = 0


def check(found: Check) -> None:
    """Send one line and tell how it went: ``echo``, ``eof``, ``reset``, ``timeout`` or an error's
    name.
    """
    global sent
    sent += 1
    began = time.monotonic()
    try:
        connection.send(b"%d\n" % sent)
        outcome = "sent"
        if kind == "tcp":
            readable = select.select([connection], [], [], 30)[0]
            data = connection.recv(64) if readable else None
            outcome = (
                "timeout"
                if data is None
                else "echo"
                if data == b"%d\n" % sent
                else "eof"
                if not data
                else repr(data)
            )
    except OSError as error:
        outcome = type(error).__name__
        if kind == "tcp":
            try:
                outcome += "+eof" if not connection.recv(64) else "+data"
            except OSError as second:
                outcome += f"+{type(second).__name__}"
    found.facts |= {"outcome": outcome, "seconds": time.monotonic() - began}


serve(check)
