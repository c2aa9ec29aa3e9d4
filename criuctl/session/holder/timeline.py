"""When a session printed what: a file next to the output log, so that it can be played back.

It has one JSON array a line.  ``[time, offset]``: the output from `offset` on, up to the next line,
came at `time` (UNIX seconds).  ``[time, offset, event, {...}]``: a resize, a checkpoint, a restore,
the end happened there.  The resolution is 50 ms.  The first line names the session: ``[time, -1,
"session", {"id"}]``.  The file is bounded: when it is full, its older half is removed.  A full disk
must not stop a session; then only times are missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

RESOLUTION = 0.05
MAX_SIZE = 4 << 20
OWNER = "session"
EVENTS = frozenset(
    ("resize", "checkpoint", "checkpointed", "restored", "paused", "resumed", "halted", "exit")
)


class Timeline:
    """Writes the timeline of one session."""

    def __init__(self, path: Path, position: int, session: str) -> None:
        """Go on in the file that the session with this id has left at `path`, or begin a new
        one.
        """
        self._path, self._position, self._session = path, position, session
        self._last = 0.0
        self._fd = -1
        with suppress(OSError):
            self._open(os.O_TRUNC if owner(path) not in ("", session) else 0)
            if not self._size:
                self._write(self._first())

    def _open(self, flags: int = 0) -> None:
        self._fd = os.open(
            self._path,
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags,
            0o600,
        )
        self._size = os.fstat(self._fd).st_size

    def _first(self) -> list[Any]:
        return [round(time.time(), 3), -1, OWNER, {"id": self._session}]

    def move(self, folder: Path) -> None:
        """Move the file to `folder`, and replace one of its name there."""
        place = folder / self._path.name
        try:
            self._path.replace(place)
        except FileNotFoundError:
            # A full disk: there is none.  One there belongs to another session.
            place.unlink(missing_ok=True)
        self._path = place

    def output(self, end: int) -> None:
        """Record that output came up to `end`."""
        start, self._position = self._position, end
        now = time.time()
        if not 0 <= now - self._last < RESOLUTION:
            self._last = now
            self._write([round(now, 3), start])

    def skip(self, end: int) -> None:
        """Leave out what is in the log up to `end`: it came at another time."""
        self._position = end

    def event(self, name: str, offset: int, facts: dict[str, Any]) -> None:
        """Record an event, if it is one that a recording shows."""
        if name in EVENTS:
            self._last = 0.0
            self._write([round(time.time(), 3), offset, name, facts])

    def _write(self, record: list[Any]) -> None:
        if self._fd < 0:
            return
        with suppress(OSError):
            self._size += os.write(self._fd, _line(record))
            if self._size > MAX_SIZE:
                self._halve()

    def _halve(self) -> None:
        data = self._path.read_bytes()
        kept = data[data.find(b"\n", len(data) // 2) + 1 :]
        temporary = self._path.with_name(".timeline")
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(_line(self._first()) + kept)
        temporary.replace(self._path)
        os.close(self._fd)
        self._fd = -1
        self._open()


def _line(record: list[Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def owner(path: Path) -> str:
    """Return the id of the session whose timeline is at `path`.

    "": there is none, or an older criuctl has begun it.
    """
    _time, _offset, event, facts = next(records(path), (0.0, 0, "", {}))
    return str(facts["id"]) if event == OWNER and isinstance(facts, dict) and "id" in facts else ""


def records(path: Path) -> Iterator[tuple[float, int, str, dict[str, Any]]]:
    """Yield (time, offset, event or "", facts) of every line that can be read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        with suppress(ValueError, TypeError, LookupError):
            entry = json.loads(line)
            yield (
                float(entry[0]),
                int(entry[1]),
                str(entry[2]) if len(entry) > 2 else "",
                entry[3] if len(entry) > 3 else {},
            )
