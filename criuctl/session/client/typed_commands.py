"""Running a command in a shell that has no hooks, by typing it: a shell behind ssh, say.

Nothing is known of what reads the terminal: the caller says that a shell does.  The line that is
typed prints an OSC 133 mark before the command (``C``) and one after it (``D``, with the exit
code).  Both hold a nonce, so that no other output can be taken for them; the line as the terminal
echoes it holds no escape, only the words that make one.  The command itself is sent as octal
escapes of ``printf %b``: always one line, and nothing that a line editor, a history or a terminal
would interpret.  The shell itself evaluates it, so ``cd`` and variables stay in effect.

The second mark does not come if the command is interrupted or ends the shell: a time limit is
needed.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import TimedOut, UsageError, WrongState
from ..protocol import state_hint

if TYPE_CHECKING:
    from .session import Session

_MAX_CANONICAL = 4000  # bytes that a terminal takes as one line
_BEGIN_TIMEOUT = 10.0  # seconds until the shell must have begun
_SAFE = frozenset(
    b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _-./:=,+@^~[]{}()<>|&;*?#"'
)


@dataclass(slots=True)
class Typed:
    """A command that was typed."""

    begin: int  # offset of the first byte of its output
    end: int  # ... and of the byte behind the last that was seen
    exit_code: int | None = None  # None: it has not ended
    missing: int = 0  # bytes in between that were not kept
    late: str = ""  # why it was given up


def command_line(command: Sequence[str], nonce: str) -> bytes:
    """Return what is typed for `command`.

    One word is a line of shell, several are a command and its arguments.
    """
    text = command[0] if len(command) == 1 else shlex.join(command)
    data = text.encode(errors="surrogateescape")
    if not data.strip():
        raise UsageError("an empty command")
    if b"\0" in data:
        raise UsageError("a command cannot hold a NUL byte")
    escaped = "".join(chr(byte) if byte in _SAFE else f"\\0{byte:03o}" for byte in data)
    # The leading space keeps it out of the history of shells that are set up so.
    return (
        f" printf '\\033]133;C;aid=%s\\007' {nonce}; eval \"$(printf %b '{escaped}')\"; printf "
        f"'\\033]133;D;%s;aid=%s\\007' \"$?\" {nonce}"
    ).encode()


def execute(
    session: Session, command: Sequence[str], show: Callable[[bytes], None], *, timeout: float
) -> Typed:
    """Type `command`, and give its raw output to `show` as it comes, for `timeout` seconds.

    `TimedOut` if nothing has begun it within ten seconds.
    """
    status = session.status()
    if status["state"] != "running":
        name, state = status["session"], status["state"]
        raise WrongState(f"session {name!r} is {state}", hint=state_hint(state, name))
    nonce = os.urandom(8).hex()
    line = command_line(command, nonce)
    if len(line) > _MAX_CANONICAL:
        raise UsageError(
            f"the command is too long to be typed: {len(line)} bytes, {_MAX_CANONICAL} at most"
        )
    if status["modes"]["bracketed_paste"]:
        line = b"\x1b[200~" + line + b"\x1b[201~"
    began = time.monotonic()
    # Delete what is half typed first.
    offset = int(session.send(b"\x15" + line + b"\r")["offset"])
    marks = Marks(nonce, offset)
    missing = 0
    while True:
        piece = session.read(offset)
        if marks.begin >= 0:
            missing += max(0, piece.offset - offset)
        offset = piece.end
        if output := marks.feed(piece.data, piece.offset):
            show(output)
        if marks.exit_code is not None:
            return Typed(marks.begin, marks.end, marks.exit_code, missing)
        passed = time.monotonic() - began
        if marks.begin < 0 and passed > min(timeout, _BEGIN_TIMEOUT):
            text = f"nothing in session {status['session']!r} has begun the command"
            raise TimedOut(f"{text} in {passed:.0f} s: is it a shell?")
        late = f"the command did not end in {timeout:g} s" if passed >= timeout else ""
        if not late:
            late = _wait_for_output(session, offset, timeout - passed)
        if late:
            return Typed(max(marks.begin, 0), offset, None, missing, late)


def _wait_for_output(session: Session, offset: int, seconds: float) -> str:
    """Wait until there is output behind `offset`; return why there will be none."""
    try:
        session.wait_output(offset, min(seconds, _BEGIN_TIMEOUT))
    except TimedOut:
        return ""
    except WrongState:
        if session.status()["offset"] <= offset:
            return "the session ended before the command did"
    return ""


class Marks:
    """Finds the two marks in a stream of output, and returns what is between them."""

    def __init__(self, nonce: str, offset: int) -> None:
        self._begin = f"\x1b]133;C;aid={nonce}\x07".encode()
        self._end = re.compile(rf"\x1b\]133;D;(\d{{1,3}});aid={nonce}\x07".encode())
        self._longest = len(self._begin) + 6
        self._buffer = b""
        self._at = offset  # of the buffer's first byte
        self.begin = -1
        self.end = -1
        self.exit_code: int | None = None

    def feed(self, data: bytes, offset: int) -> bytes:
        """Take output at `offset`; return what of it is known to be the command's."""
        if offset != self._at + len(self._buffer):  # the log has lost what was between
            self._buffer, self._at = b"", offset
        self._buffer += data
        if self.begin < 0:
            found = self._buffer.find(self._begin)
            if found < 0:
                self._drop(len(self._buffer) - self._longest)
                return b""
            self._drop(found + len(self._begin))
            self.begin = self._at
        if match := self._end.search(self._buffer):
            self.exit_code, self.end = int(match[1]), self._at + match.start()
            return self._drop(match.start())
        # A mark may begin at the last escape: keep that until more output comes.
        last = self._buffer.rfind(b"\x1b", max(0, len(self._buffer) - self._longest))
        return self._drop(last if last >= 0 else len(self._buffer))

    def _drop(self, count: int) -> bytes:
        count = max(0, count)
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        self._at += count
        return piece
