"""The audit log: who did what to a session, one JSON object a line, appended and never rewritten.

It is opened once with O_APPEND; each entry is written at once with one write(2), and the sequence
goes on over re-exec and restore.  A file belongs to one session: the first entry, ``opened``, names
it.  When another session gets the name, the earlier session's file is renamed after its id.  A full
disk must not stop a session, but a gap must be visible: entries that could not be written are
counted, and the next entry says how many are missing.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .operators import Operator
from .session_state import Identity

_TAIL = 4 << 20  # bytes at the end of the file in which `entries` looks


class AuditLog:
    """One session's audit log."""

    def __init__(self, path: Path, sequence: int = 0) -> None:
        """Go on in the file at `path`; an entry gets a higher sequence than `sequence`."""
        self.path = path
        self.sequence = sequence
        self._lost = 0
        self._fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )

    @classmethod
    def opened(cls, path: Path, session: str, incarnation: int, sequence: int = 0) -> AuditLog:
        """Open the log of the session with this id; its last entry elsewhere was `sequence`."""
        owner, last = _owner(path)
        if owner is not None and owner != session:
            path.replace(_kept_name(path, owner))
            earlier = path.with_name(f"audit-{session[:16]}.jsonl")
            if _owner(earlier)[0] == session:  # it had the name before, and has it again
                earlier.replace(path)
            last = _owner(path)[1]
        log = cls(path, max(sequence, last))
        log._end_line()
        log.write("opened", {}, incarnation, session=session, holder=os.getpid())
        return log

    def move(self, folder: Path) -> None:
        """Move the file to `folder`; one of another session there is renamed after its id."""
        place = folder / self.path.name
        owner, _last = _owner(place)
        if owner is not None:
            place.replace(_kept_name(place, owner))
        self.path = self.path.replace(place)

    def _end_line(self) -> None:
        """End a line that was cut, by a power failure for example."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            with suppress(OSError):
                os.write(self._fd, b"\n")

    def write(self, what: str, who: dict[str, Any], incarnation: int, **facts: Any) -> int:
        """Add an entry; return its sequence."""
        self.sequence += 1
        entry = {
            "sequence": self.sequence,
            "time": round(time.time(), 6),
            "incarnation": incarnation,
            **who,
            "what": what,
            **facts,
        }
        if self._lost:
            entry["lost_before"] = self._lost
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            self._lost = 0
            if written < len(line):
                os.write(self._fd, b"\n")  # the cut line must not be joined with the next
                self._lost = 1
        except OSError:
            self._lost += 1
        return self.sequence

    def entries(self, since: int, limit: int) -> list[dict[str, Any]]:
        """Return the oldest `limit` entries above sequence `since` near the end of the file."""
        size = os.fstat(self._fd).st_size
        begin = max(0, size - _TAIL)
        lines = os.pread(self._fd, _TAIL, begin).split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines[1:] if begin else lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and int(entry.get("sequence", 0)) > since:
                found.append(entry)
                if len(found) >= limit:
                    break
        return found

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class AuditWriter:
    """Writes the entries of one session with the incarnation that it has at the time."""

    def __init__(self, log: AuditLog, identity: Identity) -> None:
        self.log, self._identity = log, identity

    def write(self, what: str, who: dict[str, Any], **facts: Any) -> int:
        """Add an entry; return its sequence."""
        return self.log.write(what, who, self._identity.incarnation, **facts)

    def record(self, what: str, by: Operator, **facts: Any) -> int:
        """Add an entry about what an operator did; return its sequence."""
        return self.write(what, {**by.who(), "pid": by.pid}, **facts)


def _owner(path: Path) -> tuple[str | None, int]:
    """Return the session whose log is at `path` (None: no log), and its last sequence."""
    try:
        with open(path, "rb") as file:
            first = file.readline(4096)
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            tail = file.read()
    except FileNotFoundError:
        return None, 0
    try:
        session = str(json.loads(first)["session"])
    except (ValueError, KeyError, TypeError):
        return "", 0
    for line in reversed(tail.split(b"\n")):
        with suppress(ValueError, KeyError, TypeError):  # a line may be cut
            return session if session.isalnum() else "", int(json.loads(line)["sequence"])
    return session if session.isalnum() else "", 0


def _kept_name(path: Path, owner: str) -> Path:
    """Return a free name for the log of another session."""
    whose = owner[:16] or "unknown"
    names = (f"audit-{whose}{f'-{number}' if number else ''}.jsonl" for number in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))
