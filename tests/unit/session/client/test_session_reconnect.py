"""The way back of who is attached: over a connection that breaks again, to a host that does not
answer, without a keyboard.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from criuctl.errors import SessionGone, TimedOut
from criuctl.session.client.attach import Attachment, Ended
from criuctl.session.client.reconnect import Moved, Reconnection
from criuctl.session.client.session import Session
from criuctl.session.client.shown_screen import ShownScreen

ATTACHED = {"lease": None, "offset": 7, "end": 7, "state": "running", "rows": 24, "cols": 80}


class Link:
    """A connection as an attachment sees it, or what comes of an attempt to make one."""

    operator, token, role, pending = "op-1", "t", "write", False
    hello: ClassVar[dict[str, Any]] = {"status": {"incarnation": 2}}

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)

    def request(self, _op: str, **_arguments: Any) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def detach(self) -> int:
        return int(self.request("detach")["offset"])

    def submit(self, _op: str, **_arguments: Any) -> int:
        return 1

    def close(self) -> None: ...

    def leave(self) -> None: ...


def connecting(*attempts: Link | Exception) -> Any:
    left = list(attempts)

    def connect(_resume: tuple[str, str] | None) -> Link:
        attempt = left.pop(0)
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    return connect


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        os.close(fd)


def attachment(connect: Any, stdin: int) -> Attachment:
    made = Attachment("s", connect, "C-]")
    terminal = SimpleNamespace(
        stdin=stdin, keyboard=False, is_terminal=False, size=None, waiting=0, out=1
    )
    made._terminal = terminal  # type: ignore[assignment]
    made._shown = ShownScreen(terminal)  # type: ignore[arg-type]
    return made


def test_a_host_that_does_not_answer_is_asked_again() -> None:
    back, lost = cast("Any", Link()), cast("Session", Link())
    connect = connecting(TimedOut("the holder did not answer 'hello' in 30 s"), back)
    assert (
        Reconnection(connect, 60.0, None).again(lost, SessionGone("cut"), lambda _seconds: True)
        is back
    )
    with pytest.raises(SessionGone):
        Reconnection(connecting(TimedOut("late")), 0.0, None).again(
            lost, SessionGone("cut"), lambda _seconds: True
        )


def test_a_connection_that_breaks_at_once_again_is_made_again(pipe: tuple[int, int]) -> None:
    back: Any = Link(ATTACHED)
    attached = attachment(connecting(Link(SessionGone("cut again")), back), pipe[0])
    attached.session = cast("Session", Link())
    attached._come_back(SessionGone("cut"))
    assert attached.session is back and attached._ended is None and attached._position == 7


def test_a_connection_that_breaks_at_once_where_it_has_moved_to_is_made_again(
    pipe: tuple[int, int],
) -> None:
    back: Any = Link(ATTACHED)
    attached = attachment(connecting(), pipe[0])
    attached._reconnection = Reconnection(
        connecting(), 10.0, lambda _url: connecting(Link(SessionGone("cut at once")), back)
    )
    attached.session, attached._position = cast("Session", Link()), 7
    attached._go_after(Moved("ssh://b/s", "b"))
    assert attached.session is back and attached._ended is None


def test_a_moved_session_is_not_reported_at_its_old_home(
    pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    gone = SessionGone("moved on", moved_to="ssh://c/s", home="c")
    attached = attachment(connecting(), pipe[0])
    attached._reconnection = Reconnection(
        connecting(), 10.0, lambda _url: connecting(Link(SessionGone("cut at once")), gone)
    )
    attached.session, attached._position = cast("Session", Link()), 7
    attached._go_after(Moved("ssh://b/s", "b"))
    assert (
        attached._moved is not None and attached._moved.host == "c" and not capfd.readouterr().err
    )


def test_who_has_no_keyboard_any_more_waits_and_types_nothing() -> None:
    ended = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    attached = attachment(connecting(), ended)
    attached._read_keyboard()
    assert attached._typed == b"\x04"
    began = time.monotonic()
    for _ in range(3):
        assert attached._pause(0.1)
    assert time.monotonic() - began >= 0.3 and attached._typed == b"\x04"
    os.close(ended)


def test_a_pipe_is_read_no_faster_than_the_session_takes_it(pipe: tuple[int, int]) -> None:
    endless = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    attached = attachment(connecting(), endless)
    silent, wake = os.eventfd(0, os.EFD_CLOEXEC), pipe[0]
    numbers = itertools.count(1)
    attached.session = cast(
        "Session",
        SimpleNamespace(
            fileno=lambda: silent, pending=False, submit_input=lambda *_a, **_k: next(numbers)
        ),
    )

    def leave() -> None:
        attached._ended = Ended("detached")
        os.write(pipe[1], b"!")

    timer = threading.Timer(0.6, leave)
    timer.start()
    attached._loop(wake)
    timer.join()
    assert len(attached._typed) <= 128 << 10
    for fd in (endless, silent):
        os.close(fd)


def test_a_pipe_is_not_read_while_the_session_cannot_be_reached() -> None:
    endless = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    attached = attachment(connecting(), endless)
    for _ in range(10):
        assert attached._pause(0.001)
    assert 0 < len(attached._typed) <= 128 << 10
    os.close(endless)
