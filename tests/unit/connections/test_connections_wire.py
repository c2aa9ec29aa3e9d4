"""`Wire` on a borrowed socket: deadlines, exact reads, and status flags that stay the program's."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from criuctl.connections.protocols import wire as module
from criuctl.connections.protocols.base import PeerAway
from criuctl.connections.protocols.postgresql_wire import Conversation, frame
from criuctl.connections.protocols.wire import LARGEST, Wire


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with mine, theirs:
        yield mine, theirs


def wire(sock: socket.socket, seconds: float = 20) -> Wire:
    return Wire(sock, time.monotonic() + seconds)


@pytest.mark.parametrize("blocking", [True, False])
def test_more_than_the_buffers_hold(
    pair: tuple[socket.socket, socket.socket], blocking: bool
) -> None:
    mine, theirs = pair
    os.set_blocking(mine.fileno(), blocking)
    data = os.urandom(8 << 20)
    echo = threading.Thread(target=lambda: theirs.sendall(wire(theirs).receive(len(data))))
    echo.start()
    talk = wire(mine)
    talk.send(data)
    assert talk.receive(len(data)) == data
    echo.join()
    assert os.get_blocking(mine.fileno()) == blocking


def test_nothing_is_read_that_was_not_asked_for(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    theirs.sendall(b"+PONG\r\n:1\r\nrest")
    talk = wire(mine)
    assert talk.peek(5) == b"+PONG"
    assert talk.line(b"\r\n") == b"+PONG\r\n"
    assert talk.receive(2) == b":1"
    assert talk.line(b"\r\n") == b"\r\n"
    assert talk.unread() == 4
    assert mine.recv(100) == b"rest"


def test_a_line_that_comes_in_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair

    def drip() -> None:
        for byte in b"a line\r\nx":
            theirs.sendall(bytes([byte]))
            time.sleep(0.001)  # so that pieces arrive one by one; nothing depends on it

    dripping = threading.Thread(target=drip)
    dripping.start()
    talk = wire(mine)
    assert talk.line(b"\r\n") == b"a line\r\n"
    assert talk.receive(1) == b"x"
    dripping.join()


@pytest.mark.parametrize("what", ["receive", "line", "peek"])
def test_silence_ends_at_the_deadline(pair: tuple[socket.socket, socket.socket], what: str) -> None:
    mine, theirs = pair
    theirs.sendall(b"ab")
    began = time.monotonic()
    talk = wire(mine, 0.2)
    with pytest.raises(PeerAway, match="in time"):
        getattr(talk, what)(*([] if what == "line" else [3]))
    assert 0.1 < time.monotonic() - began < 10


def test_the_peer_does_not_read_what_is_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(PeerAway, match="in time"):
        wire(pair[0], 0.2).send(bytes(64 << 20))


def test_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    theirs.sendall(b"ab")
    theirs.close()
    talk = wire(mine)
    assert talk.peek(3) == b"ab"
    with pytest.raises(PeerAway, match="closed"):
        talk.receive(3)
    assert talk.closed()
    with pytest.raises(PeerAway, match=r"broke|closed"):
        talk.line()


@pytest.mark.parametrize("size", [LARGEST + 1])
def test_sizes_beyond_reason(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    with pytest.raises(PeerAway, match="announces"):
        wire(pair[0]).receive(size)


def test_a_line_without_end(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    theirs.sendall(b"x" * 5000)
    with pytest.raises(PeerAway, match="line of more than"):
        wire(mine).line(limit=4096)


def test_a_peer_that_never_stops_talking(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends as fast as it is read, so that no read ever times out: its words would fill the
    memory.
    """
    monkeypatch.setattr(module, "MOST", 1 << 20)
    mine, theirs = pair
    theirs.settimeout(20)
    stopped = threading.Event()

    def talk() -> None:
        notice = frame(b"N", b"Mnothing new\0\0") * 1000
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                theirs.sendall(notice)

    talking = threading.Thread(target=talk)
    talking.start()
    conversation = Conversation(wire(mine, 2))
    try:
        with pytest.raises(PeerAway, match="more than any sane peer"):
            conversation.read()
    finally:
        stopped.set()
        mine.close()
        talking.join()
    assert len(conversation.notices) < 1 << 20
