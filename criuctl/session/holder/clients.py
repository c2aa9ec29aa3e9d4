"""The clients of a holder: its listening socket, and their connections in the event loop.

A client must be root or the holder's own user.  What a client sends is handed to `on_request`; the
end of its connection, whatever the reason, to `on_lost`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ... import __version__
from .. import names, protocol
from .connection import Connection
from .event_loop import HANGUP, READ, WRITE, Loop
from .operators import Operator
from .output_log import OutputLog

_MAX_CONNECTIONS = 256
_ACCEPT_PAUSE = 0.2  # seconds until a client is taken again after one could not be


class Clients:
    """The clients of one holder."""

    def __init__(self, loop: Loop, log: OutputLog) -> None:
        self._loop, self._log = loop, log
        self.connections: dict[int, Connection] = {}  # by descriptor
        self.listener: socket.socket | None = None
        self.on_request: Callable[[Connection], None] = lambda connection: None
        self.on_lost: Callable[[Connection, str], None] = lambda connection, why: None

    def all(self) -> list[Connection]:
        """Return the connections of now; some may be lost while the caller looks at the others."""
        return list(self.connections.values())

    def restorer_is_here(self) -> bool:
        """Return whether the restore that is to bring the tree is connected."""
        return any(restores(connection) for connection in self.connections.values())

    def pump_output(self) -> None:
        """Send new output to the clients that are attached."""
        for connection in self.all():
            if connection.position is not None and not connection.blocked and not connection.dead:
                connection.pump()

    def close(self, why: str) -> None:
        """Send what each socket takes, and cut the connections off."""
        for connection in self.all():
            connection.closing = True
            connection.pump()
            connection.close(why)

    # -- the socket -------------------------------------------------------------------------------

    def listen(self, path: Path) -> None:
        """Listen on a new socket at `path`, which only root and the holder's user can connect
        to.
        """
        path.unlink(missing_ok=True)
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        listener = socket.socket(socket.AF_UNIX, kind)
        before = os.umask(0o177)
        try:
            with names.socket_address(path) as address:
                listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(64)
        self.take_listener(listener)

    def take_listener(self, listener: socket.socket) -> None:
        """Accept clients from a socket that listens already."""
        self.listener = listener
        self._loop.watch(listener.fileno(), READ, self._on_accept)

    def _on_accept(self, events: int) -> None:
        assert self.listener is not None
        try:
            sock, _ = self.listener.accept()
        except BlockingIOError:
            return  # gone again
        except OSError:
            # No descriptors left.  The clients that are here go on; the socket, which stays
            # readable, is not polled for a while.
            self._loop.unwatch(self.listener.fileno())
            self._loop.after(_ACCEPT_PAUSE, partial(self.take_listener, self.listener))
            return
        pid, uid = _peer(sock)
        if uid not in (0, os.getuid()) or len(self.connections) >= _MAX_CONNECTIONS:
            sock.close()
            return
        connection = self.add(sock, pid)
        connection.out += protocol.preface(f"criuctl-holder/{__version__}")
        connection.pump()

    # -- connections ------------------------------------------------------------------------------

    def add(self, sock: socket.socket, pid: int) -> Connection:
        """Serve a client, a new one or one from before a re-exec."""
        connection = Connection(sock, self._log, pid, self._on_closed, self._want)
        connection.uid = _peer(sock)[1]
        self.connections[sock.fileno()] = connection
        self._want(connection)
        return connection

    def _want(self, connection: Connection) -> None:
        events = (READ if connection.reading else 0) | (WRITE if connection.blocked else 0)
        if events != connection.interest:
            connection.interest = events
            fd = connection.sock.fileno()
            self._loop.watch(fd, events, lambda got: self._on_ready(connection, got))

    def _on_ready(self, connection: Connection, events: int) -> None:
        if events & HANGUP and not events & READ:
            # Its last requests are not read as long as it does not take its answers.
            connection.close("closed")
        elif events & WRITE:
            connection.blocked = False
            connection.pump()
        if events & READ and not connection.dead and connection.receive():
            self.on_request(connection)

    def _on_closed(self, connection: Connection, why: str) -> None:
        fd = connection.sock.fileno()
        self._loop.unwatch(fd)
        self.connections.pop(fd, None)
        self.on_lost(connection, why)

    # -- re-exec ----------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """Return the descriptors that the next program needs."""
        assert self.listener is not None
        return [*self.connections, self.listener.fileno()]

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "listener": self.listener.fileno() if self.listener is not None else -1,
            "connections": [connection.to_state() for connection in self.connections.values()],
        }

    def restore(self, state: dict[str, Any], operators: dict[str, Operator]) -> None:
        """Take over what `to_state` returned."""
        for values in state["connections"]:
            os.set_inheritable(values["fd"], False)
            connection = self.add(socket.socket(fileno=values["fd"]), values["pid"])
            connection.restore(values, operators)
            self._loop.soon(connection.pump)
            self._loop.soon(partial(self.on_request, connection))
        os.set_inheritable(state["listener"], False)
        self.take_listener(socket.socket(fileno=state["listener"]))


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Return PID and user of the process at the other end, as they were when it connected."""
    pid, uid, _gid = struct.unpack(
        "iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, uid


def restores(connection: Connection) -> bool:
    """Return whether this client is the restore that brings the tree."""
    return connection.operator is not None and connection.operator.name == protocol.RESTORES
