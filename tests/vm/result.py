"""The outcome of a run: a table for the terminal, and a file, RESULT.md or SYSTEMD.md, written by
it and never by hand.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Row:
    """One check."""

    name: str
    good: bool
    seconds: float
    seen: str  # what was seen, in one line; or why it failed


@dataclass
class Result:
    """All of a run."""

    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    # of pre-copy: where, and what each came to
    rounds: list[tuple[str, list[dict[str, float]]]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all that was checked is as it must be, and something was checked."""
        return bool(self.rows) and all(row.good for row in self.rows)

    def table(self) -> str:
        """For people who wait for it."""
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [
            f"{'good' if r.good else 'BAD '}  {r.name:{width}}  {r.seconds:6.1f} s  {r.seen}"
            for r in self.rows
        ]
        return "\n".join(
            [*lines, f"{sum(r.good for r in self.rows)} of {len(self.rows)} checks are good"]
        )

    def write(self, path: Path, command: str) -> None:
        """The file that tells of the last run of this command."""
        lines = [
            f"# The last run of {command}",
            "",
            "Written by the run itself; what is done and why stands in `tests/vm/`.",
            "",
        ]
        lines += [
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in self.facts.items()),
            "",
        ]
        lines += ["| check | | time | what was seen |", "|---|---|---|---|"]
        for row in self.rows:
            seen = " ".join(row.seen.split())[:600].replace("|", "\\|")
            lines.append(
                f"| {row.name} | {'good' if row.good else '**BAD**'} | {row.seconds:.1f} s | "
                f"{seen} |"
            )
        if self.rounds:
            lines += [
                "",
                "Pre-copy with dirty tracking: a round after the first reads only what was "
                "written to since the one before.",
                "",
            ]
            lines += ["| where | round | read | stored or sent | time |", "|---|---|---|---|---|"]
        for where, rounds in self.rounds:
            for made in rounds:
                amounts = f"{mib(made['read'])} | {mib(made['new'])} | {made['seconds']:.2f} s"
                lines.append(f"| {where} | {made['round']:.0f} | {amounts} |")
        path.write_text("\n".join(lines) + "\n")


def mib(amount: float) -> str:
    """Bytes, for people."""
    return f"{amount / (1 << 20):.1f} MiB"


def today() -> str:
    """The date, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
