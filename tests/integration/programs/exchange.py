"""Two sessions that exchange numbered messages, as fast as they can, in both directions and over
several connections, and check every byte.

    exchange.py serve FOLDER    listens for TCP on a free port (its number in FOLDER/port) and on
                                the unix socket FOLDER/socket, and serves four connections
    exchange.py connect FOLDER  makes two connections of each kind
    exchange.py relay FOLDER    as connect; over one of each kind, for a third member

Each end sends message after message: the connection's number, the message's number, and padding
whose length depends on the number. It reads what the other end sends and expects exactly that. In
phases it does not read, so that the queues are full in both directions. FOLDER/NAME-CONNECTION has
how many messages were sent and received; a message that is lost, doubled or damaged, and an end of
a connection, is written to FOLDER/failed.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path

HEAD = struct.Struct("=QII")  # message, connection, bytes of padding
SILENT, WHOLE = 40, 60  # of WHOLE rounds of the loop, so many without reading


def padding(number: int) -> int:
    """The length of the padding of a message: from nothing to a few thousand bytes."""
    return number * 2654435761 % 4093


def message(connection: int, number: int) -> bytes:
    size = padding(number)
    return HEAD.pack(number, connection, size) + bytes([number % 251]) * size


class End:
    """One end of one connection."""

    def __init__(self, sock: socket.socket, connection: int, counts: mmap.mmap) -> None:
        self.sock, self.connection, self.counts = sock, connection, counts
        self.sent = self.received = 0
        self.out, self.into = b"", b""
        sock.setblocking(False)

    def send(self) -> None:
        while True:
            if not self.out:
                self.out = message(self.connection, self.sent)
                self.sent += 1
            try:
                self.out = self.out[self.sock.send(self.out) :]
            except BlockingIOError:
                return
            if self.out:
                return

    def receive(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise RuntimeError(f"connection {self.connection} has ended")
        self.into += data
        while len(self.into) >= HEAD.size:
            number, connection, size = HEAD.unpack_from(self.into)
            expected = message(self.connection, self.received)
            if (number, connection, size) != (
                self.received,
                self.connection,
                padding(self.received),
            ):
                raise RuntimeError(
                    f"connection {self.connection}: message {number} of {connection}, "
                    f"{self.received} was to come"
                )
            if len(self.into) < len(expected):
                return
            if self.into[: len(expected)] != expected:
                raise RuntimeError(f"connection {connection}: message {number} is damaged")
            self.into = self.into[len(expected) :]
            self.received += 1

    def count(self) -> None:
        struct.pack_into("=QQ", self.counts, self.connection * 16, self.sent, self.received)


def opened(folder: Path, role: str) -> list[socket.socket]:
    if role == "serve":
        tcp = socket.create_server(("127.0.0.1", 0), backlog=8)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(folder / "socket"))
        unix.listen(8)
        (folder / "port.new").write_text(str(tcp.getsockname()[1]))
        (folder / "port.new").rename(folder / "port")
        return [tcp.accept()[0], tcp.accept()[0], unix.accept()[0], unix.accept()[0]]
    while not (folder / "port").exists():
        time.sleep(0.01)
    port = int((folder / "port").read_text())
    found = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    for _ in range(2):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(folder / "socket"))
        found.append(sock)
    return found


def main(role: str, folder: Path) -> None:
    sockets = opened(folder, role)
    file = os.open(folder / f"counts-{role}", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, 4096)
    counts = mmap.mmap(-1, 4096)
    ends: list[End] = []
    for sock in sockets:  # its client names it, as accepts have no order
        if role == "serve":
            number = sock.recv(1)[0]
        else:
            number = len(ends)
            sock.sendall(bytes([number]))
        ends.append(End(sock, number, counts))
    print("exchanging", flush=True)
    poller = select.epoll()
    by_fd = {end.sock.fileno(): end for end in ends}
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN | select.EPOLLOUT)
    rounds = 0
    while True:
        rounds += 1
        reading = rounds % WHOLE >= SILENT
        for fd, event in poller.poll(0.005):
            if event & select.EPOLLOUT:
                by_fd[fd].send()
            if reading and event & (select.EPOLLIN | select.EPOLLHUP):
                by_fd[fd].receive()
        if not reading:
            time.sleep(0.002)
        for end in ends:
            end.count()
        os.pwrite(file, counts[:], 0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except BaseException as error:
        Path(sys.argv[2], "failed").write_text(f"{sys.argv[1]}: {error!r}\n")
        raise
