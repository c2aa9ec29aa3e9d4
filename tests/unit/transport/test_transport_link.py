"""A link between two criuctl processes, used both ways, from many threads at once."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.linking import TIMEOUT, Ends, RawEnd

from criuctl import __version__
from criuctl.criu.driver import CriuFailed
from criuctl.errors import (
    Conflict,
    CriuctlError,
    LinkLost,
    ObjectMissing,
    PlatformError,
    PreflightRefused,
    TimedOut,
    UnsupportedFormat,
    UsageError,
)
from criuctl.transport import frames
from criuctl.transport.dispatcher import Dispatcher
from criuctl.transport.link import Answer, Link, Request
from criuctl.transport.messages import Outgoing


def echo(request: Request) -> Answer:
    return Answer(request.arguments, request.body)


def test_both_say_who_they_are(ends: Ends) -> None:
    left, right = ends(facts={"host": "web1", "criuctl": "not that"})
    for link in (left, right):
        assert link.hello["host"] == "web1"
        assert link.hello["criuctl"] == __version__
        assert link.protocol == 1


@pytest.mark.parametrize("sockets", [False, True], ids=["pipes", "sockets"])
def test_bodies_of_every_size(ends: Ends, sockets: bool) -> None:
    left, right = ends(echo, echo, sockets=sockets)
    for size in (0, 1, 65_535, 65_536, (5 << 20) + 3, *(() if sockets else (frames.MAX_BODY,))):
        body = os.urandom(min(size, 1 << 20)) * (size // (1 << 20) or 1)
        body = body[:size] + bytes(size - len(body[:size]))
        for link in (left, right):
            answer = link.ask("echo", {"size": size}, body)
            assert answer.arguments == {"size": size}
            assert answer.view == body


def test_a_body_in_many_pieces(ends: Ends) -> None:
    left, _ = ends(None, echo)
    pieces = [
        piece
        for n in range(3000)
        for piece in (os.urandom(n % 700), b"", bytearray(b"x"), memoryview(b"abc")[1:])
    ]
    assert left.ask("echo", {}, pieces).view == b"".join(pieces)
    words = memoryview(os.urandom(64)).cast("Q")
    assert left.ask("echo", {}, words).view == words.tobytes()


def test_what_is_too_large_is_refused_and_harms_nothing(ends: Ends) -> None:
    left, right = ends(
        None,
        lambda request: Answer({}, bytes(frames.MAX_BODY + 1)) if request.verb == "much" else None,
    )
    with pytest.raises(UsageError):
        left.ask("put", {}, bytes(frames.MAX_BODY + 1))
    with pytest.raises(UsageError):
        left.ask("put", {"text": "x" * frames.MAX_JSON})
    with pytest.raises(TypeError):
        left.ask("put", {"bytes": b""})
    with pytest.raises(UsageError):
        left.ask("much")
    assert left.ask("little").arguments == {}
    assert not right.lost.is_set()


def test_an_answer_goes_where_it_is_wanted(ends: Ends) -> None:
    left, _ = ends(None, echo)
    target = bytearray(b"\xa5" * 100_000)
    answer = left.ask("echo", {}, b"b" * 70_000, into=memoryview(target)[10:-10])
    assert answer.view.nbytes == 70_000
    assert target == b"\xa5" * 10 + b"b" * 70_000 + b"\xa5" * 29_990
    answer.view.release()
    with pytest.raises(CriuctlError, match="more than were requested"):
        left.ask("echo", {}, b"c" * 70_001, into=memoryview(target)[:70_000])
    assert b"c" not in target
    assert left.ask("echo", {}, b"d").view.tobytes() == b"d"


def test_errors_keep_their_class(ends: Ends, no_thread_fails: list[object]) -> None:
    class Own(CriuctlError):
        """One that has no other code."""

        code = "own-to-this-test"
        exit_code = 11

    raised: list[BaseException] = [
        ObjectMissing("o is not there", object="o", count=3, odd=object()),
        PlatformError("too old", hint="Update."),
        Conflict("taken"),
        Own("mine"),
        CriuFailed("CRIU failed", "its log"),
        KeyError("x"),
    ]

    def fail(request: Request) -> None:
        raise raised[request.argument("which", int)]

    left, right = ends(fail, fail)
    caught: list[CriuctlError] = []
    for which in range(len(raised)):
        with pytest.raises(CriuctlError) as info:
            left.ask("fail", {"which": which})
        caught.append(info.value)
    assert [type(error) for error in caught[:4]] == [ObjectMissing, PlatformError, Conflict, Own]
    assert (caught[0].message, caught[0].details) == ("o is not there", {"object": "o", "count": 3})
    assert (caught[1].hint, caught[2].exit_code) == ("Update.", 9)
    assert type(caught[4]) is CriuctlError and (caught[4].code, caught[4].exit_code) == (
        CriuFailed.code,
        CriuFailed.exit_code,
    )
    assert (caught[5].exit_code, caught[5].message) == (
        1,
        "criuctl on right met a bug: KeyError: 'x'",
    )
    assert "traceback" not in caught[5].details
    assert not right.lost.is_set()


def test_an_error_with_endless_details_is_sent(ends: Ends, no_thread_fails: list[object]) -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]

    def fail(request: Request) -> None:
        raise PreflightRefused("no", count=3, findings=["x" * frames.MAX_JSON], nested=nested)

    left, right = ends(None, fail)
    with pytest.raises(PreflightRefused) as info:
        left.ask("fail", timeout=TIMEOUT)
    assert info.value.details == {"count": 3}
    assert not right.lost.is_set()


def test_a_full_disk_there_is_no_bug(ends: Ends) -> None:
    def fail(request: Request) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/lib/criuctl/moves/in/x.json")

    left, _ = ends(None, fail)
    with pytest.raises(PlatformError, match=r"moves/in/x\.json: No space left") as info:
        left.ask("fail")
    assert info.value.exit_code == 13 and "Free space" in info.value.hint


def test_a_class_that_is_not_known_here_keeps_its_exit_code(raw: RawEnd) -> None:
    link, far = raw()
    far.hello()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "x")
        far.receive()
        number = far.receive()[1]
        far.send(
            frames.ERROR,
            number,
            {"code": "of-2031", "exit_code": 9, "message": "m", "hint": "h", "details": {"k": 1}},
        )
        with pytest.raises(CriuctlError) as info:
            asked.result(TIMEOUT)
    assert info.value.to_dict() == {
        "code": "of-2031",
        "exit_code": 9,
        "message": "m",
        "hint": "h",
        "k": 1,
    }


def test_a_traceback_travels_for_those_who_debug(ends: Ends) -> None:
    left, _ = ends(None, lambda request: {"x": 1 // 0}, debug=True)
    with pytest.raises(CriuctlError) as info:
        left.ask("x")
    assert "1 // 0" in info.value.details["traceback"]


def test_an_unknown_verb_is_refused(ends: Ends) -> None:
    left, right = ends()
    with pytest.raises(UnsupportedFormat, match="'sing'"):
        left.ask("sing")
    left.tell("sing")
    with pytest.raises(UnsupportedFormat):
        right.ask("sing")


def test_either_side_may_ask_while_it_answers(ends: Ends) -> None:
    def deeper(request: Request) -> dict[str, int]:
        depth = request.arguments["depth"]
        other = left if request.arguments["on"] == "left" else right
        if depth == 0:
            return {"sum": 0}
        on = "right" if request.arguments["on"] == "left" else "left"
        return {"sum": depth + other.ask("deeper", {"depth": depth - 1, "on": on}).arguments["sum"]}

    left, right = ends(deeper, deeper)
    assert left.ask("deeper", {"depth": 10, "on": "right"}).arguments == {"sum": 55}


def test_many_at_once_both_ways(ends: Ends) -> None:
    """Eight threads on each side, more of them than may ask at once."""

    def digest(request: Request) -> Answer:
        assert hashlib.sha256(request.body).hexdigest() == request.arguments["sha"]
        return Answer({"number": request.arguments["number"]}, request.body)

    left, right = ends(digest, digest, workers=3)
    blocks = [os.urandom(1 << 20) for _ in range(4)]

    def work(thread: int) -> None:
        link = (left, right)[thread % 2]
        target = bytearray(4 << 20)
        for round_ in range(6):
            size = (thread * 7919 + round_ * 104_729) % (1 << 20)
            pieces = [block[:size] for block in blocks]
            whole = b"".join(pieces)
            arguments = {"sha": hashlib.sha256(whole).hexdigest(), "number": [thread, round_]}
            answer = link.ask(
                "x", arguments, pieces, into=memoryview(target) if round_ % 2 else None
            )
            assert answer.arguments == {"number": [thread, round_]}
            assert answer.view == whole

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16), timeout=TIMEOUT))


def test_no_more_is_asked_than_the_other_side_takes(ends: Ends) -> None:
    busy, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def count(request: Request) -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        go.wait(TIMEOUT)
        with lock:
            busy -= 1

    left, _ = ends(None, count, workers=2)
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(left.ask, "x") for _ in range(12)]
        with pytest.raises(TimedOut):
            left.ask("x", timeout=0.2)
        go.set()
        assert all(future.result(TIMEOUT) for future in asked)
    assert most <= 2


def test_events_come_in_their_order(ends: Ends, no_thread_fails: list[object]) -> None:
    heard: list[int] = []
    done = threading.Event()

    def hear(request: Request) -> None:
        assert request.event
        heard.append(request.arguments["n"])
        if request.arguments["n"] == 5:
            raise OSError("the terminal is gone")
        if request.arguments["n"] == 999:
            done.set()

    left, _ = ends(None, hear)
    for n in range(1000):
        left.tell("progress", {"n": n})
    assert done.wait(TIMEOUT)
    assert heard == list(range(1000))
    assert [str(error) for error in no_thread_fails] == ["the terminal is gone"]
    no_thread_fails.clear()


def test_an_answer_that_comes_late_touches_nothing(ends: Ends) -> None:
    go = threading.Event()

    def slow(request: Request) -> Answer:
        if request.verb == "slow":
            go.wait(TIMEOUT)
        return Answer({}, b"n" * 500_000)

    left, _ = ends(None, slow)
    target = bytearray(500_000)
    assert left.hello  # which may take longer than what follows
    with pytest.raises(TimedOut, match="slow"):
        left.ask("slow", into=memoryview(target), timeout=0.1)
    go.set()
    assert left.ask("fast").view.nbytes == 500_000  # behind the other one
    assert target == bytes(500_000)
    target.clear()  # no view of it is held


def test_silence_is_filled(ends: Ends) -> None:
    left, right = ends(timeout=4.0)
    assert left.hello and right.hello
    assert not left.lost.wait(5.5)
    assert not right.lost.is_set()


def test_asks_under_way_end_when_the_link_is_closed(ends: Ends) -> None:
    entered, go = threading.Semaphore(0), threading.Event()
    errors: list[CriuctlError] = []
    heard = threading.Event()

    def lost(error: CriuctlError) -> None:
        errors.append(error)
        heard.set()

    def hang(request: Request) -> None:
        entered.release()
        go.wait(TIMEOUT)

    left, right = ends(None, hang)
    right.on_lost(lost)
    left.on_lost(errors.append)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(left.ask, "hang") for _ in range(3)]
        for _ in range(3):
            assert entered.acquire(timeout=TIMEOUT)
        left.close(reason="the operator changed his mind")
        for future in asked:
            with pytest.raises(LinkLost, match="closed"):
                future.result(TIMEOUT)
    assert right.lost.wait(TIMEOUT) and heard.wait(TIMEOUT)
    assert [error.message for error in errors] == [
        "left ended the link: the operator changed his mind"
    ]
    with pytest.raises(LinkLost, match="closed"):
        left.ask("x")
    with pytest.raises(LinkLost, match="ended"):
        right.tell("x")
    left.close()
    go.set()


def test_what_is_being_answered_is_answered_before_the_link_closes(ends: Ends) -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(request: Request) -> Answer:
        entered.set()
        go.wait(TIMEOUT)
        return Answer({"done": True}, bytes(3 << 20))

    left, right = ends(None, slow)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(left.ask, "slow")
        assert entered.wait(TIMEOUT)
        closed = pool.submit(right.close, TIMEOUT)
        go.set()
        assert asked.result(TIMEOUT).arguments == {"done": True}
        closed.result(TIMEOUT)


def test_an_answer_that_is_about_to_be_sent_is_waited_for() -> None:
    sending, go = threading.Event(), threading.Event()

    def send(_outgoing: Outgoing) -> None:
        sending.set()
        go.wait(TIMEOUT)

    desk = Dispatcher(echo, 1, 2, send, debug=False)
    desk.ask(1, Request("x", {}), lambda: None)
    assert sending.wait(TIMEOUT)
    assert not desk.settle(0.1)
    go.set()
    assert desk.settle(TIMEOUT)
    desk.close()


def test_a_lost_link_is_reported_also_when_no_thread_is_left(
    raw: RawEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, notified = threading.Thread.start, threading.Event()

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "criuctl-link-lost":
            raise RuntimeError("can't start new thread")
        start(thread)

    link, far = raw()
    far.hello()
    assert link.hello
    link.on_lost(lambda _why: notified.set())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    far.sock.close()
    assert notified.wait(TIMEOUT)


def test_a_link_that_was_never_started_is_closed() -> None:
    (reading, theirs), (far, writing) = os.pipe(), os.pipe()
    link = Link(reading, writing)
    link.close()
    with pytest.raises(LinkLost, match="closed"):
        link.tell("x")
    assert os.read(far, 1) == b""
    for fd in (theirs, far):
        os.close(fd)
