"""Reading and writing bytes on a borrowed socket, for every protocol here.

The socket is a duplicate of the program's own, so `Wire` does not change its file status flags
(O_NONBLOCK belongs to the open file, which the program shares): each call passes MSG_DONTWAIT and
waits with poll, until a deadline. It keeps no buffer: a byte that was not requested stays in the
socket's queue, where the program finds it. Lines are found by peeking. All errors are `PeerAway`:
another try on a new connection may help; a caller that knows better raises another error.
"""

from __future__ import annotations

import array
import fcntl
import select
import socket
import struct
import termios
import time

from .base import PeerAway

_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_PEEK = 1 << 16
_TCP_INFO = 160  # bytes of struct tcp_info that are read
# A bound on every answer that a protocol here requests; a peer that claims more is broken or
# hostile.
LARGEST = 64 << 20
# A bound on all answers of one conversation together, since they are kept: a peer may send
# endlessly.
MOST = 4 * LARGEST


class Wire:
    """One conversation on a borrowed, connected stream socket; `deadline` is of
    `time.monotonic`.
    """

    def __init__(self, sock: socket.socket, deadline: float, peer: str = "the peer") -> None:
        self.sock = sock
        self.deadline = deadline
        self.peer = peer
        self._taken = 0  # bytes received

    def send(self, data: bytes) -> None:
        """Pass all of `data` to the kernel."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.sock.send(left, _NOW) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise self._lost(error) from error

    def receive(self, size: int) -> bytes:
        """Return exactly `size` bytes."""
        if size > LARGEST:
            raise PeerAway(f"{self.peer} announces {size} bytes, more than any sane answer has")
        self._taken += size
        if self._taken > MOST:
            raise PeerAway(f"{self.peer} says more than any sane peer does")
        found = bytearray()
        while len(found) < size:
            piece = self._receive(min(size - len(found), 1 << 20))
            if not piece:
                raise PeerAway(f"{self.peer} closed the connection")
            found += piece
        return bytes(found)

    def line(self, end: bytes = b"\n", limit: int = 1 << 16) -> bytes:
        """Return the bytes up to and including `end`; later bytes stay in the queue. At most
        `limit` bytes.
        """
        found = bytearray()
        while len(found) < limit:
            seen = self._receive(min(_PEEK, limit - len(found)), socket.MSG_PEEK)
            if not seen:
                raise PeerAway(f"{self.peer} closed the connection")
            before = max(0, len(found) - len(end) + 1)
            at = (bytes(found[before:]) + seen).find(end)
            take = len(seen) if at < 0 else before + at + len(end) - len(found)
            found += self.receive(take)
            if at >= 0:
                return bytes(found)
        raise PeerAway(f"{self.peer} sent a line of more than {limit} bytes")

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes, left in the queue; fewer if the peer has closed. Wait until
        they are there.
        """
        while True:
            seen = self._receive(size, socket.MSG_PEEK)
            if len(seen) >= size or not seen or self.closed():
                return seen
            # Level-triggered poll would return at once for the present bytes: wait for more by
            # time.
            if time.monotonic() >= self.deadline:
                raise PeerAway(f"{self.peer} did not answer in time")
            time.sleep(0.002)

    def unread(self) -> int:
        """Return the received bytes that are still unread."""
        return self._count(termios.FIONREAD)

    def unsent(self) -> int:
        """Return the sent bytes that the peer's kernel has not acknowledged yet."""
        return self._count(termios.TIOCOUTQ)

    def closed(self) -> bool:
        """Return whether the peer has closed its side, or the connection is broken."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return any(
            flags & (select.POLLRDHUP | select.POLLHUP | select.POLLERR)
            for _, flags in poller.poll(0)
        )

    def unanswered(self) -> bool:
        """Return whether the last event on a TCP connection is that this side sent, a clock tick (1
        to 10 ms) or more ago.

        True for a request in flight. Events within one tick, and on unix sockets, cannot be
        ordered: False.
        """
        if self.sock.family == socket.AF_UNIX:
            return False
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO).ljust(
            _TCP_INFO, b"\0"
        )
        # tcpi_last_data_sent, last_ack_sent, last_data_recv: ms ago
        sent, _, received = struct.unpack_from("=III", info, 44)
        # tcpi_data_segs_out; without any, the time of the last sending is meaningless
        (segments,) = struct.unpack_from("=I", info, 156)
        return bool(segments and sent < received)

    def arrives(self, seconds: float) -> bool:
        """Return whether anything can be read within `seconds` (data or the end)."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return bool(poller.poll(max(0.0, min(seconds, self.deadline - time.monotonic())) * 1000))

    def _count(self, request: int) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self.sock.fileno(), request, count)
        return count[0]

    def _receive(self, size: int, flags: int = 0) -> bytes:
        while True:
            try:
                return self.sock.recv(size, _NOW | flags)
            except BlockingIOError:
                self._wait(select.POLLIN)
            except OSError as error:
                raise self._lost(error) from error

    def _wait(self, event: int) -> None:
        poller = select.poll()
        poller.register(self.sock, event)
        left = self.deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise PeerAway(f"{self.peer} did not answer in time")

    def _lost(self, error: OSError) -> PeerAway:
        return PeerAway(f"the connection to {self.peer} broke: {error.strerror or error}")
