"""A session that is ended when its time is over: with a clock and a timer of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from criuctl.session.holder.time_to_live import TimeToLive


class Site:
    """A holder as its `TimeToLive` sees it."""

    def __init__(self, ends: object) -> None:
        self.now, self.killed, self.busy = 1000.0, False, False
        self.state, self.over = "running", False
        self.facts = {"ends": ends}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        me: Any = self
        self.limit = TimeToLive(me, me, me, me, me, busy=lambda: self.busy)

    @property
    def identity(self) -> Site:
        return self

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, action))

    def begin(self, _grace: float, _done: Callable[[int], None]) -> None:
        self.killed = True

    def write(self, *_args: Any, **_facts: Any) -> None: ...

    def emit(self, *_args: Any, **_facts: Any) -> None: ...

    def pass_until(self, moment: float) -> None:
        """Let the clock go on, and do what is due."""
        while self.timers and self.timers[0][0] <= moment:
            self.now, action = self.timers.pop(0)
            action()
        self.now = moment


def _site(monkeypatch: pytest.MonkeyPatch, ends: object) -> Site:
    site = Site(ends)
    monkeypatch.setattr(time, "time", lambda: site.now)
    site.limit.begin()
    return site


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    site = _site(monkeypatch, 1100)
    site.pass_until(1099)
    assert not site.killed
    site.pass_until(1101)
    assert site.killed and not site.timers


def test_not_while_a_dump_has_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    site = _site(monkeypatch, 1010)
    site.busy = True
    site.pass_until(1020)
    assert not site.killed
    site.busy = False
    site.pass_until(1021)
    assert site.killed


def test_the_clock_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at often enough."""
    site = _site(monkeypatch, 100000)
    site.now = 100000.0
    site.pass_until(100031)
    assert site.killed


def test_a_checkpointed_session_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    site = _site(monkeypatch, 1010)
    site.state = "checkpointed"
    site.pass_until(1020)
    site.state = "running"
    site.pass_until(1021)
    assert site.killed


@pytest.mark.parametrize("ends", [None, "tomorrow"])
def test_without_a_time_it_is_left_alone(monkeypatch: pytest.MonkeyPatch, ends: object) -> None:
    site = _site(monkeypatch, ends)
    assert not site.timers and not site.killed
