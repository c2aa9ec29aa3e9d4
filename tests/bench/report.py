"""From samples to medians, ratios and verdicts; the table for people and the JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, TextIO

SUBJECT = "criuctl"
_LABEL = 42
_CELL = 15


@dataclass(frozen=True)
class Bound:
    """What criuctl's median may be: at most `limit`, or `limit` times that of the peer (``by`` is
    "ratio").

    "above": at most `limit` above the peer's.  "least": at least `limit`, or what the peer does, if
    that is less.
    """

    limit: float
    peer: str = ""
    by: str = "ratio"
    of: str = SUBJECT  # the way that is held to it

    def value(self, own: float, peer: float) -> float:
        """What is compared with the limit."""
        return own - peer if self.by == "above" else own / peer if self.by == "ratio" else own

    def met(self, value: float, peer: float) -> bool:
        """Whether `value` keeps the bound."""
        return value >= min(self.limit, peer) if self.by == "least" else value <= self.limit

    def __str__(self) -> str:
        if self.by == "least":
            return f"at least {self.limit:g}, or what {self.peer} does"
        if self.by == "above":
            return f"at most {self.limit:g} above {self.peer}"
        return f"at most {self.limit:g}" + (f" of {self.peer}" if self.peer else "")


@dataclass
class Row:
    """One thing that is measured: its samples, by way."""

    label: str
    unit: str = "s"
    bound: Bound | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, value: float) -> None:
        self.samples.setdefault(way, []).append(value)

    def median(self, way: str) -> float | None:
        values = self.samples.get(way)
        return median(values) if values else None

    def verdict(self) -> tuple[float, bool] | None:
        """The value that the bound is about (see `Bound`) and whether it is met; None without
        both.
        """
        if self.bound is None:
            return None
        own, peer = (
            self.median(self.bound.of),
            self.median(self.bound.peer) if self.bound.peer else 1.0,
        )
        if own is None or not peer:
            return None
        value = self.bound.value(own, peer)
        return value, self.bound.met(value, peer)


@dataclass
class Section:
    """What was measured with one tree and one store."""

    title: str
    key: dict[str, Any]  # for programs: case, size, processes, store
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, label: str, unit: str = "s", bound: Bound | None = None) -> Row:
        """The row of that label; made when it is not there."""
        for row in self.rows:
            if row.label == label:
                return row
        self.rows.append(Row(label, unit, bound))
        return self.rows[-1]

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            ways = {w: {"median": row.median(w), "samples": s} for w, s in row.samples.items()}
            entry: dict[str, Any] = {"what": row.label, "unit": row.unit, "ways": ways}
            verdict = row.verdict()
            if row.bound is not None:
                entry["bound"] = {
                    "limit": row.bound.limit,
                    "peer": row.bound.peer or None,
                    "value": verdict[0] if verdict else None,
                    "met": verdict[1] if verdict else None,
                }
            rows.append(entry)
        return {**self.key, "rows": rows, "failures": self.failures}

    def print(self, out: TextIO) -> None:
        """The table."""
        ways = list(dict.fromkeys(way for row in self.rows for way in row.samples))
        print(f"\n{self.title}", file=out)
        if ways:
            print(" " * _LABEL + "".join(f"{way:>{_CELL}}" for way in ways), file=out)
        for row in self.rows:
            line = f"  {row.label + ', ' + row.unit if row.unit else row.label:<{_LABEL - 2}}"
            for way in ways:
                value = row.median(way)
                line += f"{'' if value is None else _number(value):>{_CELL}}"
            print((line + _verdict(row)).rstrip(), file=out)
        for failure in self.failures:
            print(f"  FAILED  {failure}", file=out)
        out.flush()


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _verdict(row: Row) -> str:
    if row.bound is None:
        return ""
    verdict = row.verdict()
    if verdict is None:
        return f"   ({row.bound}: not measured)"
    value, met = verdict
    return f"   {_number(value)}, {row.bound}: {'met' if met else 'NOT MET'}"


def summary(sections: list[Section]) -> list[str]:
    """One line of how many bounds are met, and one for each that is not."""
    bounded = [(s, r, v) for s in sections for r in s.rows if (v := r.verdict()) is not None]
    missed = [
        f"  not met: {s.title}: {r.label}: {_verdict(r).strip()}" for s, r, v in bounded if not v[1]
    ]
    return [f"{len(bounded) - len(missed)} of {len(bounded)} bounds met", *missed]
