"""How a store grows, computed from the summaries of its checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.ops.storing.growth import RECENT, growth

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)


def made(session: str, hours: float, stored: int, **more: int) -> CheckpointSummary:
    return CheckpointSummary(
        id="ab" * 16,
        session=session,
        session_id="cd" * 16,
        number=int(hours) + 1,
        incarnation=1,
        created=(BEGIN + timedelta(hours=hours)).isoformat().replace("+00:00", "Z"),
        host="here",
        bytes={"memory": 1000, "files": 24, "stored": stored, **more},
    )


def test_the_pace_is_that_of_the_last_ones_and_the_first_of_a_session_is_no_growth() -> None:
    hourly = [made("web", hour, 5_000 if hour < 20 else 100) for hour in range(40)]
    once = [made("db", 0, 7_000_000)]
    daily = [made("cron", 24 * day, 90_000 if not day else 48) for day in range(3)]
    found = growth([*daily, *reversed(hourly), *once])
    assert [one.session for one in found] == ["web", "cron", "db"]
    web, cron, db = found
    assert (web.checkpoints, web.plain, web.stored, web.recent, web.per_day) == (
        40,
        40 * 1024,
        102_000,
        100,
        100 * 20 + 5_000 * 4,  # in a day
    )
    assert (cron.recent, cron.per_day, cron.newest) == (48, 48, daily[-1].created)
    assert (db.recent, db.per_day, db.stored) == (0, None, 7_000_000)
    assert len(hourly) > RECENT


def test_less_than_a_day_says_nothing_of_a_day() -> None:
    """Two snapshots in two seconds would be gigabytes a day."""
    for hours, expected in ((0.001, None), (23.9, None), (24, 30), (48, 15)):
        (found,) = growth([made("web", 0, 900), made("web", hours, 30)])
        assert (found.per_day, found.recent) == (expected, 30)
    often = [made("web", number / 60, 2) for number in range(60 * 24 * 2)]  # each minute
    assert growth(often)[0].per_day == 2 * 60 * 24


def test_what_tells_nothing_is_nothing() -> None:
    assert growth([]) == []
    twins = [made("web", 1, 10), made("web", 1, 20)]  # two hosts at once
    assert (growth(twins)[0].per_day, growth(twins)[0].recent) == (None, 20)
    assert growth([replace(made("web", 1, 0), bytes={}, created="never")])[0].stored == 0
