"""Broken links, and damaged or hostile other sides: a clear error, and no caller waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.linking import TIMEOUT, Raw, RawEnd

from criuctl import __version__
from criuctl.errors import CriuctlError, HostUnreachable, LinkLost, UnsupportedFormat
from criuctl.transport import frames
from criuctl.transport.link import Answer, Link, Request

PROJECT = Path(__file__).parents[3]


def reason(link: Link) -> CriuctlError:
    """Why the link was lost."""
    assert link.lost.wait(TIMEOUT)
    with pytest.raises(CriuctlError) as info:
        link.ask("x", timeout=TIMEOUT)
    return info.value


# -- links that break
# --------------------------------------------------------------------------------


def test_a_request_cut_in_its_body_is_not_served(raw: RawEnd) -> None:
    served: list[Request] = []
    link, far = raw(served.append)
    far.hello()
    whole = b"".join(frames.encode(frames.ASK, 1, {"verb": "store.put"}, bytes(200_000)))
    far.write(whole[:150_000])
    far.sock.shutdown(socket.SHUT_WR)
    assert "cut" in reason(link).message
    assert served == []


def test_an_answer_cut_in_its_body_is_none(raw: RawEnd) -> None:
    link, far = raw()
    far.hello()
    target = memoryview(bytearray(200_000))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "get", into=target)
        far.receive()
        number = far.receive()[1]
        far.write(b"".join(frames.encode(frames.ANSWER, number, {}, bytes(200_000)))[:100_000])
        far.sock.close()
        with pytest.raises(LinkLost, match="cut"):
            asked.result(TIMEOUT)


@pytest.fixture
def peer() -> Iterator[Callable[..., tuple[Link, subprocess.Popen[bytes]]]]:
    """Links with another process."""
    made: list[tuple[Link, subprocess.Popen[bytes]]] = []

    def make(**options: float) -> tuple[Link, subprocess.Popen[bytes]]:
        (reading, theirs_out), (theirs_in, writing) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("peer.py")],
            stdin=theirs_in,
            stdout=theirs_out,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        link = Link(reading, writing, name="peer", patience=TIMEOUT, **options)  # type: ignore[arg-type]
        made.append((link, process))
        link.start()
        assert link.hello["pid"] == process.pid
        return link, process

    yield make
    for link, process in made:
        link.close()
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def test_a_peer_that_is_killed(peer: Callable[..., tuple[Link, subprocess.Popen[bytes]]]) -> None:
    link, process = peer()
    assert link.ask("echo", {}, bytes(3 << 20)).view == bytes(3 << 20)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(link.ask, "hang", {}, bytes(1 << 20)) for _ in range(4)]
        assert link.ask("echo").arguments == {}
        process.kill()
        for future in asked:
            with pytest.raises(LinkLost, match="the link with peer was cut"):
                future.result(TIMEOUT)


def test_a_peer_that_is_stopped(peer: Callable[..., tuple[Link, subprocess.Popen[bytes]]]) -> None:
    """Its streams stay open and full; only its silence shows."""
    link, process = peer(timeout=3.0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(link.ask, "hang")]
        assert link.ask("echo").arguments == {}
        process.send_signal(signal.SIGSTOP)
        asked += [pool.submit(link.ask, "echo", {}, bytes(8 << 20)) for _ in range(2)]
        for future in asked:
            with pytest.raises(LinkLost, match=r"nothing was received from peer for \d+ s"):
                future.result(TIMEOUT)


def test_a_peer_notices_that_we_are_gone(
    peer: Callable[..., tuple[Link, subprocess.Popen[bytes]]],
) -> None:
    link, process = peer()
    link.close()
    assert process.wait(TIMEOUT) == 0


def test_a_long_body_is_life_enough(raw: RawEnd) -> None:
    """It takes longer than the time-out: nothing else goes over the link meanwhile, and both sides
    know that the other lives.
    """
    link, far = raw(timeout=3)
    far.hello()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "x", {}, bytes(9 << 20))
        far.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        got, began = 0, time.monotonic()
        while got < 9 << 20:
            got += len(far.sock.recv(1 << 18))
            if time.monotonic() - began < 5:
                far.send(frames.PING, 0)
                assert not link.lost.wait(0.1)
        answered = frames.encode(frames.ANSWER, 1, {})
        far.write(b"".join(answered))
        assert asked.result(TIMEOUT).arguments == {}


class Interrupted(Exception):
    """What a signal's handler raises in the main thread, as ^C does."""


def test_an_interrupt_leaves_whole_frames(raw: RawEnd) -> None:
    """The main thread is interrupted in the middle of sending: the frame is sent all the same, and
    the link can be used.
    """
    link, far = raw()
    far.hello()
    far.receive()
    body = os.urandom(8 << 20)
    received: list[bytes] = []

    def answer() -> None:
        for _ in range(2):
            _, number, _, data = far.receive()
            received.append(data)
            far.send(frames.ANSWER, number, {"arguments": {"n": number}}, b"late")

    reader = threading.Thread(target=answer)

    def interrupt(_number: int, _frame: object) -> None:
        reader.start()  # until now the body was not read, and it is too large for the buffers
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        target = bytearray(4)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(Interrupted):
            link.ask("long", {}, body, into=memoryview(target))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert link.ask("undo").arguments == {"n": 2}
    reader.join(TIMEOUT)
    assert received == [body, b""]
    assert target == bytes(4)


# -- other sides that are strange
# --------------------------------------------------------------------


def test_one_that_says_nothing(raw: RawEnd) -> None:
    link, _ = raw(patience=0.3)
    with pytest.raises(LinkLost, match="nothing was received from far"):
        _ = link.hello


@pytest.mark.parametrize(
    "said", [b"Welcome to web2!\r\n\x1b[1mEnjoy\x1b[0m", b"hi", frames.MAGIC[:2] + b"??"]
)
def test_one_that_speaks_something_else(raw: RawEnd, said: bytes) -> None:
    link, far = raw()
    far.write(said)
    with pytest.raises(HostUnreachable, match=r"far said .*: not criuctl's protocol") as info:
        _ = link.hello
    if said.startswith(b"Welcome"):
        assert "Welcome to web2! [1mEnjoy [0m" in info.value.message
    assert "bashrc" in info.value.hint
    assert "not criuctl's protocol" in far.farewell()


@pytest.mark.parametrize("theirs", [[2, 9], [0, 0]])
def test_one_of_another_age(raw: RawEnd, theirs: list[int]) -> None:
    link, far = raw()
    far.hello(protocol=theirs, criuctl="9.9.1", window="none yet")
    with pytest.raises(UnsupportedFormat) as info:
        _ = link.hello
    for text in ("9.9.1", __version__, f"{theirs[0]} to {theirs[1]}", "1 to 1"):
        assert text in info.value.message
    assert far.receive()[0] == frames.HELLO
    assert "9.9.1" in far.farewell()


def frame(
    kind: int, number: int, text: bytes, body: bytes = b"", sizes: tuple[int, int] | None = None
) -> bytes:
    """A frame as it must not be."""
    return (
        frames.HEADER.pack(frames.MAGIC, kind, number, *(sizes or (len(text), len(body))))
        + text
        + body
    )


HOSTILE = {
    "no magic": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(24),
    "unknown kind": frame(99, 0, b""),
    "endless JSON": frame(frames.ASK, 1, b"{", sizes=(frames.MAX_JSON + 1, 0)),
    "endless body": frame(frames.ASK, 1, b"{}", sizes=(2, frames.MAX_BODY + 1)),
    "all ones": b"\xff" * 64,
    "truncated JSON": frame(frames.TELL, 0, b'{"verb": "x'),
    "no mapping": frame(frames.TELL, 0, b"[1]"),
    "no text": frame(frames.TELL, 0, b""),
    "deep JSON": frame(frames.TELL, 0, b'{"verb":' + b"[" * 200_000),
    "huge number": frame(frames.TELL, 0, b'{"verb":' + b"9" * 10_000 + b"}"),
    "not UTF-8": frame(frames.TELL, 0, b'{"verb": "\xff\xfe"}'),
    "verb of no kind": frame(frames.ASK, 1, b'{"verb": 7}'),
    "arguments of no kind": frame(frames.ASK, 1, b'{"verb": "x", "arguments": 7}'),
    "ask without number": frame(frames.ASK, 0, b'{"verb": "x"}'),
    "event with a body": frame(frames.TELL, 0, b'{"verb": "x"}', b"body"),
    "event with a number": frame(frames.TELL, 1, b'{"verb": "x"}'),
    "ping with words": frame(frames.PING, 0, b"{}"),
    "answer to nothing": frame(frames.ANSWER, 77, b"{}"),
    "error of nothing": frame(frames.ERROR, 77, b"{}"),
    "second hello": frame(frames.HELLO, 0, b'{"protocol": [1, 1]}'),
    "the same ask twice": frame(frames.ASK, 5, b'{"verb": "hang"}') * 2,
    "more than agreed": b"".join(frame(frames.ASK, n, b'{"verb": "hang"}') for n in range(1, 18)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_that_breaks_the_protocol(raw: RawEnd, data: bytes) -> None:
    go = threading.Event()
    link, far = raw(lambda request: go.wait(TIMEOUT) and None)
    far.hello()
    far.write(data)
    error = reason(link)
    assert isinstance(error, LinkLost) and "far broke the protocol: " in error.message
    assert far.farewell() in error.message.replace("far broke", "you broke")
    go.set()


@pytest.mark.parametrize(
    "said",
    [
        *(
            {},
            {"protocol": 1},
            {"protocol": [1]},
            {"protocol": ["1", "1"]},
            {"protocol": [True, True]},
        ),
        *(
            {"window": 0},
            {"window": 1 << 40},
            {"timeout": -1},
            {"timeout": "x"},
            {"timeout": float("nan")},
        ),
    ],
)
def test_a_hello_that_makes_no_sense(raw: RawEnd, said: dict[str, object]) -> None:
    link, far = raw()
    if said:
        far.hello(**said)
    else:
        far.send(frames.HELLO, 0, {})
    with pytest.raises(LinkLost, match="broke the protocol"):
        _ = link.hello


@pytest.mark.parametrize(
    "said",
    [{}, {"code": "x", "message": "m"}, {"code": "x", "message": 5, "exit_code": 5}]
    + [{"code": "x", "message": "m", "exit_code": code} for code in (0, True, "1", 1 << 70)]
    + [{"code": "x", "message": "m", "exit_code": 5, "details": []}, {"bug": 5, "message": "m"}],
)
def test_an_error_that_makes_no_sense(raw: RawEnd, said: dict[str, object]) -> None:
    link, far = raw()
    far.hello()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "x")
        far.receive()
        far.send(frames.ERROR, far.receive()[1], said)
        with pytest.raises(LinkLost, match="broke the protocol"):
            asked.result(TIMEOUT)


def test_an_errors_details_cannot_pose_as_arguments(raw: RawEnd) -> None:
    link, far = raw()
    far.hello()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "x")
        far.receive()
        details = {"self": 1, "message": 2, "hint": 3, "code": 4, "a b": 5}
        far.send(
            frames.ERROR,
            far.receive()[1],
            {"code": "damaged", "exit_code": 8, "message": "m", "details": details},
        )
        with pytest.raises(CriuctlError) as info:
            asked.result(TIMEOUT)
    assert info.value.to_dict() == {
        "code": "damaged",
        "exit_code": 8,
        "message": "m",
        "hint": "",
        "a b": 5,
    }


_HELLO = b"".join(
    frames.encode(frames.HELLO, 0, {"protocol": [1, 1], "criuctl": "1", "timeout": 9, "window": 4})
)
_FRAMES = [
    _HELLO,
    *HOSTILE.values(),
    frame(frames.ASK, 3, b'{"verb": "x", "arguments": {"a": 1}}', b"body" * 50),
    frame(frames.TELL, 0, b'{"verb": "x"}'),
    frame(frames.PING, 0, b""),
    frame(frames.BYE, 0, b'{"reason": "enough"}'),
]
_HEADERS = st.builds(
    lambda *values: struct.pack("!4sB3sQII", frames.MAGIC, *values),
    st.integers(0, 9),
    st.sampled_from([bytes(3), b"\1\2\3"]),
    st.integers(0, 3),
    st.integers(0, 40),
    st.integers(0, 40),
)


@given(
    st.booleans(),
    st.lists(st.one_of(st.sampled_from(_FRAMES), _HEADERS, st.binary(max_size=60)), max_size=8),
    st.data(),
)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_comes_the_link_ends_with_it(
    greet: bool, pieces: list[bytes], data: st.DataObject
) -> None:
    stream = bytearray((_HELLO if greet else b"") + b"".join(pieces))
    if stream and data.draw(st.booleans()):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    one, other = socket.socketpair()
    fd = one.detach()
    with other, Link(fd, fd, lambda request: Answer({}, request.body), name="far") as link:
        link.start()
        far = Raw(other)
        try:
            far.write(bytes(stream))
            far.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was ended before all of it was sent
        assert isinstance(reason(link), LinkLost | HostUnreachable | UnsupportedFormat)


def test_a_frame_of_very_many_values_is_refused_before_any_is_made() -> None:
    """Three bytes each, which take seventy in memory; what we say ourselves in as many values is
    understood.
    """
    with pytest.raises(frames.Broken, match="values"):
        frames.decode_json(b'{"a":[' + b"[]," * (1 << 20) + b"0]}")
    said = {"many": [0] * (1 << 20), "more": [{"a": []}] * 10}
    head = frames.encode(frames.TELL, 0, said)[0]
    assert frames.decode_json(head[frames.HEADER.size :]) == said
