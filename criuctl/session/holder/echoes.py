"""Which parts of the output only repeat what was typed: the echo.

A client that waits for a text must not find it in the command that was just typed.  The terminal,
or a program with a line editor, prints each typed line again, and nothing in the output says so.
The holder knows what was typed, and looks for a copy of each line in the output behind it:

- While the terminal echoes, a copy of each line comes, wherever other output leaves room.
- A shell with hooks (`screen.shell_marks`) prints a copy of the line behind its prompt, before it
  begins the command; of a line that was typed ahead this is a second copy.
- A program that reads keys itself, the terminal's echo off, may print them: a copy counts that is
  the first text behind what was typed.  A terminal that reads lines without an echo asks for a
  password: nothing is expected.

Only the places of the copies are kept and reported, never the text, which may be secret where no
echo came.  Control sequences and line ends within a copy do not matter: editors add colours, and
wrap long lines.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..screen.plain_text import visible
from ..screen.shell_marks import BEGIN, MORE, PROMPT, Mark, ShellMarks
from .output_log import OutputLog

_MOST_SPANS = 128  # echoes that are remembered
_MOST_LINES = 32  # lines that are expected at a time
_MOST_TYPED = 64 << 10  # bytes of one input that are looked at
_LONGEST_LINE = 4096
_WINDOW = 64 << 10  # bytes of text in which an echo has to come
_PASTE = re.compile(rb"\x1b\[20[01]~")
_LINE_END = re.compile(rb"\r\n|[\r\n]")
_TEXT = re.compile(rb"[^\x00-\x1f\x7f]*")


@dataclass(slots=True)
class _Expected:
    """A line whose copy is due."""

    line: bytes
    start: int  # index in the text from which on it may come
    at_once: bool = False  # only as the first text there
    before_begin: bool = False  # only until the shell begins a command


class Echoes:
    """The echoes in the output of one session."""

    def __init__(self, log: OutputLog, marks: ShellMarks) -> None:
        self._log, self._marks = log, marks
        self._spans: deque[tuple[int, int]] = deque(maxlen=_MOST_SPANS)
        self._expected: list[_Expected] = []
        self._ahead: deque[bytes] = deque(maxlen=_MOST_LINES)  # lines the shell has not begun
        self._at = 0  # offset behind the output that was looked at
        self._forget_text()

    def report(self) -> list[tuple[int, int]]:
        """Return where echoes begin and end in the output, one that is still coming included."""
        self.look(self._log.end)
        coming = [
            (self._place(one.start), self._log.end)
            for one in self._expected
            if one.start < len(self._text) and one.line.startswith(self._text[one.start :])
        ]
        return [*self._spans, *coming]

    # -- what is typed ----------------------------------------------------------------------------

    def typed(self, data: bytes, *, echoes: bool, line_mode: bool) -> None:
        """Expect the echo of `data`, which is written now; the other values are the terminal's."""
        self.look(self._log.end)
        pieces = _LINE_END.split(_PASTE.sub(b"", data[:_MOST_TYPED]))[:_MOST_LINES]
        lines = [match[0][:_LONGEST_LINE] for piece in pieces if (match := _TEXT.match(piece))]
        marks = self._marks
        hooked = bool(marks.nonce) and marks.shell != "sh"
        prompts = hooked and marks.state in (PROMPT, MORE)
        if echoes:
            for line in lines:
                self._expect(line)
        if prompts:
            self._ahead.clear()
            self._expect(lines[0], before_begin=True)
        elif not echoes and not line_mode:
            self._expect(lines[0], at_once=True)
        if hooked:
            self._ahead += lines[:-1]  # behind the last line end a line is not complete

    def _expect(self, line: bytes, *, at_once: bool = False, before_begin: bool = False) -> None:
        if line and len(self._expected) < _MOST_LINES:
            if not self._expected:
                self._forget_text()
            self._expected.append(_Expected(line, len(self._text), at_once, before_begin))

    # -- what comes -------------------------------------------------------------------------------

    def on_mark(self, mark: Mark) -> None:
        """Handle a mark of the shell."""
        if mark.kind == PROMPT and self._ahead:
            self.look(mark.end)
            self._expect(self._ahead[0], before_begin=True)
        elif mark.kind == BEGIN:
            self.look(mark.start)
            self._expected = [one for one in self._expected if not one.before_begin]
            if self._ahead:
                self._ahead.popleft()

    def look(self, end: int) -> None:
        """Look for echoes in the output up to `end`."""
        if not self._expected:
            self._at = max(self._at, end)
            return
        if end <= self._at:
            return
        if self._log.base > self._at or end - self._at > _WINDOW:
            self._give_up(end)
            return
        runs, complete = visible(self._log.read(self._at, end))
        for start, text in runs:
            self._starts.append(len(self._text))
            self._places.append(self._at + start)
            self._text += text
        self._at += complete
        # In order: the copies of two equal lines come one behind the other.
        self._expected = [one for one in self._expected if not self._came(one)]
        if len(self._text) > _WINDOW:
            self._give_up(end)

    def _came(self, one: _Expected) -> bool:
        """Return whether nothing is expected any more: the echo has come, or cannot come."""
        if one.at_once:
            got = self._text[one.start : one.start + len(one.line)]
            if got != one.line:
                return not one.line.startswith(got)
            found = one.start
        elif (found := self._text.find(one.line, one.start)) < 0:
            return False
        behind = found + len(one.line)
        self._add(self._place(found), self._place(behind - 1) + 1)
        for other in self._expected:
            if other is not one and other.line == one.line:
                other.start = max(other.start, behind)
        return True

    def _add(self, begin: int, end: int) -> None:
        if self._spans and self._spans[-1][1] == begin:  # typed key by key
            begin = self._spans.pop()[0]
        self._spans.append((begin, end))

    def _place(self, index: int) -> int:
        """Return the offset in the log of a byte of the text."""
        run = bisect_right(self._starts, index) - 1
        return self._places[run] + index - self._starts[run]

    def _give_up(self, end: int) -> None:
        self._expected = []
        self._at = end
        self._forget_text()

    def _forget_text(self) -> None:
        self._text = bytearray()
        self._starts: list[int] = []  # index in the text of each piece of it
        self._places: list[int] = []  # ... and its offset in the log

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return what the next program of this holder needs: never what was typed."""
        return {"echoes": [list(span) for span in self._spans]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self._spans.extend((int(begin), int(end)) for begin, end in state.get("echoes", ()))


def behind_echo(offset: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return where the answer to what was typed at `offset` may begin."""
    return next((end for begin, end in spans if begin >= offset), offset)
