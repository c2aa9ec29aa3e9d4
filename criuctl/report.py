"""What a running operation tells: steps, progress, findings and warnings.

An operation is given one `Reporter` and speaks only to it; whether the words become lines on a terminal,
a progress bar, or JSON lines is decided by whoever made the reporter (`criuctl.cli.output`).  Results are
return values, never reports.  The base class is silent and keeps warnings, so tests and programs can use
it as it is.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from . import pausepoints
from .redact import redacted

Level = Literal["error", "warning", "info"]

_STEPS = 64


class Finding(Struct, frozen=True):
    """One thing a check found: what, where and what to do about it.

    `level` error stops the operation, warning is told, info is only shown when asked for.
    """

    level: Level
    code: str
    text: str
    hint: str = ""
    pid: int | None = None
    fd: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The finding as the JSON contract of ``check`` and ``doctor`` has it."""
        return asdict(self)

    def __str__(self) -> str:
        where = "" if self.pid is None else f"PID {self.pid}"
        if self.fd is not None:
            where += f" fd {self.fd}"
        return f"{where}: {self.text}" if where else self.text


class Reporter:
    """Takes the events of one operation; this base class keeps the warnings and drops the rest."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.codes: list[str] = []  # of warnings that have one
        self.marks: deque[tuple[str, float]] = deque(maxlen=_STEPS)  # the last ones, and when they began (monotonic)

    def step(self, name: str, **facts: Any) -> None:
        """A named step of the operation begins; subclasses call this too, so that tests can pause there (`pausepoints`)."""
        self.at(name)
        pausepoints.reached(name)

    def at(self, name: str) -> None:
        """A step begins that only `marks` tells of."""
        self.marks.append((name, time.monotonic()))

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        """`done` of `total` units of `name` are through; may be called from any thread, often."""

    def warning(self, text: str, hint: str = "") -> None:
        """Something optional went wrong or something surprising was found; the operation goes on."""
        self.warnings.append(redacted(f"{text} ({hint})" if hint else text))

    def finding(self, finding: Finding) -> None:
        """A check found something; warnings are kept, errors are the caller's business."""
        if finding.level == "warning":
            self.codes.append(finding.code)
            self.warning(str(finding), finding.hint)

    def close(self) -> None:
        """The operation is over; take progress bars off the terminal."""
