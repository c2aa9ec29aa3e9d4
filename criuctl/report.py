"""What a running operation tells: steps, progress, findings and warnings.

An operation is given one `Reporter` and speaks only to it; whether the words become lines on a
terminal, a progress bar, or JSON lines is decided by whoever made the reporter
(`criuctl.cli.output`).  Results are return values, never reports.  The base class is silent and
keeps warnings, so tests and programs can use it as it is.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from . import pausepoints
from .redact import redacted

Level = Literal["error", "warning", "info"]

_STEPS = 64
_NAMED = 4  # processes or descriptors of findings that are alike
# a folder of /proc, and ``PID (command)``
_PROCESS = re.compile(r"(?<=/proc/)\d+|\b\d+ \(.{0,64}?\)")


class Finding(Struct, frozen=True):
    """One thing a check found: what, where and what to do about it.

    `level` error stops the operation, warning is told, info is only shown when asked for.
    `program` names the known program whose remedy the hint is
    (`criuctl.dump.checks.known_programs`).
    """

    level: Level
    code: str
    text: str
    hint: str = ""
    pid: int | None = None
    fd: int | None = None
    program: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The finding as the JSON contract of ``check`` and ``doctor`` has it."""
        body = asdict(self)
        if not self.program:
            del body["program"]
        return body

    def __str__(self) -> str:
        where = "" if self.pid is None else f"PID {self.pid}"
        if self.fd is not None:
            where += f" fd {self.fd}"
        return f"{where}: {self.text}" if where else self.text


def summarised(findings: Iterable[Finding]) -> list[Finding]:
    """The findings for people: of those with one cause the first, with a count and some of the
    others.

    One cause have findings of one code whose texts differ in nothing but their process, and all
    that a known program's remedy ends.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        key = (f.level, f.code, _impersonal(f.text, f.pid), _impersonal(f.hint, f.pid))
        groups.setdefault((f.level, f.program, f.hint) if f.program else key, []).append(f)
    return [_counted(alike) for alike in groups.values()]


def _impersonal(text: str, pid: int | None) -> str:
    return re.sub(rf"\b{pid}\b", "PID", _PROCESS.sub("PID", text))


def _counted(alike: list[Finding]) -> Finding:
    first, *others = alike
    if not others:
        return first
    names = dict.fromkeys(_place(f, first.pid) for f in others)
    for nothing_new in ("", _place(first, first.pid)):
        names.pop(nothing_new, None)
    places = list(names)[:_NAMED]
    if len(names) > _NAMED:
        places.append(f"{len(names) - _NAMED} more")
    where = " and ".join(part for part in (", ".join(places[:-1]), *places[-1:]) if part)
    text = f"{first.text}; and {len(others)} more like it{f': {where}' if where else ''}"
    return replace(first, text=text)


def _place(finding: Finding, known: int | None) -> str:
    pid = "" if finding.pid in (None, known) else f"PID {finding.pid}"
    return f"{pid} fd {finding.fd}".strip() if finding.fd is not None else pid


class Reporter:
    """Takes the events of one operation; this base class keeps the warnings and drops the rest."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.codes: list[str] = []  # of warnings that have one
        # the last ones, and when they began (monotonic)
        self.marks: deque[tuple[str, float]] = deque(maxlen=_STEPS)

    def step(self, name: str, **facts: Any) -> None:
        """A named step of the operation begins; subclasses call this too, so that tests can pause
        there (`pausepoints`).
        """
        self.at(name)
        pausepoints.reached(name)

    def at(self, name: str) -> None:
        """A step begins that only `marks` tells of."""
        self.marks.append((name, time.monotonic()))

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        """`done` of `total` units of `name` are through; may be called from any thread, often."""

    def warning(self, text: str, hint: str = "") -> None:
        """Something optional went wrong or something surprising was found; the operation goes
        on.
        """
        self.warnings.append(redacted(f"{text} ({hint})" if hint else text))

    def finding(self, finding: Finding) -> None:
        """A check found something; warnings are kept, errors are the caller's business."""
        if finding.level == "warning":
            self.codes.append(finding.code)
            self.warning(str(finding), finding.hint)

    def close(self) -> None:
        """The operation is over; take progress bars off the terminal."""


def utc_text(seconds: float | None) -> str | None:
    """UNIX seconds as an RFC 3339 time, milliseconds included; None for none."""
    if not seconds:
        return None
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
