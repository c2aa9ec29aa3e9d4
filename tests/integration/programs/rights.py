"""Descriptors in flight: a file and a pipe sent over a unix socket and not received yet."""

from __future__ import annotations

import os
import socket

from animal import Check, path, serve

ours, theirs = socket.socketpair()
with open(path("sent"), "w+b") as file:
    file.write(b"0123456789")
    file.flush()
    file.seek(4)
    pipe_read, pipe_write = os.pipe()
    os.write(pipe_write, b"in a pipe in a socket")
    socket.send_fds(ours, [b"two"], [file.fileno(), pipe_read])
os.close(pipe_read)
left = True


def check(found: Check) -> None:
    global left
    if not left:
        return
    left = False
    message, fds, _, _ = socket.recv_fds(theirs, 64, 4)
    found.equal("message", (message, len(fds)), (b"two", 2))
    found.equal("file", os.read(fds[0], 64), b"456789")
    found.equal("pipe", os.read(fds[1], 64), b"in a pipe in a socket")


serve(check)
