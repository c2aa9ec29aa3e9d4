"""The reports of a running operation: steps, progress, findings and warnings.

An operation gets one `Reporter` and sends all reports to it. The caller that made the reporter
(`criuctl.cli.output`) decides whether they become lines on a terminal, a progress bar, or JSON
lines. Results are return values, never reports. The base class is silent and keeps warnings, so
tests and programs can use it directly.
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
_NAMED = 4  # processes, descriptors or files that are named in a summary of like findings
RECORDED = 1000  # the same of a summary that is kept, as warnings are: it names all that matter
_MANY = 4  # from this number on, findings about different files or sizes are summarised, too
# a folder of /proc, and ``PID (command)``
_PROCESS = re.compile(r"(?<=/proc/)\d+|\b\d+ \(.{0,64}?\)")
# a path, an address with a port, or a number
_SUBJECT = re.compile(r"(?<![\w/.])/[^\s,;:()'\"`]+|\[[0-9a-fA-F:.]+\]:\d+|[\d.]+:\d+|\d+")


class Finding(Struct, frozen=True):
    """One result of a check: what is wrong, where, and what to do about it.

    Level "error" stops the operation, "warning" is shown, "info" is shown only on request.
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
        """Return the finding as the JSON contract of ``check`` and ``doctor`` defines it."""
        body = asdict(self)
        if not self.program:
            del body["program"]
        return body

    def __str__(self) -> str:
        where = "" if self.pid is None else f"PID {self.pid}"
        if self.fd is not None:
            where += f" fd {self.fd}"
        return f"{where}: {self.text}" if where else self.text


def summarised(findings: Iterable[Finding], *, named: int = _NAMED) -> list[Finding]:
    """Merge findings of one kind for display: the first, with a count and the processes or files of
    some others; of files, `named` at most.

    Findings are of one kind if they have one code and their texts differ only in the process, or if
    one known program's remedy resolves them; and where there are many, if their texts differ only
    in paths, addresses and numbers.
    """
    kinds: dict[tuple[str, ...], dict[tuple[str, ...], list[Finding]]] = {}
    for f in findings:
        texts = _impersonal(f.text, f.pid), _impersonal(f.hint, f.pid)
        cause = (f.level, f.program, f.hint) if f.program else (f.level, f.code, *texts)
        kind = (*cause[:2], *(_SUBJECT.sub("#", text) for text in cause[2:]))
        kinds.setdefault(kind, {}).setdefault(cause, []).append(f)
    shown: list[Finding] = []
    for causes in kinds.values():
        if len(causes) >= _MANY:
            shown.append(_counted([f for alike in causes.values() for f in alike], named))
        else:
            shown += [_counted(alike, _NAMED) for alike in causes.values()]
    return shown


def _impersonal(text: str, pid: int | None) -> str:
    return re.sub(rf"\b{pid}\b", "#", _PROCESS.sub("#", text))


def _counted(alike: list[Finding], named: int) -> Finding:
    first, *others = alike
    if not others:
        return first
    names = dict.fromkeys(_name(f, first) for f in others)
    for nothing_new in ("", _place(first, first.pid)):
        names.pop(nothing_new, None)
    places = list(names)[:named]
    if len(names) > named:
        places.append(f"{len(names) - named} more")
    where = " and ".join(part for part in (", ".join(places[:-1]), *places[-1:]) if part)
    text = f"{first.text}; and {len(others)} more like it{f': {where}' if where else ''}"
    return replace(first, text=text)


def _name(finding: Finding, first: Finding) -> str:
    """Return the path or address by which a finding differs from the first, or else its place."""
    known = set(_SUBJECT.findall(first.text))
    for subject in _SUBJECT.findall(finding.text):
        if subject not in known and not subject.isdecimal() and not subject.startswith("/proc/"):
            return str(subject)
    return _place(finding, first.pid)


def _place(finding: Finding, known: int | None) -> str:
    pid = "" if finding.pid in (None, known) else f"PID {finding.pid}"
    return f"{pid} fd {finding.fd}".strip() if finding.fd is not None else pid


class Reporter:
    """Takes the events of one operation; this base class keeps the warnings and drops the rest."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.codes: list[str] = []  # codes of the warnings that have one
        # the most recent steps, and when they began (monotonic)
        self.marks: deque[tuple[str, float]] = deque(maxlen=_STEPS)

    def step(self, name: str, **facts: Any) -> None:
        """Report that a named step begins. Subclasses call this too, so that tests can pause there
        (`pausepoints`).
        """
        self.at(name)
        pausepoints.reached(name)

    def at(self, name: str) -> None:
        """Record in `marks` that a step begins, without reporting it."""
        self.marks.append((name, time.monotonic()))

    def progress(self, name: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        """Report that `done` of `total` units of `name` are processed; callable from any thread,
        often.
        """

    def warning(self, text: str, hint: str = "") -> None:
        """Report that something optional failed or is unexpected; the operation continues."""
        self.warnings.append(redacted(f"{text} ({hint})" if hint else text))

    def notice(self, text: str, hint: str = "") -> None:
        """Report what the operator should know once, although nothing is wrong. A reporter that
        cannot show it keeps it as a warning.
        """
        self.warning(text, hint)

    def finding(self, finding: Finding) -> None:
        """Report a finding; warnings are kept, and the caller handles errors."""
        if finding.level == "warning":
            self.codes.append(finding.code)
            self.warning(str(finding), finding.hint)

    def close(self) -> None:
        """End the report; remove progress bars from the terminal."""


def utc_text(seconds: float | None) -> str | None:
    """Return UNIX seconds as an RFC 3339 time with milliseconds; None for None."""
    if not seconds:
        return None
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
