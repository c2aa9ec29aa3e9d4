"""The event log of this host: ``STATE_DIR/events.jsonl``, one JSON object a line, for every
operation that changed something.

Events are numbered by `seq`, from 1, without gap or duplicate, however many processes write at once
and however they end.  The file is the only counter: a writer takes the lock (``events.lock``; the
kernel releases it with its holder), reads the number of the last line, and writes one line with the
next one in one write.  A line without its newline counts as not written: its writer was killed, the
next one cuts it off, readers do not see it.  The line is on the disk before the operation ends, so
that a number that was reported is not given again after a power cut.

A file that has grown to `LIMIT` becomes ``events-<number of its first event>.jsonl``; the numbers
go on in a new one, and only the newest `KEPT` such files stay.  Totals that must outlive them are
in ``events.tally.json`` (`tally`), which is brought up to date at each such change; so adding up
takes one reading of one file.

Files are 0600 and hold no secret: names, numbers, codes, never a message, a command line or a
label.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from ...errors import UntrustedPath
from ...proc.folders import make_private
from .tally import Tally

LIMIT = 4 << 20  # bytes of one file
KEPT = 8  # full files
PATIENCE = 10.0  # seconds for the lock: it is held for less than a millisecond
POLL = 0.2  # seconds between two looks of a reader that follows
_BLOCK = 64 << 10
_ROTATED = re.compile(r"events-(\d{20})\.jsonl")

Event = dict[str, Any]


class EventLog:
    """The log in one state folder."""

    def __init__(self, state_dir: str | Path, *, limit: int = LIMIT) -> None:
        self.folder = Path(state_dir)
        self.path = self.folder / "events.jsonl"
        self._limit = limit

    # -- writing
    # --------------------------------------------------------------------------------------

    def append(self, bodies: Sequence[Mapping[str, Any]]) -> list[Event]:
        """Add an event for each of `bodies`, with number and time, all or none; return them.
        `OSError`.
        """
        if not bodies:
            return []
        try:
            make_private(self.folder)
        # the operation is done, whether or not it can be recorded
        except UntrustedPath as error:
            raise PermissionError(errno.EACCES, error.message, str(self.folder)) from error
        with contextlib.ExitStack() as stack:
            with self._locked():
                file = stack.enter_context(self._open())
                end = _mend(file)
                if end >= self._limit:
                    # better too large a file than a missing event
                    with contextlib.suppress(OSError):
                        self._rotate()
                        file = stack.enter_context(self._open())
                        end = 0
                number = self._last(file, end)
                events = [
                    {"seq": number + i, "time": now(), **body} for i, body in enumerate(bodies, 1)
                ]
                data = b"".join(
                    json.dumps(e, separators=(",", ":")).encode("ascii") + b"\n" for e in events
                )
                _write(file, data, end)
            # not under the lock: the next writer need not wait for the disk
            os.fdatasync(file.fileno())
            if not end:
                self._sync_names()
        return events

    def _open(self) -> IO[bytes]:
        return open(
            os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600),
            "r+b",
            buffering=0,
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(
            self.folder / "events.lock",
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            deadline, pause = time.monotonic() + PATIENCE, 0.0005
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # a lock's holder was stopped: no operation waits for that
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"{self.folder}/events.lock is held by another process"
                        ) from None
                time.sleep(pause)
                pause = min(pause * 2, 0.01)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        finally:
            os.close(fd)

    def _last(self, file: IO[bytes] | None, end: int) -> int:
        """Return the number of the newest event, given the file that is written now."""
        found = _last_number(file, end) if file is not None else None
        for path in reversed(self._full()):
            if found is not None:
                return found
            with contextlib.suppress(FileNotFoundError), path.open("rb") as older:
                found = _last_number(older, os.fstat(older.fileno()).st_size)
        return found or self._tallied().seq

    def _rotate(self) -> None:
        """Set the file aside.  If it is interrupted anywhere, the next call does what is
        missing.
        """
        tally = self.tally()
        temporary = self.folder / f".events.tally.{os.getpid()}"
        try:
            with open(
                os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w"
            ) as file:
                json.dump(tally.to_dict(), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / "events.tally.json")
        finally:
            temporary.unlink(missing_ok=True)
        first = next((event["seq"] for event in _events(self.path)), tally.seq + 1)
        self.path.rename(self.folder / f"events-{first:020d}.jsonl")
        for old in self._full()[:-KEPT]:
            old.unlink(missing_ok=True)

    def _sync_names(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- reading
    # --------------------------------------------------------------------------------------

    def read(self, since: int = 0) -> Iterator[Event]:
        """Return the kept events above number `since`, oldest first; raise `OSError`."""
        try:
            # first: if it is set aside meanwhile, this descriptor still reads it
            current: IO[bytes] | None = self.path.open("rb")
        except FileNotFoundError:
            current = None
        with current or contextlib.nullcontext():
            full = self._full()
            begins = [_first(path) for path in full[1:]]
            begins += (
                [event["seq"]]
                if current is not None and (event := _event(current.readline())) is not None
                else []
            )
            for path, following in zip_longest(full, begins[: len(full)]):
                if following is not None and following <= since + 1:
                    continue
                for event in _events(path):
                    if event["seq"] > since:
                        since = event["seq"]
                        yield event
            for event in _lines(current, 0)[0] if current is not None else ():
                if event["seq"] > since:
                    since = event["seq"]
                    yield event

    def follow(self, since: int | None = None) -> Iterator[Event | None]:
        """Yield events above `since` (None: from now on) as they come, without end; None whenever
        there is none just now.
        """
        number = self.newest() if since is None else since
        file: IO[bytes] | None = None
        offset = 0
        try:
            while True:
                events: list[Event] = []
                if file is not None:
                    # asked before reading: then nothing is written to it after what was read
                    replaced = not self._is(file)
                    events, offset = _lines(file, offset)
                    if replaced:
                        file.close()
                        file = None
                        events += self.read(max([number, *(e["seq"] for e in events)]))
                else:
                    with contextlib.suppress(FileNotFoundError):
                        file, offset = self.path.open("rb"), 0
                        events = list(self.read(number))
                for event in events:
                    if event["seq"] > number:
                        number = event["seq"]
                        yield event
                if not events:
                    yield None
                    time.sleep(POLL)
        finally:
            if file is not None:
                file.close()

    def newest(self) -> int:
        """Return the number of the newest event, 0 when there is none."""
        try:
            with self.path.open("rb") as file:
                return self._last(file, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return self._last(None, 0)

    def tally(self) -> Tally:
        """Return the totals of all events since the first one, also those that are not kept any
        more. `OSError`.
        """
        tally = self._tallied()
        for event in self.read(tally.seq):
            tally.add(event)
        return tally

    def _tallied(self) -> Tally:
        try:
            return Tally.from_dict(json.loads((self.folder / "events.tally.json").read_bytes()))
        except (OSError, ValueError, TypeError, AttributeError):
            return Tally()  # then only the kept events are known

    def _is(self, file: IO[bytes]) -> bool:
        """Return whether `file` is the one that is written now."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return True  # it was just set aside, and no new one exists yet

    def _full(self) -> list[Path]:
        """Return the files that were set aside, oldest first."""
        try:
            return sorted(path for path in self.folder.iterdir() if _ROTATED.fullmatch(path.name))
        except FileNotFoundError:
            return []


def _first(path: Path) -> int:
    match = _ROTATED.fullmatch(path.name)
    return int(match[1]) if match else 0


def _write(file: IO[bytes], data: bytes, end: int) -> None:
    """Write all of `data` at offset `end`, or nothing."""
    try:
        done = os.pwrite(file.fileno(), data, end)
        while done < len(data):  # a full disk takes a part before it fails
            done += os.pwrite(file.fileno(), data[done:], end + done)
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def _mend(file: IO[bytes]) -> int:
    """Cut off an unfinished last line; return the size of the file."""
    size = end = os.fstat(file.fileno()).st_size
    while end:
        begin = max(0, end - _BLOCK)
        newline = os.pread(file.fileno(), end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file.fileno(), end)
    return end


def _last_number(file: IO[bytes], end: int) -> int | None:
    """Return the number of the last event of a file; lines that are none (zeros, after a power cut)
    are skipped.
    """
    begin, data = end, b""
    while begin:
        more = min(begin, max(_BLOCK, len(data)))
        begin -= more
        data = os.pread(file.fileno(), more, begin) + data
        # the first may begin further up; after the last newline is no line
        lines = data.split(b"\n")[1 if begin else 0 : -1]
        for line in reversed(lines):
            event = _event(line)
            if event is not None:
                number: int = event["seq"]
                return number
    return None


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and type(event.get("seq")) is int else None


def _lines(file: IO[bytes], offset: int) -> tuple[list[Event], int]:
    """Return the events in the complete lines from `offset` on, and the offset after those."""
    file.seek(offset)
    data = file.read()
    complete = data.rfind(b"\n") + 1
    return [
        event for line in data[:complete].splitlines() if (event := _event(line)) is not None
    ], offset + complete


def _events(path: Path) -> list[Event]:
    try:
        with path.open("rb") as file:
            return _lines(file, 0)[0]
    except FileNotFoundError:
        return []  # it was too old, and was removed just now


def now() -> str:
    """Return the present time, as events have it."""
    return as_text(datetime.now(UTC))


def as_text(moment: datetime) -> str:
    """Return a time as events have it; such texts sort as the times do."""
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
