"""Running a command in the live shell of a session, and finding its output and exit code.

The line that is typed prints an OSC 133 mark before the command (``C``) and one after it (``D``,
with the exit code).  Both hold a nonce, so that no other output can be taken for them; the line as
the terminal echoes it holds no escape, only the words that make one.  The command itself is sent as
octal escapes of ``printf %b``: always one line, and nothing that a line editor, a history or a
terminal would interpret.  The shell itself evaluates it, so ``cd`` and variables stay in effect.

A shell at its prompt is recognised from outside: it leads the terminal's foreground group, and its
line editor has switched off the terminal's own.  A shell without a line editor (dash) counts as
being at its prompt when it sleeps.
"""

from __future__ import annotations

import os
import re
import shlex
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CriuctlError, SessionGone, TimedOut, UsageError, WrongState
from ...proc.procfs import read_bytes
from ...proc.tree import children

if TYPE_CHECKING:
    from .session import Session

_EDITORS = ("bash", "zsh")  # their line editor shows that they are at the prompt
_PLAIN = ("sh", "dash", "ash", "busybox", "ksh", "mksh")
_MAX_CANONICAL = 4000  # bytes that a terminal takes as one line
_BEGIN_TIMEOUT = 10.0  # seconds until the shell must have begun
_SETTLE, _LOOK = 3.0, 0.02  # seconds for a shell to come to its prompt; between two looks
_SAFE = frozenset(
    b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _-./:=,+@^~[]{}()<>|&;*?#"'
)


@dataclass(frozen=True, slots=True)
class Executed:
    """A command that a shell has run."""

    exit_code: int
    begin: int  # offset of the first byte of its output
    end: int  # ... and of the byte behind the last


def at_prompt(root: int) -> str | None:
    """Return the name of the shell that is at its prompt on the terminal of the tree of `root`.

    None: no shell is.
    """
    leader = _foreground(root)
    if leader is None:
        return None
    try:
        name = os.fsdecode(read_bytes(leader, "comm")).strip()
        if name not in _EDITORS + _PLAIN:
            return None
        fd = os.open(
            f"/proc/{leader}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except (CriuctlError, OSError):
        return None
    try:
        canonical = bool(termios.tcgetattr(fd)[3] & termios.ICANON)
    except termios.error:
        return None
    finally:
        os.close(fd)
    if name in _EDITORS and canonical:
        return None
    state = _stat(leader)
    return name if state is not None and state[0] == b"S" else None


def foreground_name(root: int) -> str:
    """Return the name of the program in the foreground, for an error's text."""
    leader = _foreground(root)
    if leader is None:
        return "nothing"
    try:
        return os.fsdecode(read_bytes(leader, "comm")).strip()
    except CriuctlError:
        return "nothing"


def _stat(pid: int) -> list[bytes] | None:
    try:
        return read_bytes(pid, "stat").rpartition(b")")[2].split()
    except CriuctlError:
        return None


def _foreground(root: int) -> int | None:
    """Return the leader of the foreground group of the terminal of the tree of `root`."""
    todo, seen = [root], set()
    while todo:
        pid = todo.pop(0)
        seen.add(pid)
        fields = _stat(pid)
        if fields is None:
            continue
        if int(fields[4]) and int(fields[5]) > 0:  # tty_nr, tpgid
            return int(fields[5])
        try:
            todo += [child for child in children(pid) if child not in seen]
        except CriuctlError:
            continue
    return None


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
    session: Session,
    command: Sequence[str],
    show: Callable[[bytes], None],
    *,
    timeout: float | None = None,
    force: bool = False,
) -> Executed:
    """Run `command` in the shell of the session, and give its raw output to `show` as it comes.

    `WrongState` if no shell is at a prompt (`force` does not check that).  `TimedOut` if it takes
    longer than `timeout` seconds: it runs on.
    """
    status = session.status()
    if status["state"] != "running":
        raise WrongState(f"session {status['session']!r} is {status['state']}")
    shell = _shell(status, force=force)
    nonce = os.urandom(8).hex()
    line = command_line(command, nonce)
    if shell not in _EDITORS and len(line) > _MAX_CANONICAL:
        raise UsageError(
            f"the command is too long for {shell or 'this shell'}: {len(line)} bytes typed, "
            f"{_MAX_CANONICAL} at most"
        )
    # Delete what is half typed (the blank: an editor with nothing to delete rings the bell).
    # A paste does not trigger completion.
    clear = b" \x05\x15" if shell in _EDITORS else b"\x15"
    if status["modes"]["bracketed_paste"]:
        line = b"\x1b[200~" + line + b"\x1b[201~"
    begun = time.monotonic()
    offset = int(session.send(clear + line + b"\r")["offset"])
    marks = Marks(nonce, offset)
    while True:
        piece = session.read(offset)
        offset = piece.end
        output = marks.feed(piece.data, piece.offset)
        if output:
            show(output)
        if marks.exit_code is not None:
            return Executed(marks.exit_code, marks.begin, marks.end)
        left = _seconds_left(status["session"], marks, time.monotonic() - begun, timeout)
        _wait_for_output(session, offset, left)


def _shell(status: dict[str, Any], *, force: bool) -> str | None:
    """Return the shell that is at its prompt; `WrongState`, with `force` None, if none is.

    A shell that has just run something is waited for.
    """
    root, settled = status["pid"], time.monotonic() + _SETTLE
    shell = at_prompt(root)
    while shell is None and not force and time.monotonic() < settled:
        if foreground_name(root) not in _EDITORS + _PLAIN:
            break
        time.sleep(_LOOK)
        shell = at_prompt(root)
    if shell is None and not force:
        raise WrongState(
            f"no shell is at its prompt in session {status['session']!r}: "
            f"{foreground_name(root)} is in the foreground",
            hint="`criuctl wait NAME --prompt` waits for one; --force types anyway.",
        )
    return shell


def _seconds_left(name: str, marks: Marks, passed: float, timeout: float | None) -> float | None:
    """Return how long to wait for more output; None: for ever.  `TimedOut` when time is over."""
    if marks.begin < 0 and passed > _BEGIN_TIMEOUT:
        text = f"nothing in session {name!r} has begun the command in {_BEGIN_TIMEOUT:g} s"
        raise TimedOut(f"{text}: is it a shell?")
    left = None if timeout is None else timeout - passed
    if left is not None and left <= 0:
        raise TimedOut(f"the command did not end in {timeout:g} s; it runs on")
    limit = _BEGIN_TIMEOUT - passed + 0.01 if marks.begin < 0 else None
    return min((seconds for seconds in (left, limit) if seconds is not None), default=None)


def _wait_for_output(session: Session, offset: int, seconds: float | None) -> None:
    """Wait until there is output behind `offset`, or the time is over; `SessionGone`."""
    try:
        session.wait_output(offset, seconds)
    except TimedOut:
        return
    except WrongState as error:
        if session.status()["offset"] <= offset:
            raise SessionGone(
                "the session ended before the command did",
                hint="Did the command end the shell?",
            ) from error


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
