"""Decide which checkpoints to keep, by rules; a pure function of a list.

`decide` looks at each session separately.  Rules are independent: a checkpoint is kept if any rule
keeps it.

    last N                     the N newest
    hourly, daily, ... N       the newest one of each of the N last hours, days, ISO weeks, months
                               in which there is one
    within SPAN                those younger than that
    label K=V                  those with the label

The numbers show which of two is newer, as in a restore: hosts' clocks differ, and an imported
checkpoint is the newest however old it is.  Only periods and spans use the time at which a
checkpoint was made.  Hours and days are those of UTC, so all hosts decide alike.  Pinned
checkpoints are always kept, and so are those that the caller names as `protected`.  So pruning
twice changes nothing, and another rule, or a larger number, never removes what was kept before.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ..checkpoint.summary import CheckpointSummary

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
_SPAN = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(s|min|m|h|d|w|y)")
_MOST = 1 << 31
LONGEST = 366 * 86400.0  # seconds that anything is waited for

_BUCKETS: dict[str, Callable[[datetime], tuple[int, ...]]] = {
    "hourly": lambda t: (t.year, t.month, t.day, t.hour),
    "daily": lambda t: (t.year, t.month, t.day),
    "weekly": lambda t: t.isocalendar()[:2],
    "monthly": lambda t: (t.year, t.month),
}


def seconds(text: str) -> float:
    """Return the span of time in seconds of ``7d``, ``36h``, ``1d12h`` or ``0``; `UsageError`."""
    if text == "0":
        return 0.0
    pieces = _SPAN.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise UsageError(
            f"{text!r} is not a span of time",
            hint="Write a number and s, min, h, d, w or y: 36h, 7d, 1d12h.",
        )
    return sum(float(number) * _UNITS[unit] for number, unit in pieces)


def patience(text: str | None) -> float:
    """Return the span of a wait in seconds, 0 without a text; `UsageError` also for one beyond
    `LONGEST`.
    """
    found = seconds(text) if text is not None else 0.0
    if found > LONGEST:
        raise UsageError(f"{text!r} is longer than 366 days")
    return found


class Rules(Struct, frozen=True):
    """What to keep of one session; 0 and empty are no rule."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    within: float = 0.0  # seconds
    labels: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self != Rules()

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str) -> Rules:
        """Return the rules of ``{keep_last: 3, keep_within: 7d, keep_label: [k=v], ...}``;
        `ConfigError` names `where`.
        """
        made: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).removeprefix("keep_")
            try:
                if name == "label":
                    texts = [value] if isinstance(value, str) else list(value)
                    made["labels"] = tuple(label(text) for text in texts)
                elif name == "within":
                    made["within"] = seconds(str(value))
                elif f"keep_{name}" == key and name in set(cls.__struct_fields__) - {"labels"}:
                    if (
                        isinstance(value, bool)
                        or not isinstance(value, int)
                        or not 0 < value < _MOST
                    ):
                        raise UsageError(f"{key} must be a number above 0, not {value!r}")
                    made[name] = value
                else:
                    raise UsageError(f"unknown rule {key!r}")
            except (UsageError, TypeError, AttributeError) as error:
                known = (
                    "keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_within, "
                    "keep_label"
                )
                raise ConfigError(f"{where}: {error}", hint=f"Known rules: {known}.") from None
        return cls(**made)


def label(text: str) -> tuple[str, str]:
    """Split ``K=V``; `UsageError`."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"{text!r} is no label", hint="Write KEY=VALUE.")
    return key, value


class Decision(Struct, frozen=True):
    """The decision on one checkpoint, and the rules for it; without any, it is removed."""

    checkpoint: CheckpointSummary
    reasons: tuple[str, ...]

    @property
    def keep(self) -> bool:
        """Return whether it stays."""
        return bool(self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as ``list`` shows it, ``keep`` and ``rules``."""
        return {**self.checkpoint.to_dict(), "keep": self.keep, "rules": list(self.reasons)}


def decide(
    checkpoints: Iterable[CheckpointSummary],
    rules: Rules,
    now: datetime,
    *,
    protected: Mapping[str, str] | None = None,
) -> list[Decision]:
    """Decide on each of one session's checkpoints, newest first; `protected` maps ids to the reason
    why they stay.
    """
    ordered = sorted(checkpoints, key=lambda c: (c.number, moment(c), c.id), reverse=True)
    reasons: dict[str, list[str]] = {c.id: [] for c in ordered}
    for checkpoint in ordered:
        if checkpoint.pinned:
            reasons[checkpoint.id].append("pinned")
        if protected and checkpoint.id in protected:
            reasons[checkpoint.id].append(protected[checkpoint.id])
    for position, checkpoint in enumerate(ordered[: rules.last], 1):
        reasons[checkpoint.id].append(f"last {position} of {rules.last}")
    for name, bucket in _BUCKETS.items():
        limit, newest = getattr(rules, name), dict[tuple[int, ...], str]()
        for checkpoint in ordered if limit else ():
            newest.setdefault(bucket(moment(checkpoint)), checkpoint.id)
        for position, period in enumerate(sorted(newest, reverse=True)[:limit], 1):
            reasons[newest[period]].append(f"{name} {position} of {limit}")
    for checkpoint in ordered:
        if rules.within and (now - moment(checkpoint)).total_seconds() <= rules.within:
            reasons[checkpoint.id].append("within")
        reasons[checkpoint.id] += [
            f"label {k}={v}" for k, v in rules.labels if checkpoint.labels.get(k) == v
        ]
    return [Decision(checkpoint, tuple(reasons[checkpoint.id])) for checkpoint in ordered]


def moment(checkpoint: CheckpointSummary) -> datetime:
    """Return when the checkpoint was made, in UTC; one without a readable time counts as made at
    the beginning of time.
    """
    try:
        found = datetime.fromisoformat(checkpoint.created)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return datetime.min.replace(tzinfo=UTC)


def policy(session: str, policies: Sequence[tuple[str, Rules]]) -> Rules | None:
    """Return the rules of the first policy whose pattern matches the session's name."""
    return next(
        (rules for pattern, rules in policies if fnmatch.fnmatchcase(session, pattern)), None
    )


def policies(configured: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Rules]]:
    """Return the configuration's policies, in its order; `ConfigError`."""
    return [
        (pattern, Rules.make(values, f"retention of {pattern!r}"))
        for pattern, values in configured.items()
    ]
