"""A TCP proxy before an S3 server that spoils chosen requests, as networks and servers do.

    with FaultProxy(server.port, {"PUT": "5.c", "GET": "s"}) as proxy: ...

`proxy.endpoint` is to be used in place of the server's.

Each method has a string with one letter per request of that method, in order of arrival; requests
beyond its end pass.  What was done is in `seen`, so that a test can assert that its fault was met.

    .  passes
    5  answered 503 SlowDown
    f  answered 507 InsufficientStorage
    n  answered 501 NotImplemented
    h  never answered (until the end)
    p  kept back until `proceed` is set
    r  the connection is reset before anything is forwarded
    c  half of the body is forwarded, then both sides are cut
    l  forwarded and carried out, but the answer is lost
    s  half of the answer's body arrives, then the connection is closed
    w  one byte of the answer's body is changed
    x  one byte of the request's body is changed
    d  the answer arrives byte by byte, one in `pause` seconds, until the end
    X  carried out, then `harm` is called with the path; an ETag that it returns takes the place of
       the answer's
    C  If-None-Match is judged here, by looking first: right one by one, racy when writers overlap
       (the way of OpenStack Swift)

Every request gets a connection of its own (``Connection: close`` is added; it is not signed), so
that the end of an answer is the end of its stream.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType

_PIECE = 1 << 16
_ANSWERS = {"5": (503, "SlowDown"), "f": (507, "InsufficientStorage"), "n": (501, "NotImplemented")}


class FaultProxy:
    """See the module's docstring."""

    def __init__(
        self,
        port: int,
        faults: Mapping[str, str] = MappingProxyType({}),
        exists: Callable[[str], bool] | None = None,
        *,
        pause: float = 1.0,
        harm: Callable[[str], str | None] | None = None,
    ) -> None:
        self.faults = faults
        self.pause = pause
        self._harm = harm
        self.seen: list[tuple[str, str, str]] = []  # method, path, letter
        self.proceed = threading.Event()
        self.arrived = threading.Event()  # some spoiled request is there
        self._exists = exists
        self._server_port = port
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self.proceed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def spoiled(self) -> str:
        """The letters of all requests that did not simply pass, in order of arrival."""
        with self._lock:
            return "".join(letter for _, _, letter in self.seen if letter != ".")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed: the test is over
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        # Connections that break here are the proxy's purpose, or the client's right.
        with client, suppress(OSError), self._watched(client):
            head, rest = _read_head(client)
            if not head:
                return
            method, path = head.split(b" ")[:2]
            letter = self._letter(method.decode(), path.decode())
            if letter != ".":
                self.arrived.set()
            self._act(letter, path.decode(), head, rest, client)

    def _letter(self, method: str, path: str) -> str:
        with self._lock:
            number = self._count.get(method, 0)
            self._count[method] = number + 1
            letter = (self.faults.get(method, "") + ".")[number:][:1] or "."
            self.seen.append((method, path, letter))
        return letter

    def _act(self, letter: str, path: str, head: bytes, rest: bytes, client: socket.socket) -> None:
        length = _length(head)
        if letter == "C" and b"if-none-match" in head.lower() and self._exists is not None:
            if self._exists(path.partition("?")[0]):
                _answer(client, 412, "PreconditionFailed", length - len(rest))
                return
        elif letter == "r":
            _reset(client)
            return
        elif letter in _ANSWERS:
            _answer(client, *_ANSWERS[letter], length - len(rest))
            return
        elif letter == "h":
            self._over.wait()
            return
        elif letter == "p":
            self.proceed.wait()
        with (
            socket.create_connection(("127.0.0.1", self._server_port)) as server,
            self._watched(server),
        ):
            server.sendall(head[:-2] + b"Connection: close\r\n\r\n" + rest)
            todo = length - len(rest)
            if letter == "x":
                _continue(server, client, head)
                server.sendall(bytes([client.recv(1)[0] ^ 1]))
                todo -= 1
            if letter == "c":
                _continue(server, client, head)
                _copy(client, server, todo - length // 2)
                _reset(server)
                _reset(client)
                return
            up = threading.Thread(target=_quietly(_copy), args=(client, server, todo), daemon=True)
            up.start()
            self._answer_of(server, client, letter, path)
            # The server has ended its answer; a body it did not want is not waited for.
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            up.join(10)

    def _answer_of(
        self, server: socket.socket, client: socket.socket, letter: str, path: str
    ) -> None:
        head, rest = _read_head(server)
        if head.startswith(b"HTTP/1.1 100"):
            client.sendall(head)
            head, rest = _read_head(server, rest)
        if letter == "l":
            while server.recv(_PIECE):
                pass
            _reset(client)
            return
        if letter in "sw":
            body = bytearray(rest)
            while piece := server.recv(_PIECE):
                body += piece
            if letter == "s":
                client.sendall(head + body[: len(body) // 2])
                return
            body[len(body) // 2] ^= 1
            client.sendall(head + body)
            return
        if letter == "d":
            self._drip(server, client, head + rest)
            return
        if letter == "X" and self._harm is not None:
            etag = self._harm(path.partition("?")[0])
            if etag is not None:
                head = b"\r\n".join(
                    b'ETag: "%s"' % etag.encode() if line.lower().startswith(b"etag:") else line
                    for line in head.split(b"\r\n")
                )
        client.sendall(head + rest)
        while piece := server.recv(_PIECE):
            client.sendall(piece)

    def _drip(self, server: socket.socket, client: socket.socket, answer: bytes) -> None:
        while answer:
            for byte in answer:
                client.sendall(bytes([byte]))
                if self._over.wait(self.pause):
                    return
            answer = server.recv(_PIECE)

    def _watched(self, sock: socket.socket) -> _Watched:
        return _Watched(sock, self._open, self._lock)


class _Watched:
    """Keeps a socket in the set of those to shut at the end."""

    def __init__(self, sock: socket.socket, held: set[socket.socket], lock: threading.Lock) -> None:
        self._sock, self._held, self._lock = sock, held, lock

    def __enter__(self) -> None:
        with self._lock:
            self._held.add(self._sock)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._held.discard(self._sock)


def _read_head(sock: socket.socket, got: bytes = b"") -> tuple[bytes, bytes]:
    """A message's head with its empty line, and what came after it."""
    while b"\r\n\r\n" not in got:
        piece = sock.recv(_PIECE)
        if not piece:
            return b"", b""
        got += piece
    end = got.index(b"\r\n\r\n") + 4
    return got[:end], got[end:]


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _copy(source: socket.socket, target: socket.socket, count: int) -> None:
    while count > 0:
        piece = source.recv(min(count, _PIECE))
        if not piece:
            return
        target.sendall(piece)
        count -= len(piece)


def _quietly(
    copy: Callable[[socket.socket, socket.socket, int], None],
) -> Callable[[socket.socket, socket.socket, int], None]:
    def run(source: socket.socket, target: socket.socket, count: int) -> None:
        with suppress(OSError):  # the other direction has ended the exchange
            copy(source, target, count)

    return run


def _continue(server: socket.socket, client: socket.socket, head: bytes) -> None:
    if b"100-continue" in head.lower():
        client.sendall(_read_head(server)[0])


def _answer(client: socket.socket, status: int, code: str, body_left: int) -> None:
    text = f"<Error><Code>{code}</Code><Message>spoiled by the proxy</Message></Error>"
    body = f"<?xml version='1.0'?>{text}".encode()
    client.sendall(
        b"HTTP/1.1 %d Spoiled\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % (status, len(body))
        + body
    )
    client.shutdown(socket.SHUT_WR)
    while body_left > 0 and (piece := client.recv(_PIECE)):
        body_left -= len(piece)


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
