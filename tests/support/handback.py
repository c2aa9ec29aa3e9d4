"""Handing a connection back without CRIU: the socket behind a client's descriptor is exchanged
under its hands.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from msgspec import structs

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.protocols.base import ApplicationProtocol, Settings

SECONDS = 30.0


class Handback:
    """One connection of a client library in this process, and the protocol that looks after it."""

    def __init__(
        self,
        protocol: ApplicationProtocol,
        fd: int,
        settings: Settings | None = None,
        **record: Any,
    ) -> None:
        self.protocol = protocol
        self.fd = fd
        self.settings = settings or Settings()
        with self.borrow() as sock:
            self.family, self.address = sock.family, sock.getpeername()
        self.record = ConnectionRecord(
            **{"pid": os.getpid(), "fd": fd, "peer": "the server", **record}
        )

    def borrow(self) -> socket.socket:
        """A duplicate, as pidfd_getfd gives one; the file status flags stay what they are."""
        return socket.socket(fileno=os.dup(self.fd))

    def inspect(self, seconds: float = SECONDS) -> dict[str, Any]:
        """What the session holds; kept for `reconnect`.  Nothing of an answer may be left for the
        client.
        """
        with self.borrow() as sock:
            flags = os.get_blocking(self.fd)
            state = self.protocol.inspect(
                sock, self.record, self.settings, time.monotonic() + seconds
            )
            assert os.get_blocking(self.fd) == flags
        self.record = structs.replace(self.record, session=state)
        return state

    def cut(self) -> None:
        """What a dump does to the connection: the peer sees its end, the descriptor holds a socket
        that is not connected.
        """
        with self.borrow() as old, socket.socket(self.family) as new:
            old.shutdown(socket.SHUT_RDWR)
            new.setblocking(os.get_blocking(self.fd))
            os.dup2(new.fileno(), self.fd)

    def reconnect(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Connect the descriptor's socket again and have the session set up."""
        blocking = os.get_blocking(self.fd)
        with self.borrow() as sock:
            os.set_blocking(self.fd, True)
            sock.settimeout(None)
            sock.connect(self.address)
            os.set_blocking(self.fd, blocking)
            facts = self.protocol.reconnect(
                sock, self.record, self.settings, time.monotonic() + seconds
            )
            assert os.get_blocking(self.fd) == blocking
        return facts

    def round(self) -> dict[str, Any]:
        """There and back; what the report would say."""
        self.inspect()
        self.cut()
        return self.reconnect()
