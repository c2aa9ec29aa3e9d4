"""When a supervisor snapshots, waits, gives up or takes over: as functions of time alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.checkpoint.leases import Head
from criuctl.checkpoint.manifest import SessionRef
from criuctl.errors import UsageError
from criuctl.ops.supervising.context import SupervisorSettings
from criuctl.ops.supervising.decisions import GAP, End, Guard, LeaseWatch, Restart, Schedule, period

HEAD = Head(
    SessionRef("web", "ab" * 16),
    "a",
    "host-a",
    1,
    3,
    "held",
    "00",
    "2026-01-01T00:00:00Z",
    5,
    beat=7,
    ttl=8000,
)
spans = st.floats(0.5, 500)


def run(
    schedule: Schedule, outcomes: list[tuple[float, bool]], start: float = 1000.0
) -> list[tuple[float, float, bool]]:
    """Take each snapshot as soon as it is due; it lasts as long as said, and succeeds or not:
    (begun, ended, stored).
    """
    now, taken = start, []
    for lasts, good in outcomes:
        wait = schedule.wait(now)
        assert wait is not None
        assert wait == 0 or schedule.due(now + wait * 0.99) is None
        now += wait + 1e-6
        assert schedule.due(now) is not None
        began, now = now, now + lasts
        if good:
            schedule.taken(began, now)
        else:
            schedule.failed(now)
        taken.append((began, now, good))
    return taken


@given(
    spans,
    st.lists(st.tuples(st.floats(0.01, 1000), st.booleans()), min_size=1, max_size=30),
    st.none() | st.floats(0, 1000),
)
def test_neither_a_storm_nor_a_gap(
    every: float, outcomes: list[tuple[float, bool]], age: float | None
) -> None:
    """However long snapshots take and however often they fail, the next comes after a rest, and not
    much later than that.
    """
    schedule = Schedule(every)
    schedule.begin(1000.0, age)
    first = 1000.0 if age is None else 1000.0 + max(0.0, every - age)
    taken = run(schedule, outcomes)
    assert abs(taken[0][0] - first) < 0.01
    failures = 0
    for (began, ended, good), (following, _, _) in pairwise(taken):
        rest = following - ended
        failures = 0 if good else failures + 1
        if good:
            assert rest > min(every, ended - began) - 0.01
            assert (
                rest <= every + 0.01
                and following >= began + every - min(every / 2, 1.5 * (ended - began)) - 0.01
            )
            if ended - began < every / 4:  # one that takes as long is stored within the period
                assert following + (ended - began) < began + every
        else:
            assert GAP - 0.01 < rest < max(every, GAP) + 0.01 and rest < 60.01
            assert rest >= min(max(every, GAP), 60, GAP * 2 ** (failures - 1)) - 0.01
    assert (schedule.failures == 0) == taken[-1][2]


@given(spans, st.floats(0, 2000))
def test_more_is_lost_than_may_be(most: float, later: float) -> None:
    schedule = Schedule(period(0, terminal=False, max_loss=most), max_loss=most)
    assert 0 < schedule.every <= most
    schedule.begin(0.0, 0.0)
    schedule.taken(10.0, 12.0)
    assert schedule.loss(10 + later) == pytest.approx(later)
    assert schedule.at_risk(10 + later) == (schedule.loss(10 + later) > most)
    assert not Schedule(60).at_risk(1e9)


@pytest.mark.parametrize(("step", "idle"), [(False, 5.0), (True, 0.0), (True, 5.0)])
def test_a_terminal_that_has_printed_something(step: bool, idle: float) -> None:
    schedule = Schedule(0, idle, step)
    schedule.begin(0.0, 3.0)
    assert schedule.due(1e6) is None and schedule.wait(1.0) is None
    assert schedule.seen(1.0, 100, at_prompt=True) is None  # as it was found
    assert schedule.seen(50.0, 100, at_prompt=True) is None
    assert schedule.seen(51.0, 120) is None
    assert schedule.seen(55.0, 130, at_prompt=False) is None
    assert schedule.seen(56.0, 130, at_prompt=True) == ("step" if step else None)
    assert schedule.seen(60.0, 130) == ("idle" if idle else None)
    schedule.taken(60.0, 61.0)
    assert schedule.seen(70.0, 130, at_prompt=True) is None
    assert schedule.seen(70.2, 140, at_prompt=True) == ("step" if step else None)
    schedule.failed(71.0)
    assert schedule.seen(71.5, 150, at_prompt=True) is None and schedule.due(72.0) == "again"
    new = Schedule(0, idle, step)
    new.begin(0.0, None)
    assert new.due(0.0) == "again"  # without any checkpoint, one at once


def test_periods() -> None:
    assert [period(5, terminal=True, max_loss=1), period(0, terminal=False, max_loss=0)] == [5, 60]
    assert [period(0, terminal=True, max_loss=0), period(0, terminal=True, max_loss=10)] == [0, 5]
    SupervisorSettings(every=5, max_loss=5).check()
    with pytest.raises(UsageError, match="every 60 s cannot keep the loss below 30 s"):
        SupervisorSettings(every=60, max_loss=30).check()
    with pytest.raises(UsageError, match="every 0 s"):
        SupervisorSettings(every=0).check()
    with pytest.raises(UsageError, match="a lease of 0 s"):
        SupervisorSettings(lease=0).check()


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["failed", "soon", "late"]), spans), max_size=30),
)
def test_what_cannot_live_is_given_up(limit: int, events: list[tuple[str, float]]) -> None:
    guard, row, now = Guard(limit, 10.0, 1.0, 100.0), 0, 0.0
    guard.died(now)
    assert guard.delay() == 0 and not guard.exhausted
    for kind, span in events:
        if kind == "failed":
            guard.failed()
            row += 1
        else:
            guard.restored(now)
            now += 9.9 if kind == "soon" else 10 + span
            guard.died(now)
            row = row + 1 if kind == "soon" else 0
        assert guard.exhausted == (row >= limit)
        assert guard.delay() == (0.0 if row == 0 else min(100.0, 2.0 ** (row - 1)))
        if guard.exhausted:
            break


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 3.9), st.sampled_from(["same", "beat", "blind", "released", "none"])
        ),
        max_size=60,
    )
)
def test_a_lease_runs_out_only_before_our_eyes(looks: list[tuple[float, str]]) -> None:
    """For its whole time to live it was looked at, never long apart, and always was the same."""
    watch, head, now, since = LeaseWatch(), HEAD, 0.0, None
    for pause, what in looks:
        now += pause
        head = head.with_use(beat=head.beat + 1) if what == "beat" else head
        shown = {"blind": None, "none": None, "released": head.with_use(state="released")}.get(
            what, head
        )
        expired = watch.look(now, shown)
        if what in ("same", "beat"):
            since = now if since is None or what == "beat" else since
            assert expired == (now - since > 8)
        else:
            since = None
            assert not expired


def test_a_lease_that_is_not_renewed_at_all_never_runs_out_and_a_late_look_is_none() -> None:
    for never in (HEAD.with_use(ttl=0), HEAD.with_use(state="released")):
        watch = LeaseWatch()
        assert not any(watch.look(float(now), never) for now in range(1000))
    watch = LeaseWatch()
    assert not watch.look(0.0, HEAD) and not watch.look(3.0, HEAD) and not watch.look(100.0, HEAD)
    assert not watch.look(103.0, HEAD) and watch.pause(5.0) == 1.0
    # Another number does not make it another beat: as when a take-over was undone.
    assert not watch.look(106.0, HEAD.with_use(sequence=9, nonce="11")) and watch.look(108.5, HEAD)


@pytest.mark.parametrize(
    ("end", "policies"),
    [
        (End(0), {"always"}),
        (End(3), {"always", "on-failure"}),
        (End(None, 9), {"always", "on-failure", "never"}),
        (End(), {"always", "on-failure", "never"}),
    ],
)
def test_who_comes_back(end: End, policies: set[Any]) -> None:
    wanted: list[Restart] = ["always", "on-failure", "never"]
    assert {policy for policy in wanted if end.restarts(policy)} == policies
    assert end.text
