"""The total time that one request to an S3 server may take.

A read time-out starts again with every byte, so a server that sends a byte now and then would keep
a request for ever, and with it the tree that is frozen until the answer comes. Therefore each
thread has a `Limit` for the request that it makes, and the sockets that boto3 reads and writes
(`LimitedSocket`, `LimitedTLSSocket`) wait no longer than that. To botocore this is a time-out like
any other.

One attempt may take twice ``s3_timeout``; all attempts of a request, and the pauses between them,
``s3_deadline``. A body adds a second for each 32 KiB: the slowest link on which 1 MiB passes within
the usual time-out of 30 s.

Name resolution is not bounded here; a store that another process serves bounds it
(`boto3_process`).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import Config

SLOWEST = 32 << 10  # bytes a second


def seconds_for(config: Config, size: int = 0) -> float:
    """Return how long one request with contents of `size` bytes may take."""
    return config.s3_deadline + size / SLOWEST


class Limit:
    """The deadlines of one request, and of its present attempt."""

    def __init__(self, config: Config, size: int) -> None:
        self._config = config
        self._size = size
        self._began = self._attempt = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds allowed for the whole request."""
        return seconds_for(self._config, self._size)

    def attempt(self) -> None:
        """Start the time of one more attempt."""
        self._attempt = time.monotonic()

    def expect(self, size: int) -> None:
        """Add the time for a body of `size` bytes."""
        self._size = max(self._size, size)

    def left(self) -> float:
        """Return the seconds that the attempt may still take."""
        attempt = self._attempt + 2 * self._config.s3_timeout + self._size / SLOWEST
        return min(self._began + self.seconds, attempt) - time.monotonic()

    def over(self, pause: float = 0.0) -> bool:
        """Return whether there is no time left after `pause` more seconds."""
        return time.monotonic() + pause >= self._began + self.seconds


_of_thread = threading.local()


@contextmanager
def limited(config: Config, size: int = 0) -> Iterator[Limit]:
    """Limit the requests of this thread inside the block as one, with a body of `size` bytes."""
    before = getattr(_of_thread, "limit", None)
    limit = _of_thread.limit = Limit(config, size)
    try:
        yield limit
    finally:
        _of_thread.limit = before


def expect(size: int) -> None:
    """Add the time for an answer of `size` bytes to the request of this thread."""
    limit: Limit | None = getattr(_of_thread, "limit", None)
    if limit is not None:
        limit.expect(size)


def _left() -> float | None:
    """Return the seconds left to this thread's request, None without a limit.

    `TimeoutError` at 0.
    """
    limit: Limit | None = getattr(_of_thread, "limit", None)
    left = None if limit is None else limit.left()
    if left is not None and left <= 0:
        raise TimeoutError("the request has taken too long in total")
    return left


class _Limited:
    """A socket that waits no longer than the request of the thread that uses it."""

    _usual: float | None = None  # seconds for one call, as set by settimeout

    def settimeout(self, seconds: float | None) -> None:
        self._usual = seconds
        super().settimeout(seconds)  # type: ignore[misc]

    def recv_into(self, *arguments: Any, **named: Any) -> int:
        self._wait_no_longer()
        count: int = super().recv_into(*arguments, **named)  # type: ignore[misc]
        return count

    def send(self, *arguments: Any) -> int:
        self._wait_no_longer()
        count: int = super().send(*arguments)  # type: ignore[misc]
        return count

    def sendall(self, *arguments: Any) -> None:
        self._wait_no_longer()
        super().sendall(*arguments)  # type: ignore[misc]

    def _wait_no_longer(self) -> None:
        left, usual = _left(), self._usual
        shortest = left if usual is None else usual if left is None else min(left, usual)
        super().settimeout(shortest)  # type: ignore[misc]


class LimitedSocket(_Limited, socket.socket):
    """A socket for http."""

    @classmethod
    def of(cls, connected: socket.socket) -> LimitedSocket:
        """Return the same connection with this class."""
        seconds = connected.gettimeout()
        limited_one = cls(fileno=connected.detach())
        limited_one.settimeout(seconds)
        return limited_one


class LimitedTLSSocket(_Limited, ssl.SSLSocket):
    """A socket for https, made by ``SSLContext.sslsocket_class``."""
