"""A real redis-server: own folder, free port, unix socket, what it acknowledged is on disk; can be
stopped and started again.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .common import Daemon, free_ports, need

_CONFIG = """
bind 127.0.0.1 -::1
port {port}
unixsocket {folder}/redis.sock
unixsocketperm 700
dir {folder}
appendonly yes
appendfsync always
save ""
"""


@dataclass
class RedisServer:
    """Where a server is, and its life."""

    folder: Path
    port: int
    extra: Sequence[str] = ()  # lines of configuration
    daemon: Daemon | None = None
    clients: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def path(self) -> str:
        """Its unix socket."""
        return str(self.folder / "redis.sock")

    def start(self, *extra: str) -> None:
        """Start (again) on the same port and data; `extra` are lines of configuration that stay."""
        self.extra = (*self.extra, *extra)
        config = self.folder / "redis.conf"
        config.write_text(
            _CONFIG.format(port=self.port, folder=self.folder) + "\n".join(self.extra) + "\n"
        )
        self.daemon = Daemon(
            "redis", [need("redis-server", "redis-server"), str(config)], self.folder / "redis.log"
        )
        self.daemon.wait_until(self._answers)

    def stop(self) -> None:
        """End it in order; what was acknowledged is on disk."""
        if self.daemon is not None:
            self.daemon.stop()

    def kill(self) -> None:
        """kill -9."""
        assert self.daemon is not None
        self.daemon.kill()

    def client(self, **options: Any) -> Any:
        """A redis-py client over TCP, closed with the server."""
        import redis

        made = redis.Redis(
            **{
                "host": "127.0.0.1",
                "port": self.port,
                "decode_responses": True,
                "protocol": 2,
                **options,
            }
        )
        self.clients.append(made)
        return made

    def connect(self, family: str = "inet") -> socket.socket:
        """A plain connection over ``inet``, ``inet6`` or ``unix``."""
        if family == "unix":
            made = socket.socket(socket.AF_UNIX)
            made.connect(self.path)
            return made
        made = socket.socket(socket.AF_INET6 if family == "inet6" else socket.AF_INET)
        made.connect(("::1" if family == "inet6" else "127.0.0.1", self.port))
        return made

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.stop()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as asked:
                asked.sendall(b"PING\r\n")
                return asked.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False


@contextmanager
def redis_server(*extra: str) -> Iterator[RedisServer]:
    """A running server with no data; it and its folder are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), free_ports(1)[0], extra)
        try:
            server.start()
            yield server
        finally:
            server.close()
