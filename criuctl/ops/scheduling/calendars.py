"""Recurring points in time, as far as cron can express them.

Schedules are written in systemd's calendar language (``daily``, ``Mon..Fri 08:30``, ``*:0/15``).
Where systemd runs, it interprets them. Elsewhere this module reads the part of the language that a
crontab line can express. Years, seconds, time zones, days counted from a month's end, and a day of
the month together with a day of the week (cron takes either of them) are refused, and the error
names the part.

All is kept as sets of numbers, so the crontab and the reported next run cannot differ.
"""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta

from msgspec import Struct

from ...errors import UsageError

_WORDS = {
    "minutely": "*:*",
    "hourly": "*:00",
    "daily": "*-*-* 00:00",
    "weekly": "Mon *-*-* 00:00",
    "monthly": "*-*-01 00:00",
    "quarterly": "*-01,04,07,10-01 00:00",
    "semiannually": "*-01,07-01 00:00",
    "yearly": "*-01-01 00:00",
    "annually": "*-01-01 00:00",
}
_DAYS = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_PART = re.compile(r"(?:(\*)|([0-9]{1,2})(?:\.\.([0-9]{1,2}))?)(?:/([0-9]{1,2}))?")
_BOUNDS = {"minute": (0, 59), "hour": (0, 23), "day": (1, 31), "month": (1, 12)}
_YEARS = 9  # the longest wait for a 29 February
_HINT = (
    "cron knows words such as daily, and [WEEKDAYS] [*-MONTH-DAY] [HOUR:MINUTE]: '03:30', "
    "'Mon..Fri *:0/15', '*-*-01 04:00'."
)


class CronTime(Struct, frozen=True):
    """The five fields of a crontab's line, as sets."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday

    def __str__(self) -> str:
        fields = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        sizes = (60, 24, 31, 12, 7)
        return " ".join(
            "*" if len(f) == n else ",".join(map(str, sorted(f)))
            for f, n in zip(fields, sizes, strict=True)
        )

    def after(self, moment: datetime) -> datetime | None:
        """Return the first matching minute after `moment`, in the same (local) time; None if there
        is none.
        """
        begin = moment.replace(second=0, microsecond=0) + timedelta(minutes=1)
        day = begin.date()
        for _ in range(_YEARS * 366):
            if self._on(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        found = begin.replace(
                            year=day.year, month=day.month, day=day.day, hour=hour, minute=minute
                        )
                        if found >= begin:
                            return found
            day += timedelta(days=1)
        return None

    def _on(self, day: date) -> bool:
        return (
            day.day in self.days
            and day.month in self.months
            and day.isoweekday() % 7 in self.weekdays
        )


def cron_time(calendar: str) -> CronTime:
    """Return `calendar` for cron; raise `UsageError` for what cron cannot express."""
    words = _WORDS.get(calendar.strip().lower(), calendar).split()
    weekdays, days, months, hours, minutes = "", "*", "*", "0", "0"
    try:
        if words and words[0][0].isalpha():
            weekdays = words.pop(0)
        if words and "-" in words[0]:
            year, months, days = ("*", *words.pop(0).split("-"))[-3:]
            if year != "*":
                raise UsageError("it names a year")
        if words and ":" in words[0]:
            hours, minutes, *seconds = words.pop(0).split(":")
            if seconds not in ([], ["0"], ["00"]):
                raise UsageError("it counts seconds")
        if words or calendar.strip() == "":
            raise UsageError(f"{words[0]!r} in it is not understood" if words else "it is empty")
        found = CronTime(
            _numbers(minutes, "minute"),
            _numbers(hours, "hour"),
            _numbers(days, "day"),
            _numbers(months, "month"),
            _weekdays(weekdays),
        )
        if len(found.days) < 31 and len(found.weekdays) < 7:
            raise UsageError(
                "it has days of the week and days of the month, and cron takes either of them"
            )
        if found.after(datetime(2000, 1, 1)) is None:  # noqa: DTZ001  # any date: times of cron have no time zone
            raise UsageError("there is no such day")
    except (UsageError, ValueError) as error:
        raise UsageError(f"{calendar!r} cannot be said to cron: {error}", hint=_HINT) from None
    return found


def _numbers(text: str, what: str) -> frozenset[int]:
    low, high = _BOUNDS[what]
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"{part!r} is no {what}")
        star, first, last, step = match.groups()
        begin = low if star else int(first)
        end = high if star or (step and not last) else int(last or first)
        if not low <= begin <= end <= high or step == "0" * len(step or ""):
            raise UsageError(f"{part!r} is no {what} ({low} to {high})")
        found.update(range(begin, end + 1, int(step or 1)))
    return frozenset(found)


def _weekdays(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(",") if text else ("sun..sat",):
        first, dots, last = part.partition("..")
        begin = _weekday(first)
        end = _weekday(last) if dots else begin
        found.update((begin + i) % 7 for i in range((end - begin) % 7 + 1))
    return frozenset(found)


def _weekday(text: str) -> int:
    wanted = text.lower()
    number = next((i for i, name in enumerate(_DAYS) if wanted in (name, name[:3])), None)
    if number is None:
        raise UsageError(f"{text!r} is no day of the week")
    return number


def cron_every(seconds: float) -> CronTime:
    """Return a period for cron, which must divide an hour or a day; raise `UsageError`."""
    every, every_day = frozenset(range(24)), frozenset(range(1, 32))
    minutes, rest = divmod(seconds, 60)
    months, weekdays = frozenset(range(1, 13)), frozenset(range(7))
    if not rest and minutes and minutes <= 60 and 60 % minutes == 0:
        return CronTime(frozenset(range(0, 60, int(minutes))), every, every_day, months, weekdays)
    if not rest and minutes and minutes % 60 == 0 and 1440 % minutes == 0:
        return CronTime(
            frozenset({0}), frozenset(range(0, 24, int(minutes) // 60)), every_day, months, weekdays
        )
    if seconds == 7 * 86400:
        return CronTime(frozenset({0}), frozenset({0}), every_day, months, frozenset({1}))
    raise UsageError(
        f"a period of {seconds:g} s cannot be said to cron",
        hint=(
            "Without systemd a period is of minutes that divide an hour, of hours that divide a "
            "day, or 1d, or 1w."
        ),
    )
