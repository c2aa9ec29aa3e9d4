"""The holder's loop: what is waited for is what was asked for last."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from criuctl.session.holder.event_loop import READ, WRITE, Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def turn(loop: Loop) -> None:
    """One round of the loop, which has something to do or does nothing."""

    def end() -> None:
        loop.running = False

    loop.soon(end)
    loop.run()


def test_the_events_asked_for_last_count(loop: Loop) -> None:
    got: list[tuple[str, int]] = []
    reading, writing = os.pipe()
    os.write(writing, b"x")
    for events, handler in (
        (WRITE, "old"),
        (READ, "old"),
        (READ, "new"),
        (0, "none"),
        (READ, "again"),
    ):
        loop.watch(reading, events, lambda found, handler=handler: got.append((handler, found)))  # type: ignore[misc]
        turn(loop)
    assert got == [("old", READ), ("new", READ), ("again", READ)]
    loop.unwatch(reading)
    turn(loop)
    os.close(reading)
    os.close(writing)
    assert len(got) == 3


def test_a_number_that_is_used_again_is_another_descriptor(loop: Loop) -> None:
    got: list[int] = []
    for byte in (b"a", b"b"):
        reading, writing = os.pipe()  # the same numbers both times
        os.write(writing, byte)
        loop.watch(reading, READ, lambda found: got.append(reading))  # noqa: B023  # the numbers are the same
        turn(loop)
        loop.unwatch(reading)
        os.close(reading)
        os.close(writing)
    assert len(got) == 2 and got[0] == got[1]


def test_timers_come_in_order_and_a_cancelled_one_does_not(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[str] = []

    def end() -> None:
        loop.running = False

    now = time.monotonic()
    # all are asked for at the same time, however busy the machine is
    with monkeypatch.context() as patch:
        patch.setattr(
            "criuctl.session.holder.event_loop.time", SimpleNamespace(monotonic=lambda: now)
        )
        loop.after(0.02, lambda: got.append("second"))
        loop.after(0.01, lambda: got.append("cancelled")).cancel()
        loop.after(0.0, lambda: got.append("first"))
        loop.after(0.03, end)
    loop.run()
    assert got == ["first", "second"]
