"""A session that stands still when this host is no longer confirmed as its home: with a clock and a
timer of the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from criuctl.session.holder import self_fence
from criuctl.session.holder.self_fence import BY, SelfFence


@dataclass(eq=False)
class Timer:
    due: float
    action: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Site:
    """A holder as its `SelfFence` sees it."""

    def __init__(self) -> None:
        self.now, self.done, self.events = 100.0, list[str](), list[str]()
        self.state, self.halted = "running", False
        self.paused_by: dict[str, Any] | None = None
        self.made: list[Timer] = []
        self.seizing = False
        me: Any = self
        self.fence = SelfFence(me, me, me, me, me, seizing=lambda: self.seizing)

    @property
    def timers(self) -> list[Timer]:
        return sorted(
            (timer for timer in self.made if not timer.cancelled), key=lambda timer: timer.due
        )

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        self.made.append(Timer(self.now + seconds, action))
        return self.made[-1]

    def freeze(self) -> tuple[str, int]:
        self.done.append(f"freeze {self.now:.2f}")
        return "cgroup2", 1

    def thaw(self) -> None:
        self.done.append(f"thaw {self.now:.2f}")

    def write(self, *_args: Any, **_facts: Any) -> None: ...

    def emit(self, event: str, **_facts: Any) -> None:
        self.events.append(event)

    def set_state(self, state: str) -> None:
        self.state = state

    def pass_time(self, until: float) -> None:
        """Time passes, and the timers come; at most so many as make sense."""
        for _ in range(1000):
            if not self.timers or self.timers[0].due > until:
                self.now = until
                return
            timer = self.timers[0]
            self.now = max(self.now, timer.due)
            self.made.remove(timer)
            timer.action()
        raise AssertionError("it looks all the time")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site()
    monkeypatch.setattr(self_fence, "clock", lambda: site.now)
    return site


def test_it_stands_still_when_the_time_is_over_and_goes_on_when_there_is_more(site: Site) -> None:
    site.fence.extend(3)
    site.pass_time(102)
    site.fence.extend(3)
    site.pass_time(104.99)
    assert site.done == []
    site.pass_time(120)
    assert (site.done, site.state, site.paused_by) == (["freeze 105.00"], "paused", BY)
    site.fence.extend(3)
    now: tuple[object, ...] = (site.done[1:], site.state, site.paused_by)
    assert now == (["thaw 120.00"], "running", None)
    site.pass_time(200)
    assert site.done[2:] == ["freeze 123.00"] and site.events == ["paused", "resumed", "paused"]
    site.fence.extend(0)
    site.pass_time(300)
    assert (site.done[3:], site.timers) == (["thaw 200.00"], [])


def test_it_counts_while_the_host_sleeps(site: Site) -> None:
    site.fence.extend(1000)
    site.pass_time(100.1)
    site.now += 5000  # timers have not come meanwhile
    site.pass_time(site.now)
    assert len(site.done) == 1


def test_a_tree_in_the_hands_of_a_dump_is_waited_for(site: Site) -> None:
    site.seizing = True
    site.fence.extend(1)
    site.pass_time(102)
    assert site.done == []
    site.seizing = False
    site.pass_time(102.1)
    assert len(site.done) == 1
    site.seizing = True
    site.fence.extend(1)
    assert len(site.done) == 1
    site.seizing = False
    site.pass_time(102.2)
    assert (len(site.done), site.state) == (2, "running")


@pytest.mark.parametrize("halted", [False, True])
def test_what_a_person_has_paused_stays_so(site: Site, halted: bool) -> None:
    site.state, site.halted, site.paused_by = "paused", halted, {"name": "somebody"}
    site.fence.extend(1)
    site.pass_time(110)
    site.fence.extend(1)
    assert site.done == [] and site.state == "paused"
    site.pass_time(110.5)
    site.state, site.paused_by = "running", None  # resumed
    site.pass_time(112)
    assert site.done == ["freeze 111.00"] or site.done == ["freeze 111.10"]


def test_what_has_ended_is_left_alone(site: Site) -> None:
    site.fence.extend(1)
    site.state = "exited"
    site.pass_time(110)
    assert (site.done, site.fence.until, site.timers) == ([], None, [])
