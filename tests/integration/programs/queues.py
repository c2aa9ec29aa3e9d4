"""Bytes that are nowhere but in the kernel: pipes, a FIFO, and socket pairs of all types, each
partly filled.
"""

from __future__ import annotations

import fcntl
import os
import socket

from animal import Check, path, pattern, serve

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032


def drain(fd: int) -> bytes:
    """Everything that is in the pipe now."""
    os.set_blocking(fd, False)
    data = b""
    try:
        while block := os.read(fd, 1 << 16):
            data += block
    except BlockingIOError:
        pass
    return data


few_read, few_write = os.pipe()
os.write(few_write, b"half a line")
full_read, full_write = os.pipe()
os.set_blocking(full_write, False)
full = pattern(65536, 2)
os.write(full_write, full)
large_read, large_write = os.pipe()
fcntl.fcntl(large_write, F_SETPIPE_SZ, 1 << 20)
large = pattern(900_000, 3)
os.write(large_write, large)
closed_read, closed_write = os.pipe()
os.write(closed_write, b"the last words of a writer that is gone")
os.close(closed_write)

os.mkfifo(path("fifo"))
fifo_read = os.open(path("fifo"), os.O_RDONLY | os.O_NONBLOCK)
fifo_write = os.open(path("fifo"), os.O_WRONLY)
os.write(fifo_write, b"through a name")

pairs = {
    kind: socket.socketpair(socket.AF_UNIX, kind)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
}
stream = pattern(100_000, 4)
pairs[socket.SOCK_STREAM][0].send(stream)
pairs[socket.SOCK_STREAM][1].send(b"and back")
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for message in (b"first", b"second", b"x" * 5000):
        pairs[kind][0].send(message)
half = socket.socketpair()
half[0].send(b"then no more")
half[0].shutdown(socket.SHUT_WR)
alone = socket.socketpair()
alone[0].send(b"my peer is gone")
alone[0].close()
duplicate = os.dup(few_read)
left = True


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (block := sock.recv(size - len(data))):
        data += block
    return data


def check(found: Check) -> None:
    global left
    found.equal("size of the large pipe", fcntl.fcntl(large_write, F_GETPIPE_SZ), 1 << 20)
    if left:
        left = False
        found.equal("pipe", os.read(duplicate, 4) + drain(few_read), b"half a line")
        found.equal("full pipe", drain(full_read), full)
        found.equal("large pipe", drain(large_read), large)
        found.equal(
            "pipe without a writer",
            os.read(closed_read, 4096),
            b"the last words of a writer that is gone",
        )
        found.equal("fifo", drain(fifo_read), b"through a name")
        found.equal("stream", receive(pairs[socket.SOCK_STREAM][1], len(stream)), stream)
        found.equal("stream, back", receive(pairs[socket.SOCK_STREAM][0], 8), b"and back")
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            found.equal(
                kind.name,
                [pairs[kind][1].recv(8192) for _ in range(3)],
                [b"first", b"second", b"x" * 5000],
            )
        found.equal("half-closed stream", half[1].recv(4096), b"then no more")
        found.equal("socket without a peer", alone[1].recv(4096), b"my peer is gone")
    found.equal(
        "nothing comes twice",
        (drain(full_read), drain(few_read), drain(large_read), drain(fifo_read)),
        (b"",) * 4,
    )
    found.equal(
        "ends of file", (os.read(closed_read, 1), half[1].recv(1), alone[1].recv(1)), (b"",) * 3
    )
    for first, second in pairs.values():
        first.send(b"again")
        found.equal(f"{first.type.name} goes on", second.recv(64), b"again")


serve(check)
