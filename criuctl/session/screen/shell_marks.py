"""The marks that the hooks of a session's shell print, and what they say about the shell.

`launch.shell_hooks` describes the marks.  The holder feeds all output through `ShellMarks`, which
keeps the last state: at which prompt the shell is, or that a command runs.  A mark is accepted only
if it has the session's nonce and the number that is due: a mark in a copy of earlier output has an
old one.  A prompt with another number (the shell is one of an older checkpoint) is accepted if
`verify` finds the shell itself in the terminal's foreground.

Text without escapes costs nothing here; a mark that a read cuts in two is carried over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = re.compile(rb"\x1b\](?:133|7133);([ABCDR])((?:;[^;\x07\x1b]{0,64}){1,4})\x07")
_MAX_CARRY = 200  # bytes of an incomplete mark
_SMALL = 4096  # bytes that may be copied to be joined with what was carried over
PROMPT, MORE, END_OF_PROMPT = "prompt", "more", "end-of-prompt"
BEGIN, END, KEY = "begin", "end", "key"
_KINDS = {b"A": PROMPT, b"B": END_OF_PROMPT, b"C": BEGIN, b"D": END, b"R": KEY}


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark that was accepted; `start` and `end` are its place in the output."""

    kind: str
    start: int
    end: int
    status: int = 0  # of a command that has ended


class ShellMarks:
    """What the marks in the output of one session have said so far."""

    def __init__(self) -> None:
        self.shell = ""  # the kind of shell that has hooks; "": none
        self.nonce = ""
        self.pid = 0  # of the shell, in its own PID namespace
        self.number = 0  # of the last prompt
        self.state = ""  # PROMPT, MORE or BEGIN; "": no mark has come yet
        self.at = 0  # the offset behind the last mark of the prompt
        self.on_mark: Callable[[Mark], None] = lambda mark: None
        self.verify: Callable[[int], bool] = lambda pid: False
        self._carry = b""

    def begin(self, shell: str, nonce: str) -> None:
        """Expect marks with this nonce."""
        self.shell, self.nonce = shell, nonce

    @property
    def waiting(self) -> bool:
        """Whether the beginning of a mark has come, and its rest is due."""
        return bool(self._carry)

    def feed(self, data: memoryview, offset: int) -> None:
        """Look at output `data`, whose first byte has this offset in the log."""
        if not self.nonce:
            return
        if self._carry:
            carried, self._carry = self._carry, b""
            if len(data) < _SMALL:
                data, offset = memoryview(carried + data), offset - len(carried)
            else:
                joined = carried + bytes(data[:_MAX_CARRY])
                match = _MARK.match(joined)
                if match is not None:
                    self._found(match, offset - len(carried))
        for match in _MARK.finditer(data):
            self._found(match, offset)
        tail = bytes(data[-_MAX_CARRY:])
        last = tail.rfind(b"\x1b")
        if last >= 0 and b"\x07" not in tail[last:] and tail[last + 1 : last + 2] in (b"", b"]"):
            self._carry = tail[last:]

    def _found(self, match: re.Match[bytes], offset: int) -> None:
        fields = match[2][1:].split(b";")
        if b"aid=" + self.nonce.encode() not in fields:
            return
        kind = _KINDS[match[1]]
        values = dict(field.split(b"=", 1) for field in fields if b"=" in field)
        start, end = offset + match.start(), offset + match.end()
        if kind == PROMPT and b"k" in values:
            kind = MORE
        number, pid = _number(values.get(b"n")), _number(values.get(b"pid"))
        if kind == PROMPT:
            if number <= self.number and not self.verify(pid):
                return
            self.number, self.pid = number, pid
        elif kind in (BEGIN, END, KEY) and number != self.number:
            return
        if kind == KEY and self.state != PROMPT:
            return
        if kind != KEY:
            self.at = end
        if kind in (PROMPT, MORE, BEGIN):
            self.state = kind
        self.on_mark(Mark(kind, start, end, _number(fields[0]) if kind == END else 0))

    # -- re-exec, checkpoints ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder, or for the next holder."""
        return {
            "shell": self.shell,
            "nonce": self.nonce,
            "pid": self.pid,
            "number": self.number,
            "state": self.state,
            "at": self.at,
            "carry": self._carry.decode("latin-1"),
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `to_dict`, of this or another version, returned."""
        self.shell, self.nonce = str(values.get("shell", "")), str(values.get("nonce", ""))
        self.pid, self.number = int(values.get("pid", 0)), int(values.get("number", 0))
        self.state, self.at = str(values.get("state", "")), int(values.get("at", 0))
        self._carry = str(values.get("carry", "")).encode("latin-1")


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else 0
