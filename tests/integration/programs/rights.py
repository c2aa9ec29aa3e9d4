"""Descriptors in flight: a file, a pipe, and the other end of a socket, sent over a unix socket and
not received yet.
"""

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
    kept, away = socket.socketpair()
    kept.send(b"in a socket in a socket")
    socket.send_fds(ours, [b"three"], [file.fileno(), pipe_read, away.fileno()])
os.close(pipe_read)
away.close()
left = True


def check(found: Check) -> None:
    global left
    if not left:
        return
    left = False
    message, fds, _, _ = socket.recv_fds(theirs, 64, 4)
    found.equal("message", (message, len(fds)), (b"three", 3))
    found.equal("file", os.read(fds[0], 64), b"456789")
    found.equal("pipe", os.read(fds[1], 64), b"in a pipe in a socket")
    found.equal("socket", os.read(fds[2], 64), b"in a socket in a socket")
    os.write(fds[2], b"answer")
    found.equal("its other end", kept.recv(64), b"answer")


serve(check)
