"""Retention rules: what they keep, and what holds whatever they are."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.errors import ConfigError, UsageError
from criuctl.host.retention import (
    Decision,
    Rules,
    decide,
    label,
    moment,
    patience,
    policies,
    policy,
    seconds,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def made(
    number: int, at: datetime, *, pinned: bool = False, labels: dict[str, str] | None = None
) -> CheckpointSummary:
    return CheckpointSummary(
        id=f"{number:032x}",
        session="web",
        session_id="5" * 32,
        number=number,
        incarnation=1,
        created=at.isoformat(),
        host="h",
        labels=labels or {},
        pinned=pinned,
    )


def kept(decisions: list[Decision]) -> set[int]:
    return {d.checkpoint.number for d in decisions if d.keep}


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointSummary]:
    hours = draw(st.lists(st.integers(-50, 24 * 400), max_size=40))
    return [
        made(
            number,
            NOW - timedelta(hours=age, minutes=draw(st.integers(0, 59))),
            pinned=draw(st.integers(0, 9)) == 0,
            labels={"k": "v"} if draw(st.booleans()) else {},
        )
        for number, age in enumerate(sorted(hours, reverse=True), 1)
    ]


COUNT = st.integers(0, 12)
RULES = st.builds(
    Rules,
    last=COUNT,
    hourly=COUNT,
    daily=COUNT,
    weekly=COUNT,
    monthly=COUNT,
    within=st.sampled_from([0.0, 3600.0, 86400.0, 30 * 86400.0]),
    labels=st.sampled_from([(), (("k", "v"),), (("k", "other"),)]),
)


@given(histories(), RULES)
def test_what_is_kept_has_a_rule_and_what_goes_has_none(
    history: list[CheckpointSummary], rules: Rules
) -> None:
    decisions = decide(history, rules, NOW)
    assert sorted(d.checkpoint.number for d in decisions) == [c.number for c in history]
    for decision in decisions:
        c = decision.checkpoint
        assert decision.keep == bool(decision.reasons)
        if c.pinned or (rules.within and NOW - moment(c) <= timedelta(seconds=rules.within)):
            assert decision.keep
        if c.labels.get("k") == "v" and ("k", "v") in rules.labels:
            assert decision.keep
    newest = [d.checkpoint.number for d in decisions][: rules.last]
    assert set(newest) <= kept(decisions)
    for name, span in (
        ("hourly", "%Y%m%d%H"),
        ("daily", "%Y%m%d"),
        ("weekly", "%G%V"),
        ("monthly", "%Y%m"),
    ):
        limit = getattr(rules, name)
        periods = sorted({moment(d.checkpoint).strftime(span) for d in decisions}, reverse=True)[
            :limit
        ]
        covered = {moment(d.checkpoint).strftime(span) for d in decisions if d.keep}
        assert set(periods) <= covered
        assert sum(any(r.startswith(f"{name} ") for r in d.reasons) for d in decisions) == len(
            periods
        )


@given(histories(), RULES)
def test_pruning_twice_changes_nothing(history: list[CheckpointSummary], rules: Rules) -> None:
    first = decide(history, rules, NOW)
    assert all(d.keep for d in decide([d.checkpoint for d in first if d.keep], rules, NOW))


@given(histories(), RULES, RULES)
def test_more_rules_never_remove_more(
    history: list[CheckpointSummary], one: Rules, other: Rules
) -> None:
    counts = {
        name: max(getattr(one, name), getattr(other, name))
        for name in ("last", "hourly", "daily", "weekly", "monthly")
    }
    both = Rules(**counts, within=max(one.within, other.within), labels=one.labels + other.labels)
    assert kept(decide(history, one, NOW)) | kept(decide(history, other, NOW)) <= kept(
        decide(history, both, NOW)
    )


@given(histories(), RULES, st.randoms())
def test_the_order_does_not_matter(
    history: list[CheckpointSummary], rules: Rules, rng: object
) -> None:
    shuffled = list(history)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(shuffled, rules, NOW) == decide(history, rules, NOW)


def test_rules_by_example() -> None:
    # ten days, four a day
    history = [made(n, NOW - timedelta(hours=6 * (40 - n))) for n in range(1, 41)]
    assert kept(decide(history, Rules(last=2), NOW)) == {39, 40}
    daily = decide(history, Rules(daily=3), NOW)
    assert [d.checkpoint.number for d in daily if d.keep] == [40, 37, 33]
    assert daily[0].reasons == ("daily 1 of 3",) and daily[1].reasons == ()
    assert kept(decide(history, Rules(within=86400.0), NOW)) == {36, 37, 38, 39, 40}
    protected = decide(history, Rules(last=1), NOW, protected={history[0].id: "because"})
    assert kept(protected) == {1, 40} and protected[-1].reasons == ("because",)
    assert decide([], Rules(last=1), NOW) == []


def test_a_time_that_cannot_be_read_is_the_oldest() -> None:
    odd = replace(made(9, NOW), created="yesterday")
    assert kept(decide([odd, made(1, NOW - timedelta(days=900))], Rules(daily=1), NOW)) == {1}


def test_the_newest_is_the_one_with_the_highest_number() -> None:
    """The clock of the host that has the session now is an hour behind that of the one which had it
    before.
    """
    history = [made(n, NOW - timedelta(minutes=4 - n)) for n in (1, 2, 3)]
    history += [made(n, NOW - timedelta(minutes=60 + 6 - n)) for n in (4, 5)]
    decisions = decide(history, Rules(last=2), NOW)
    assert kept(decisions) == {4, 5} and [d.checkpoint.number for d in decisions] == [5, 4, 3, 2, 1]
    assert kept(decide(history, Rules(daily=1), NOW)) == {5}
    assert kept(decide(history, Rules(hourly=2), NOW)) == {3, 5}
    # imported
    assert kept(
        decide([*history, made(6, NOW - timedelta(days=99))], Rules(last=1, daily=1), NOW)
    ) == {5, 6}


@pytest.mark.parametrize(
    ("text", "span"),
    [("7d", 604800), ("36h", 129600), ("1d12h", 129600), ("90s", 90), ("0", 0), ("2w", 1209600)],
)
def test_spans(text: str, span: float) -> None:
    assert seconds(text) == span


def test_a_span_longer_than_any_calendar_keeps_everything() -> None:
    history = [made(1, NOW), replace(made(2, NOW), created="yesterday")]
    assert kept(decide(history, Rules(within=seconds("999999y" * 9)), NOW)) == {1, 2}


@pytest.mark.parametrize("text", ["", "7", "d", "7 d", "-1d", "1d2", "d7", "1x", "00"])
def test_no_spans(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text)


def test_nothing_is_waited_for_longer_than_a_clock_counts() -> None:
    assert (patience(None), patience("90s"), patience("366d")) == (0, 90, 366 * 86400)
    for text in ("", "367d", "300y", "999999y"):
        with pytest.raises(UsageError):
            patience(text)


def test_policies_go_by_the_first_pattern_that_fits() -> None:
    found = policies(
        {
            "web-*": {"keep_last": 3, "keep_label": "keep=yes"},
            "*": {"keep_within": "7d", "keep_daily": 14},
        }
    )
    assert policy("web-1", found) == Rules(last=3, labels=(("keep", "yes"),))
    assert policy("db", found) == Rules(within=604800.0, daily=14)
    assert policy("db", found[:1]) is None
    for wrong in (
        {"keep_lst": 1},
        {"last": 1},
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_within": "x"},
        {"keep_label": ["x"]},
    ):
        with pytest.raises(ConfigError, match=r"retention of '\*'"):
            policies({"*": wrong})
    with pytest.raises(UsageError):
        label("x")


def test_a_plan_for_ten_thousand_is_quick() -> None:
    history = [made(n, NOW - timedelta(hours=n)) for n in range(10_000)]
    began = time.monotonic()
    decisions = decide(
        history, Rules(last=5, hourly=48, daily=30, weekly=12, monthly=12, within=86400.0), NOW
    )
    assert time.monotonic() - began < 5  # a tenth of a second where nothing else runs
    assert 80 < len(kept(decisions)) < 200
