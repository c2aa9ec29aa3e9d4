"""The port for metrics: a thread for each client with a request, and few resources for those
without one.

Any client that reaches the port may connect. A connection has one deadline for its request, and the
oldest waiting ones are closed for new ones (`criuctl.proc.idle_connections`); only a few requests
are answered at the same time. An answer has its own deadline, since the client may not read it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..proc.idle_connections import Waiting

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

MOST, MOST_OF_ONE = 64, 32  # connections that have sent no request yet; each has a thread
ASKED, ASKED_BY_ONE = 8, 4  # requests that are answered at once
# seconds for collecting, which has its own deadline, and for the client to receive the answer
_ANSWER = 30.0


class Port(ThreadingMixIn, WSGIServer):
    """Listens and serves until it is closed."""

    daemon_threads = True
    block_on_close = False  # a client that does not receive its answer must not block
    request_queue_size = 64

    def __init__(
        self,
        address: str,
        port: int,
        app: WSGIApplication,
        waiting: Waiting[socket.socket] | None = None,
    ) -> None:
        """Listen; raise `OSError` when the address cannot be used."""
        self.waiting = waiting if waiting is not None else Waiting(MOST, MOST_OF_ONE)
        self.answered: Waiting[socket.socket] = Waiting(ASKED, ASKED_BY_ONE, _ANSWER)
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, where = found[0][0], found[0][4]
        super().__init__((str(where[0]), int(where[1])), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(
            target=self.serve_forever, name="criuctl-metrics", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without a reverse look-up of this host's name, which may take a long time."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Register a new connection."""
        for other in self.waiting.begin(request, str(client_address[0])):
            _cut(other)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Twice a second: close connections that have taken too long."""
        for connection in (*self.waiting.overdue(), *self.answered.overdue()):
            _cut(connection)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.waiting.end(request)
        self.answered.end(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of the client: it is gone, or was cut off."""

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    server: Port

    def get_environ(self) -> dict[str, Any]:
        """Note that the request's head is complete."""
        self.server.waiting.end(self.connection)
        for other in self.server.answered.begin(self.connection, str(self.client_address[0])):
            _cut(other)
        return super().get_environ()

    def address_string(self) -> str:
        """Return the client's address without a reverse look-up."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing of requests."""


def _cut(connection: socket.socket) -> None:
    """Make the connection's thread see its end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
