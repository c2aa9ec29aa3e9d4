"""The port at which metrics are served: a thread for each client that has asked, and little for
those that have not.

Whoever reaches the port may connect.  A connection has one deadline for its request, and room is
made for new ones at the expense of the oldest (`criuctl.proc.idle_connections`); of those that have
asked only a few are answered at the same time.  An answer has a deadline of its own, since the one
who asks may not read it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..proc.idle_connections import Waiting

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

MOST, MOST_OF_ONE = 64, 32  # connections that have not asked yet; each has a thread
ASKED, ASKED_BY_ONE = 8, 4  # requests that are answered at once
# seconds for looking, which has a deadline of its own, and for the client to take the answer
_ANSWER = 30.0


class Port(ThreadingMixIn, WSGIServer):
    """Listens and serves until it is closed."""

    daemon_threads = True
    block_on_close = False  # a client that takes no answer holds nobody up
    request_queue_size = 64

    def __init__(
        self,
        address: str,
        port: int,
        app: WSGIApplication,
        waiting: Waiting[socket.socket] | None = None,
    ) -> None:
        """`OSError` when the address cannot be listened at."""
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
        """Bind, without asking the name service for our own name, which it may not know for a long
        time.
        """
        from socketserver import TCPServer

        TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection was made."""
        for other in self.waiting.begin(request, str(client_address[0])):
            _cut(other)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Twice a second: cut off what has taken too long."""
        for connection in (*self.waiting.overdue(), *self.answered.overdue()):
            _cut(connection)

    def shutdown_request(self, request: Any) -> None:
        """A connection is over."""
        self.waiting.end(request)
        self.answered.end(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What went wrong is the client's: it is gone, or was cut off."""

    def close(self) -> None:
        """Serve nobody any more."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    server: Port

    def get_environ(self) -> dict[str, Any]:
        """The request's head has come whole."""
        self.server.waiting.end(self.connection)
        for other in self.server.answered.begin(self.connection, str(self.client_address[0])):
            _cut(other)
        return super().get_environ()

    def address_string(self) -> str:
        """The client's address; nobody is asked for its name."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged of requests."""


def _cut(connection: socket.socket) -> None:
    """Have its thread meet the connection's end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
