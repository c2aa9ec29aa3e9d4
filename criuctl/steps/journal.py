"""The journal of a session's steps: an append-only file with a checksum on every record.

A record is one line, ``CHECKSUM JSON``; the JSON is ``{"n": sequence, "t": time, "e": event, "s":
step}``, with the step as it is after the event. The checksum (BLAKE2b, 16 bytes) covers the record
and the checksum before it, so a record that is missing, changed or out of place is noticed. The
first record, ``journal``, names the session.

`put` writes a record with one write(2), and returns when fsync(2) has. A record that could not be
written completely is cut off again before the error is raised: the journal ends with the last
record that was acknowledged. What a crash has left behind that record is cut off when the file is
opened (`cut` has the number of bytes). A bad record with good ones behind it is no crash but
damage: `JournalDamaged`, and the file stays as it is.

The memory has an index only: where the newest record of each step is. When less than a quarter of a
large file is such records, the file is replaced by one that has them alone, with the sequence
numbers that they had.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .states import Step, StepRefused, digest

FORMAT = 1
MAX_STEPS = 20_000
MAX_BYTES = 256 << 20
MAX_LINE = 128 << 10  # bytes of a record
_LARGE = 4 << 20  # bytes below which a file is not replaced by a shorter one
_SUM = 32  # hexadecimal digits of a `digest`
_READ = 1 << 20


class JournalDamaged(OSError):
    """A record in the middle of the journal is not what was written."""


class Journal:
    """The steps of one session."""

    def __init__(self, path: Path, session: str) -> None:
        """Open the journal at `path`, or make it; one of another session is renamed first."""
        self.path, self.session = path, session
        self.sequence = 0  # of the last record
        self.cut = 0  # bytes of an incomplete record that were found behind the last one
        self.counts = dict.fromkeys(("began", "done", "failed", "unknown"), 0)
        self.replicated = False  # a supervisor stores the steps; they wait for it
        self.began: set[str] = set()
        self._index: dict[str, tuple[int, int, int, str]] = {}  # id: place, size, sequence, state
        self._size, self._sum, self._broken = 0, "0" * _SUM, ""
        self._sizes: list[int] = []  # of the records that were written last
        whose = owner(path)
        if whose == "":
            raise JournalDamaged(f"{path}: the first record is damaged; the journal is not used")
        if whose is not None and whose != session:
            path.replace(_kept_name(path, whose))
            whose = None
        if whose is None:
            self._make([], path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags)
        try:
            self._load()
        except BaseException:
            os.close(self._fd)
            raise

    # -- reading ----------------------------------------------------------------------------------

    def get(self, id: str) -> Step | None:
        """Return the step; None: there is none."""
        known = self._index.get(id)
        if known is None:
            return None
        place, size, _sequence, _state = known
        return Step.from_dict(json.loads(os.pread(self._fd, size, place)[_SUM + 1 :])["s"])

    def sequence_of(self, id: str) -> int:
        """Return the sequence of the newest record of a step that there is."""
        return self._index[id][2]

    def steps(self, since: int = 0) -> Iterator[tuple[int, Step]]:
        """Yield sequence and step of those that have changed after record `since`, in order."""
        changed = sorted(
            (sequence, name)
            for name, (_, _, sequence, _) in self._index.items()
            if sequence > since
        )
        for sequence, name in changed:
            step = self.get(name)
            assert step is not None
            yield sequence, step

    # -- writing ----------------------------------------------------------------------------------

    def put(self, event: str, step: Step) -> Step:
        """Add a record and return the step when the record is on the disk; `OSError`."""
        if step.id not in self._index and len(self._index) >= MAX_STEPS:
            raise StepRefused("busy", f"the session has {MAX_STEPS} steps, and takes no more")
        place = self._append(event, {"s": step.to_dict()})
        self._note(step, place, self._size - place, self.sequence)
        return step

    def put_all(self, event: str, steps: Sequence[Step]) -> None:
        """Add the records of many steps, and wait for the disk once; `OSError`: none is added."""
        left = MAX_STEPS - len(self._index)
        if sum(step.id not in self._index for step in steps) > left:
            raise StepRefused("busy", f"a session has at most {MAX_STEPS} steps")
        if not steps:
            return
        place = self._append(event, *({"s": step.to_dict()} for step in steps))
        first = self.sequence - len(steps) + 1
        for number, step in enumerate(steps):
            size = self._sizes[number]
            self._note(step, place, size, first + number)
            place += size

    def replicate(self, on: bool) -> None:
        """Remember whether the steps of this session are to wait for the store."""
        if on != self.replicated:
            self._append("replicated", {"on": on})
            self.replicated = on

    def _append(self, event: str, *facts: dict[str, Any]) -> int:
        """Write records, all or none; return the place of the first."""
        if self._broken:
            raise OSError(f"the journal of steps cannot be written: {self._broken}")
        if self._size > MAX_BYTES:
            raise StepRefused("busy", f"the journal of steps has {self._size >> 20} MiB already")
        self._shorten()
        lines, checksum, now = [], self._sum, round(time.time(), 6)
        for number, body in enumerate(facts, self.sequence + 1):
            line, checksum = _line(checksum, {"n": number, "t": now, "e": event, **body})
            if len(line) > MAX_LINE:
                raise StepRefused("bad-request", f"a record of {len(line)} bytes is too long")
            lines.append(line)
        place, data = self._size, b"".join(lines)
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            self._take_back(error)
            raise
        self._sizes = [len(line) for line in lines]
        self._size, self._sum = place + len(data), checksum
        self.sequence += len(lines)
        return place

    def _take_back(self, error: OSError) -> None:
        """Cut off a record that was not acknowledged. Without that no other may follow it."""
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        except OSError:
            self._broken = error.strerror or str(error)

    def _shorten(self) -> None:
        """Replace a large file that is mostly records of the past."""
        if self._size < _LARGE:
            return
        newest = sorted((n, place, size) for place, size, n, _ in self._index.values())
        if self._size < 4 * sum(size for _, _, size in newest):
            return
        lines = [os.pread(self._fd, size, place)[_SUM + 1 :] for _, place, size in newest]
        bodies = [json.loads(line) for line in lines]
        if self.replicated:
            bodies.append({"n": self.sequence, "t": time.time(), "e": "replicated", "on": True})
        self._make(bodies, self.path)
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.close(self._fd)
        self._fd, last = fd, self.sequence
        self._load()
        self.sequence = last

    def move(self, folder: Path) -> None:
        """Move the file to `folder`; one of another session there is renamed after its id."""
        place = folder / self.path.name
        whose = owner(place)
        if whose is not None:
            place.replace(_kept_name(place, whose))
        self.path = self.path.replace(place)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    # -- inside -----------------------------------------------------------------------------------

    def _make(self, bodies: list[dict[str, Any]], path: Path) -> None:
        """Make a file of these records, complete or not at all."""
        temporary = path.with_name(f".{path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        first = {"n": 0, "t": round(time.time(), 6), "e": "journal"}
        first |= {"format": FORMAT, "session": self.session}
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            before = "0" * _SUM
            for body in (first, *bodies):
                line, before = _line(before, body)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _load(self) -> None:
        """Read the file, check every record, and cut off what a crash has left at its end."""
        self.sequence, self._size, self._sum = 0, 0, "0" * _SUM
        self._index.clear()
        self.began.clear()
        self.counts = dict.fromkeys(self.counts, 0)
        bad = -1  # place of the first bad line
        for place, line in _lines(self._fd):
            body = _checked(self._sum, line)
            if bad >= 0:
                # Any record behind it, in whatever chain, shows that this is not the end.
                if _whole(line):
                    raise JournalDamaged(
                        f"{self.path}: the record at byte {bad} is damaged; the journal is not used"
                    )
            elif body is None or (body["n"] < self.sequence):
                bad = place
            else:
                self._take(body, place, line)
        end = os.fstat(self._fd).st_size
        if end > self._size:
            self.cut = end - self._size
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def _take(self, body: dict[str, Any], place: int, line: bytes) -> None:
        try:
            if "s" in body:
                self._note(Step.from_dict(body["s"]), place, len(line), body["n"])
            elif body["e"] == "replicated":
                self.replicated = bool(body["on"])
        except (ValueError, KeyError) as error:
            raise JournalDamaged(f"{self.path}: the record at byte {place}: {error}") from None
        self._sum = line[:_SUM].decode("ascii")
        self._size, self.sequence = place + len(line), body["n"]

    def _note(self, step: Step, place: int, size: int, sequence: int) -> None:
        before = self._index.get(step.id)
        if before is not None:
            self.counts[before[3]] -= 1
        self.counts[step.state] += 1
        self._index[step.id] = (place, size, sequence, step.state)
        if step.state == "began":
            self.began.add(step.id)
        else:
            self.began.discard(step.id)


def owner(path: Path) -> str | None:
    """Return the id of the session whose journal is at `path`; "": unreadable, None: no file."""
    try:
        with open(path, "rb") as file:
            first = file.readline(4096)
    except FileNotFoundError:
        return None
    with suppress(ValueError, KeyError, TypeError):
        session = json.loads(first[_SUM + 1 :])["session"]
        return session if isinstance(session, str) and session.isalnum() else ""
    return ""


def _line(before: str, body: dict[str, Any]) -> tuple[bytes, str]:
    """Return the line of a record, and its checksum; `before` is the one before it."""
    text = json.dumps(body, separators=(",", ":")).encode()
    checksum = digest(before.encode() + text)
    return f"{checksum} ".encode() + text + b"\n", checksum


def _checked(before: str, line: bytes) -> dict[str, Any] | None:
    """Return the record on a line; None: it is not the one that was written there."""
    if not line.endswith(b"\n") or line[_SUM : _SUM + 1] != b" ":
        return None
    text = line[_SUM + 1 : -1]
    checksum = digest(before.encode() + text)
    if checksum.encode() != line[:_SUM]:
        return None
    body = json.loads(text)
    return body if isinstance(body, dict) and isinstance(body.get("n"), int) else None


def _whole(line: bytes) -> bool:
    """Whether a line looks like a record, whatever was before it."""
    with suppress(ValueError, TypeError):
        return line.endswith(b"\n") and "n" in json.loads(line[_SUM + 1 :])
    return False


def _lines(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield place and bytes of each line; the last may have no end."""
    place, held, at = 0, b"", 0
    while piece := os.pread(fd, _READ, at):
        at += len(piece)
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield place, line + b"\n"
            place += len(line) + 1
    if held:
        yield place, held


def _kept_name(path: Path, whose: str) -> Path:
    """Return a free name for the journal of another session."""
    stem = f"{path.name}-{whose[:16] or 'unknown'}"
    names = (f"{stem}{f'-{number}' if number else ''}" for number in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))
