"""A server of this machine, offered on a host's address: so a server of the whole test run stands
in a lab of one test.

What reaches the host's address crosses the bridge, and is cut and slowed down with it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import partial
from types import TracebackType

from .host import Host

_PIECE = 1 << 16


class Relay:
    """Takes connections on a port of `host` to the same port of 127.0.0.1 of this machine."""

    def __init__(self, host: Host, port: int) -> None:
        self.address = f"{host.address}:{port}"
        self._port = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = host.open_socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host.address, port))
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed: the relay is over
            try:
                server = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            ends = threading.Barrier(2, partial(self._forget, client, server))
            with self._lock:
                self._open |= {client, server}
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(one, other, ends), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, ends: threading.Barrier) -> None:
        """One direction, until its end; the last of the two directions closes both sockets."""
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        ends.wait()

    def _forget(self, *pair: socket.socket) -> None:
        with self._lock:
            self._open -= set(pair)
        for sock in pair:
            sock.close()
