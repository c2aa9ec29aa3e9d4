"""Asking peers: answers come through, and whatever a protocol does wrong harms neither the dump nor
the program.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.connections.peer_inspection import Question, ask_all
from criuctl.connections.protocols.base import CannotRebuild, PeerAway, Settings
from criuctl.errors import CriuctlError

Inspect = Callable[[socket.socket, float], dict[str, Any]]


class Spoken:
    """A protocol whose `inspect` is given."""

    name = "spoken"

    def __init__(self, inspect: Inspect) -> None:
        self._inspect = inspect

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        return self._inspect(sock, deadline)

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        raise NotImplementedError


def question(inspect: Inspect, program: socket.socket) -> Question:
    return Question(ConnectionRecord(1, 3), Spoken(inspect), Settings(), program.dup)


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = socket.create_connection(listener.getsockname())
        return program, listener.accept()[0]


def test_answers_come_in_order() -> None:
    program, peer = _pair()
    with program, peer:
        asked = [question(lambda _s, _d, n=n: {"number": n}, program) for n in range(200)]  # type: ignore[misc]
        assert [a.session for a in ask_all(asked)] == [{"number": n} for n in range(200)]
        assert ask_all([]) == []


@pytest.mark.parametrize(
    "error", [CannotRebuild("a transaction is open"), PeerAway("it is gone"), CriuctlError("odd")]
)
def test_a_reason_is_reported_and_the_connection_left_alone(error: CriuctlError) -> None:
    def inspect(_sock: socket.socket, _deadline: float) -> dict[str, Any]:
        raise error

    program, peer = _pair()
    with program, peer:
        (answer,) = ask_all([question(inspect, program)])
        assert (answer.session, answer.reason, answer.shut) == ({}, error.message, False)
        peer.sendall(b"on")
        assert program.recv(9) == b"on"


def test_a_bug_before_a_word_was_said_does_nothing() -> None:
    def inspect(_sock: socket.socket, _deadline: float) -> dict[str, Any]:
        raise ZeroDivisionError

    program, peer = _pair()
    with program, peer:
        (answer,) = ask_all([question(inspect, program)])
        assert "ZeroDivisionError" in answer.reason
        assert not answer.shut
        program.sendall(b"on")
        assert peer.recv(9) == b"on"


def test_a_bug_after_a_question_ends_the_connection() -> None:
    """Its answer may come any time, and would be taken for something else."""

    def inspect(sock: socket.socket, _deadline: float) -> dict[str, Any]:
        sock.sendall(b"what?")
        raise ZeroDivisionError

    program, peer = _pair()
    with program, peer:
        (answer,) = ask_all([question(inspect, program)])
        assert answer.shut
        assert program.recv(9) == b""


@pytest.mark.parametrize("says", [b"", b"what?"], ids=["silent", "after a question"])
def test_who_hangs_is_left_behind(says: bytes) -> None:
    go_on, late = threading.Event(), threading.Event()

    def inspect(sock: socket.socket, _deadline: float) -> dict[str, Any]:
        sock.sendall(says)
        go_on.wait(60)
        try:
            sock.sendall(b"late word")
        except OSError:
            late.set()
        return {}

    program, peer = _pair()
    with program, peer:
        began = time.monotonic()
        (answer,) = ask_all([question(inspect, program)], seconds=1.5, grace=0.2)
        assert time.monotonic() - began < 20
        assert "in time" in answer.reason
        assert answer.shut == bool(says)
        go_on.set()
        assert late.wait(60)  # the late word did not go anywhere
        peer.settimeout(60)
        if not says:
            program.sendall(b"mine")
        assert peer.recv(99) == (says or b"mine")


def test_an_interrupt_closes_the_sockets_of_inspections() -> None:
    """The tree goes on when the dump is given up: no word of ours may come between its own."""
    go_on, late = threading.Event(), threading.Event()

    def inspect(sock: socket.socket, _deadline: float) -> dict[str, Any]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go_on.wait(60)
        try:
            sock.sendall(b"late word")
        except OSError:
            late.set()
        return {}

    program, peer = _pair()
    with program, peer:
        with pytest.raises(KeyboardInterrupt):
            ask_all([question(inspect, program)], seconds=60)
        go_on.set()
        assert late.wait(60)


def test_a_hundred_who_hang_take_no_longer_than_one() -> None:
    stop = threading.Event()

    def inspect(_sock: socket.socket, _deadline: float) -> dict[str, Any]:
        stop.wait(60)
        return {}

    program, peer = _pair()
    with program, peer:
        began = time.monotonic()
        answers = ask_all([question(inspect, program) for _ in range(100)], seconds=0.2, grace=0.2)
        assert time.monotonic() - began < 20
        assert all(a.reason for a in answers)
        stop.set()


@pytest.mark.parametrize(
    "answer",
    [["a list"], {"deep": [[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]}, {"key": object()}, None],
)
def test_an_answer_that_no_manifest_can_hold(answer: Any) -> None:
    program, peer = _pair()
    with program, peer:
        (found,) = ask_all([question(lambda _s, _d: answer, program)])
        assert found.session == {}
        assert found.reason


def test_what_came_of_its_own_accord_is_a_reason() -> None:
    program, peer = _pair()
    with program, peer:
        peer.sendall(b"news")

        def inspect(sock: socket.socket, _deadline: float) -> dict[str, Any]:
            sock.recv(1, socket.MSG_PEEK)
            return {"fine": True}

        (answer,) = ask_all([question(inspect, program)])
        assert "without being asked" in answer.reason
        assert program.recv(9) == b"news"


def test_a_socket_that_is_gone() -> None:
    def borrow() -> socket.socket:
        raise OSError(9, "Bad file descriptor")

    (answer,) = ask_all(
        [Question(ConnectionRecord(1, 3), Spoken(lambda _s, _d: {}), Settings(), borrow)]
    )
    assert "cannot be reached" in answer.reason
