"""Asking the peers of frozen connections, many at a time, for their session state; no error here
harms a dump.

Each question is asked over the program's own connection, by the application protocol, in its own
thread, on a duplicate of the socket. When the time is over the remaining threads are cut off: each
duplicate is replaced by ``/dev/null`` under its number, so that no late byte can reach the
connection.

A question may leave an answer behind. If something was sent and its answer may still come, the
program would take that answer for one to its own request; such a connection is shut down, and the
program sees that like any other end. A protocol that raises `CannotRebuild` or `PeerAway`
guarantees that it has cleaned up itself.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import queue
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field

from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.records import check_any
from ..errors import CriuctlError
from .protocols.base import ApplicationProtocol, Settings

SECONDS = 3.0  # for the questions of one dump: the tree is frozen meanwhile
# more for every question: losing a hundred sessions would be worse than a second longer frozen
SECONDS_EACH = 0.02
# seconds more for the answer to a question that was already asked: leaving it unread would be worse
GRACE = 2.5
_WORKERS = 64
_BYTES_SENT = struct.Struct("=200xQ")  # of struct tcp_info, Linux 4.19


class Question(Struct, frozen=True):
    """One idle connection and its protocol."""

    record: ConnectionRecord  # with PIDs as criuctl sees them
    protocol: ApplicationProtocol
    settings: Settings
    borrow: Callable[[], socket.socket]  # the program's socket; closed here


class Answer(Struct):
    """The result of a question; with a `reason` the session cannot be rebuilt from it."""

    session: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    # the connection had to be ended: a late answer would have reached the program
    shut: bool = False


class _Task(Struct):
    question: Question
    lock: threading.Lock = field(default_factory=threading.Lock)
    sock: socket.socket | None = None
    sent: int | None = 0
    answer: Answer | None = None
    over: bool = False


def ask_all(
    questions: Sequence[Question], seconds: float | None = None, grace: float = GRACE
) -> list[Answer]:
    """Return an answer to each question, in their order, after at most `seconds` and `grace`."""
    deadline = time.monotonic() + (
        SECONDS + SECONDS_EACH * len(questions) if seconds is None else seconds
    )
    tasks = [_Task(question) for question in questions]
    waiting: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    workers = [
        threading.Thread(
            target=_work, args=(waiting, deadline), name="criuctl-inspect", daemon=True
        )
        for _ in range(min(_WORKERS, len(tasks)))
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, deadline + grace - time.monotonic()))
    finally:
        # Even when interrupted: no thread may use a connection whose program may be running again.
        answers = [_collect(task) for task in tasks]
    return answers


def _work(waiting: queue.SimpleQueue[_Task], deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            return
        _ask(task, deadline)


def _ask(task: _Task, deadline: float) -> None:
    question = task.question
    try:
        sock = question.borrow()
    except OSError as error:
        task.answer = Answer(reason=f"the socket cannot be reached: {error.strerror}")
        return
    with task.lock:
        if task.over:
            sock.close()
            return
        task.sock, task.sent = sock, _sent(sock)
    shut = False
    try:
        session = question.protocol.inspect(sock, question.record, question.settings, deadline)
        answer = Answer(check_any(dict(session), question.protocol.name))
        if unread(sock) and not getattr(question.protocol, "any_time", False):
            answer = Answer(reason="the peer has sent data without being asked")
    except CriuctlError as error:
        answer = Answer(reason=error.message)
    except BaseException as error:  # an error of a protocol must not fail the dump
        with task.lock:
            shut = not task.over and _shut_if_sent(task)
        answer = Answer(reason=f"looking at the session failed: {type(error).__name__}", shut=shut)
    with task.lock:
        if not task.over:
            task.answer = answer
            sock.close()
            task.sock = None


def _collect(task: _Task) -> Answer:
    with task.lock:
        task.over = True
        if task.answer is not None:
            return task.answer
        if task.sock is None:
            return Answer(reason="there was no time to look at the session")
        shut = _shut_if_sent(task)
        # Not closed: the number must stay in use while the thread may use it.
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), task.sock.fileno(), inheritable=False)
        return Answer(reason="the peer did not answer in time", shut=shut)


def _shut_if_sent(task: _Task) -> bool:
    """End the connection if something was sent on it."""
    assert task.sock is not None
    now = _sent(task.sock)
    if now is not None and now == task.sent:
        return False
    with contextlib.suppress(OSError):
        task.sock.shutdown(socket.SHUT_RDWR)
    return True


def _sent(sock: socket.socket) -> int | None:
    """Return the bytes that were ever sent; None where the kernel does not count them."""
    if sock.family == socket.AF_UNIX:
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
    except OSError:
        return None
    queued = _count(sock, termios.TIOCOUTQ)
    return _BYTES_SENT.unpack(raw)[0] + queued if len(raw) == _BYTES_SENT.size else None


def unread(sock: socket.socket) -> int:
    """Return the received bytes that are still unread."""
    return _count(sock, termios.FIONREAD)


def _count(sock: socket.socket, request: int) -> int:
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), request, count)
    except OSError:
        return 0
    return count[0]
