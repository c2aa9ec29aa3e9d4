"""Commands of a session as a client sees them: their output as it comes, and how they ended.

The holder runs a command and keeps its record; the output of one that runs in the session's shell
is the session's output between two offsets.  `follow` reads it as it comes.  The order of its
requests makes the end exact: output that was read before the record said that the command still
ran is the command's.  What the holder no longer keeps when its turn comes is counted as missing.

`Cleaner` removes what the terminal and the shell's hooks have added: the carriage return at the end
of each line, marks, and the mode changes with which fish begins a command.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import SessionGone, TimedOut, WrongState
from ..screen.plain_text import strip

if TYPE_CHECKING:
    from .session import Session

RUNNING, TIMED_OUT, SHELL_DIED = "running", "timed-out", "shell-died"
_PIECE = 1 << 20  # bytes of output that are read at once
_NEW_LOOK = 0.1  # seconds between two looks at what a new command has printed
_LOOK = 0.5  # seconds between two looks at a command that prints nothing
_MARK = re.compile(rb"\x1b\](?:133|7133);[ABCDR];[^\x07\x1b]{0,200}\x07")
_CUT = re.compile(rb"\x1b(?:\](?:[0-9]{0,4}|(?:133|7133);[^\x07\x1b]{0,200}))?\Z")
# fish: bracketed paste off, the title, the colour, and back to the line's beginning.
_PROLOGUE = re.compile(rb"(?:\x1b(?:\[[?0-9;]*[a-zA-Z]|\][^\x07]{0,1000}\x07|\([A-Z]))+\r")
_MAX_PROLOGUE = 1200


class Cleaner:
    """Makes a command's output of a session's output, piece by piece."""

    def __init__(self, shell: str = "", *, plain: bool = False) -> None:
        self._prologue, self._plain = shell == "fish", plain
        self._held = b""

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """Return what is known to be output; `last`: nothing comes after `data`."""
        data = self._held + data
        self._held = b""
        if self._prologue:
            match = _PROLOGUE.match(data)
            if (
                match is None
                and not last
                and len(data) < _MAX_PROLOGUE
                and data[:1] in (b"", b"\x1b")
            ):
                self._held = data
                return b""
            self._prologue = False
            data = data[match.end() :] if match is not None else data
        data = _MARK.sub(b"", data)
        if not last:
            cut = _CUT.search(data[-300:])
            if cut is not None:
                self._held = cut[0]
            elif data.endswith(b"\r"):
                self._held = b"\r"
            data = data[: len(data) - len(self._held)]
        if self._plain:
            data, rest = strip(data)
            self._held = rest + self._held
            if last:
                self._held = b""
            return data
        return data.replace(b"\r\n", b"\n")


@dataclass(slots=True)
class Followed:
    """How far a command was followed."""

    record: dict[str, Any]  # the command, as the holder reported it last
    offset: int  # of the first byte that was asked for
    end: int  # behind the last byte that was passed on
    missing: int  # bytes between them that are not kept any more
    late: str = ""  # why it was given up; "": it has ended
    errors_end: int = 0  # as `end`, of a new command's standard error

    @property
    def state(self) -> str:
        """Return the command's state, or that it did not end in time."""
        return TIMED_OUT if self.late else str(self.record["state"])


@dataclass(frozen=True, slots=True)
class New:
    """How a command is to run next to the terminal; None is as the program in the foreground."""

    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # variables besides
    user: str | None = None
    stdin: bytes | None = None  # None: no input


def start(
    session: Session, words: list[str], timeout: float, new: New | None = None
) -> dict[str, Any]:
    """Start a command, and return its record when it has begun.

    Without `new` it runs in the session's shell.
    """
    if new is None:
        found = session.request("command-start", argv=words, timeout=timeout)
        return dict(found["command"])
    options = {"cwd": new.cwd, "env": dict(new.env), "user": new.user}
    memory = -1
    try:
        if new.stdin is not None:
            memory = os.memfd_create("stdin", os.MFD_CLOEXEC)
            with open(memory, "wb", closefd=False) as file:
                file.write(new.stdin)
        fds = [memory] if memory >= 0 else []
        found = session.request(
            "command-start", argv=words, kind="new", timeout=timeout, fds=fds, **options
        )
    finally:
        if memory >= 0:
            os.close(memory)
    return dict(found["command"])


def record_of(session: Session, command_id: str) -> dict[str, Any]:
    """Return the record of a command; `NotFound`."""
    return dict(session.request("command", command=command_id)["command"])


def follow(
    session: Session,
    record: dict[str, Any],
    show: Callable[[bytes], None],
    *,
    since: int | None = None,
    timeout: float | None = None,
    silence: float | None = None,
    cleaner: Cleaner | None = None,
) -> Followed:
    """Pass a command's output on to `show` until it has ended, or time is over.

    `since` is the offset to begin at.  It is given up after `timeout` seconds, or when it has
    printed nothing for `silence` seconds; with `timeout` 0 after what is there.
    """
    cleaner = cleaner or Cleaner(record["shell"])
    begin = int(record["begin"] if record["begin"] is not None else session.status()["offset"])
    followed = Followed(record, max(begin, since or 0), max(begin, since or 0), 0)
    began = printed = time.monotonic()
    while True:
        piece = session.read(followed.end, followed.end + _PIECE)
        record = followed.record = record_of(session, record["id"])
        end = record["end"]
        data = piece.data if end is None else piece.data[: max(0, end - piece.offset)]
        at = piece.offset if end is None else min(piece.offset, end)
        missed = max(0, at - followed.end)  # not kept any more
        followed.missing += missed
        followed.end = max(at, followed.end) + len(data)
        if data:
            printed = time.monotonic()
        done = record["state"] != RUNNING and followed.end >= end
        if ready := cleaner.feed(data, last=done):
            show(ready)
        if done:
            return followed
        if missed:
            continue
        if not data or timeout is not None or silence is not None:
            now = time.monotonic()
            late, left = _late(now - began, now - printed, timeout, silence)
            if late and not (timeout == 0 and data):
                followed.late = late
                if rest := cleaner.feed(b"", last=True):
                    show(rest)
                return followed
            if not data:
                _wait(session, followed, min(_LOOK, left))


def _late(
    passed: float, silent: float, timeout: float | None, silence: float | None
) -> tuple[str, float]:
    """Return why a command is late ("": it is not), and for how long it may not be."""
    left = [_LOOK]
    if timeout is not None:
        if passed >= timeout:
            return f"the command did not end in {timeout:g} s", 0.0
        left.append(timeout - passed)
    if silence is not None:
        if silent >= silence:
            return f"the command printed nothing for {silence:g} s", 0.0
        left.append(silence - silent)
    return "", min(left)


def _wait(session: Session, followed: Followed, seconds: float) -> None:
    """Wait for more output; a session that has ended prints no more."""
    try:
        session.wait_output(followed.end, seconds)
    except TimedOut:
        return
    except WrongState as error:
        if record_of(session, followed.record["id"])["state"] == RUNNING:
            raise SessionGone("the session ended before the command did") from error


def follow_new(
    session: Session,
    record: dict[str, Any],
    show: Callable[[str, bytes], None],
    *,
    since: int | None = None,
    errors_since: int = 0,
    timeout: float | None = None,
    silence: float | None = None,
) -> Followed:
    """Pass what a new command prints on to `show`, with the stream's name; as `follow`.

    `since`, ``offset`` and ``end`` are offsets in its standard output, `errors_since` in the other.
    """
    places = {"stdout": since or 0, "stderr": errors_since}
    followed = Followed(record, places["stdout"], places["stdout"], 0)
    began = printed = time.monotonic()
    while True:
        came, behind = False, False
        record = followed.record = record_of(session, record["id"])
        for stream, place in places.items():
            wanted: dict[str, Any] = {"command": record["id"], "stream": stream, "from": place}
            answer = session.request("command-read", **wanted)
            data = base64.b64decode(answer["base64"])
            followed.missing += max(0, answer["from"] - place)
            places[stream] = max(place, answer["to"])
            behind = behind or places[stream] < answer["end"]
            if data:
                came, printed = True, time.monotonic()
                show(stream, data)
        followed.end, followed.errors_end = places["stdout"], places["stderr"]
        if behind:
            continue
        if record["state"] != RUNNING:
            return followed
        now = time.monotonic()
        late, left = _late(now - began, now - printed, timeout, silence)
        if late:
            followed.late = late
            return followed
        if not came:
            with contextlib.suppress(TimedOut):
                session.wait_command(record["id"], min(_NEW_LOOK, left))
