"""Ends of links for tests: honest ones, and one that is not to be trusted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from criuctl.transport import frames
from criuctl.transport.link import Link

TIMEOUT = 60.0  # seconds for what takes none

Ends = Callable[..., tuple[Link, Link]]
RawEnd = Callable[..., tuple[Link, "Raw"]]


class Raw:
    """The other end of a link, byte by byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT)

    def hello(self, **changed: Any) -> None:
        self.send(
            frames.HELLO,
            0,
            {"protocol": [1, 1], "criuctl": "9.9", "timeout": 60, "window": 8, **changed},
        )

    def send(
        self, kind: int, number: int, said: dict[str, Any] | None = None, body: bytes = b""
    ) -> None:
        self.write(b"".join(frames.encode(kind, number, said, body)))

    def write(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> tuple[int, int, dict[str, Any], bytes]:
        """The next frame that is no ping."""
        while True:
            kind, number, text, body = frames.decode_header(self._exactly(frames.HEADER.size))
            if kind != frames.PING:
                return kind, number, frames.decode_json(self._exactly(text)), self._exactly(body)

    def farewell(self) -> str:
        """The reason for which the other side ended the link; all before it is passed over."""
        while True:
            kind, _, said, _ = self.receive()
            if kind == frames.BYE:
                return str(said["reason"])

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self.sock.recv(length - len(data))
            assert piece, "the other side closed"
            data += piece
        return bytes(data)
