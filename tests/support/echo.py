"""A server outside the tree that can go away and come back: it sends every message back, on any
kind of socket.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

from .keeper import wait_until

TYPES = {
    "tcp": socket.SOCK_STREAM,
    "udp": socket.SOCK_DGRAM,
    "unix": socket.SOCK_STREAM,
    "seqpacket": socket.SOCK_SEQPACKET,
    "unix-dgram": socket.SOCK_DGRAM,
}


class Echo:
    """Answers on `address`, which stays the same when it is stopped and started again."""

    def __init__(
        self,
        kind: str,
        address: str = "127.0.0.1:0",
        make: Callable[[int, int, int], socket.socket] = socket.socket,
    ) -> None:
        self.kind = kind
        self.make = make  # may be one that makes it in another net namespace
        self.address = address
        self.heard: list[bytes] = []
        self.accepted = 0  # since the last start
        self.connected: dict[int, socket.socket] = {}
        self.start()

    def start(self) -> None:
        """Serve (again)."""
        self.accepted = 0
        self.listener = self._listener()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _listener(self) -> socket.socket:
        if self.kind in ("tcp", "udp"):
            host, port = self.address.rsplit(":", 1)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = self.make(family, TYPES[self.kind], 0)
            if self.kind == "tcp":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host.strip("[]"), int(port)))
            self.address = f"{host}:{made.getsockname()[1]}"
        else:
            made = socket.socket(socket.AF_UNIX, TYPES[self.kind])
            if os.path.exists(self.address):
                os.unlink(self.address)
            made.bind(self.address)
        if made.type != socket.SOCK_DGRAM:
            made.listen(1024)
        return made

    def _serve(self) -> None:
        poller = select.epoll()
        poller.register(self._stop, select.EPOLLIN)
        poller.register(self.listener, select.EPOLLIN)
        with poller:
            while True:
                for fd, _events in poller.poll():
                    if fd == self._stop:
                        return
                    if fd != self.listener.fileno():
                        self._answer(poller, fd)
                    elif self.listener.type == socket.SOCK_DGRAM:
                        data, sender = self.listener.recvfrom(4096)
                        self.heard.append(data)
                        self.listener.sendto(data, sender)
                    else:
                        connection = self.listener.accept()[0]
                        self.connected[connection.fileno()] = connection
                        self.accepted += 1
                        poller.register(connection, select.EPOLLIN)

    def _answer(self, poller: select.epoll, fd: int) -> None:
        connection = self.connected[fd]
        try:
            data = connection.recv(4096)
            if data:
                self.heard.append(data)
                connection.sendall(data)
                return
        except OSError:
            pass
        poller.unregister(fd)
        del self.connected[fd]
        connection.close()

    def stop(self) -> None:
        """Be gone, with all connections; the name of a unix socket goes too."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self.listener.close()
        for connection in self.connected.values():
            connection.close()
        self.connected.clear()
        if self.kind not in ("tcp", "udp") and os.path.exists(self.address):
            os.unlink(self.address)

    def later(self, begun: Callable[[], bool]) -> threading.Thread:
        """Come back as soon as `begun`; a thread to join."""

        def wait() -> None:
            wait_until(begun, 60, "the time to come back")
            self.start()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread
