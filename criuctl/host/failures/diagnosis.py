"""Find in CRIU's log the first real error, the process it is about, and what to do.

CRIU reports only success or failure.  The reason is in its log, mostly in the first error line;
what follows is the same failure seen from a caller, and some lines are noise in every run.
`diagnose` picks that line, the process and descriptor that it is about (from the line itself, or
from the lines around it that name them), and a text from a table.  The table is for people who have
never read CRIU's sources; CRIU's own sentence is always kept.

PIDs in a log are those of the PID namespace that CRIU ran in, which for an entered tree is the
tree's own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ...config import Config
from .remedies import FLEETING, REMEDIES, Remedy

UNKNOWN = "criu"  # the code of what is not in the table
_KEPT_LOGS = 50  # older ones are removed when a new one is kept
_LABEL = re.compile(r"[^A-Za-z0-9._-]+")

# "(00.026239)  16590: Error (criu/files-ext.c:94): Can't dump file ...", "pie: 16576: Error (...):
# ...", "Error: ..." (nft)
_LINE = re.compile(
    r"^(?:\(\d+\.\d+\)\s*)?(?:pie:\s*)?(?:(?P<pid>\d+):\s+)?"
    r"(?P<level>Error|Warn )\s*\((?P<where>[^)]*)\):\s*(?P<text>.*)$"
)
_SUBSYSTEM = re.compile(r"^[a-z][a-z0-9 -]{1,14}: ")
# The only message when a process still got more threads or children when CRIU gave up on them.
_OVERRUN = re.compile(
    r"^\(\d+\.\d+\)\s*(?P<text>Collected \(-\d+ attempts, [1-9]\d* in_progress\))"
)
_DUMPING = re.compile(r"\b(?P<pid>\d+) fdinfo (?P<fd>\d+):")
_TASK = re.compile(r"\((?:pid|Pid): (?P<pid>\d+)")

_NOISE = (
    "Can't setup RLIMIT_NOFILE",
    "CRIU was built without",
    "Unable to detach from",
    "Can't keep kdat cache",
    "Unable to get network namespace",
    "Could not process rule",
)
# The same failure, repeated by a caller.
_ECHOES = re.compile(
    r"^(?:Dump (?:files|core|mappings|ids|fs) |Dumping FAILED|Restoring FAILED"
    r"|Collect (?:mappings|fds) |Can't make \w+ id$|Can't infect |Can't dump (?:misc|threads)"
    r"|Unable to open fd=|\d+ exited, status=|\d+ killed by signal|Can't open \d+'s mapfile"
    r"|Pre-dumping |Message reply from daemon|Can't retrieve FDs? from socket"
    r"|Killing processes because|Unable to (?:un)?freeze)"
)


class Diagnosis(Struct, frozen=True):
    """A failure of CRIU, explained."""

    text: str  # a sentence; ends with CRIU's own words if the table has better ones
    hint: str = ""
    pid: int | None = None
    fd: int | None = None
    code: str = UNKNOWN  # stable name of the known failure; UNKNOWN for another one
    line: str = ""  # CRIU's own words
    passes: bool = False  # it passes by itself: the same may succeed a moment later


class _Entry(Struct, frozen=True):
    number: int
    level: str
    pid: int | None
    text: str


def _entries(lines: list[str]) -> Iterator[_Entry]:
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if match:
            pid = int(match["pid"]) if match["pid"] else None
            yield _Entry(
                number, match["level"].strip(), pid, _SUBSYSTEM.sub("", match["text"].strip())
            )
        elif match := _OVERRUN.match(line):
            yield _Entry(number, "Info", None, match["text"])


def diagnose(log: str, fallback: str = "") -> Diagnosis:
    """Return what a failed run's log says; `fallback` is the sentence for a log without errors."""
    lines = log.splitlines()
    entries = list(_entries(lines))
    errors = [e for e in entries if e.level == "Error" and not e.text.startswith(_NOISE)]
    informative = [e for e in errors if not _ECHOES.match(e.text)]
    # A line that the table knows explains more than one that merely comes first.
    for entry in informative:
        known = _known(entry, lines, entries)
        if known:
            return known
    in_order = (*informative, *(e for e in entries if e.level != "Error"))
    fleeting = {e.number: found for e in in_order if (found := _known(e, lines, entries, FLEETING))}
    for entry in informative:
        if entry.number not in fleeting:
            pid, fd = _about(entry, lines, entries)
            return Diagnosis(
                entry.text, _GENERAL_HINT, pid, fd, line=entry.text, passes=bool(fleeting)
            )
    # Some refusals are only logged as warnings, and the errors are their consequences.
    for entry in entries:
        if entry.level == "Warn":
            known = _known(entry, lines, entries)
            if known:
                return known
    for found in fleeting.values():
        return found
    if errors:
        pid, fd = _about(errors[0], lines, entries)
        return Diagnosis(errors[0].text, _GENERAL_HINT, pid, fd, line=errors[0].text)
    return Diagnosis(fallback or "CRIU ended without saying why", _GENERAL_HINT)


_GENERAL_HINT = "The kept log has the details; `criuctl check` and `criuctl doctor` may find more."


def _known(
    entry: _Entry, lines: list[str], entries: list[_Entry], remedies: Sequence[Remedy] = REMEDIES
) -> Diagnosis | None:
    for remedy in remedies:
        match = remedy.pattern.search(entry.text)
        if match is None:
            continue
        named = {k: v for k, v in match.groupdict().items() if v is not None}
        pid, fd = _about(entry, lines, entries)
        if "pid" in named:
            pid = int(named["pid"])
        if "fd" in named and int(named["fd"]) >= 0:
            fd = int(named["fd"])
        elif not remedy.about_descriptor:
            fd = None
        sentence = remedy.text.format_map(named)
        said, hint = f"{sentence} (CRIU: {entry.text})", remedy.hint.format_map(named)
        return Diagnosis(said, hint, pid, fd, remedy.code, entry.text, remedy.passes)
    return None


def _about(entry: _Entry, lines: list[str], entries: list[_Entry]) -> tuple[int | None, int | None]:
    """Return the process and descriptor that CRIU was processing at this line."""
    pid, fd = entry.pid, None
    for later in entries:
        # The callers that repeat a failure know the process: "Dump files (pid: 16590) failed".
        if later.number >= entry.number and pid is None and (match := _TASK.search(later.text)):
            pid = int(match["pid"])
    for number in range(entry.number - 1, max(-1, entry.number - 40), -1):
        if match := _DUMPING.search(lines[number]):
            if pid in (None, int(match["pid"])):
                pid, fd = int(match["pid"]), int(match["fd"])
            break
        if "Dumping task" in lines[number] or "----" in lines[number]:
            break  # another part of the task: earlier lines are about something else
    return pid, fd


def kept(config: Config, log: str, label: str) -> dict[str, str]:
    """Call `keep_log` and return its path, or why it failed, as a detail of the error about CRIU's
    failure.

    A full disk must not replace that error.
    """
    try:
        return {"log": str(keep_log(config, log, label))}
    except OSError as error:
        return {"log_lost": error.strerror or str(error)}


def keep_log(config: Config, log: str, label: str) -> Path:
    """Write CRIU's log to ``state_dir/logs`` (mode 0600) and return its path; the oldest of too
    many are removed.

    Raises `OSError` if the state folder cannot be written.
    """
    folder = Path(config.state_dir) / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    stem = f"{stamp}-{_LABEL.sub('-', label).strip('-.')[:80] or 'criu'}"
    for attempt in range(1000):
        path = folder / (f"{stem}.log" if attempt == 0 else f"{stem}-{attempt}.log")
        try:
            fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            break
        except FileExistsError:
            continue
    else:
        raise FileExistsError(f"{folder} has a thousand logs called {stem}")
    with open(fd, "w", encoding="utf-8", errors="replace") as file:
        file.write(log)
    # Names begin with the time, so they sort by age.
    for old in sorted(folder.glob("*.log"))[:-_KEPT_LOGS]:
        if old != path:
            old.unlink(missing_ok=True)
    return path
