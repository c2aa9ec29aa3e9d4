"""A terminal emulator: what a terminal shows after the bytes of a session's log.

pyte keeps the cells.  This module adds what pyte lacks and full-screen programs need: a tokenizer
that knows the whole grammar of control sequences (so that device control strings, private
parameters or colons never end up as text), the alternate screen, scrollback, repeat, scrolling by
lines, cursor styles.  It takes long to import: do so only where a screen is needed.

`Screen.redraw` returns the sequences that make a freshly reset terminal of any size look and behave
like the screen: history in the terminal's own scrollback, cells, margins, modes, character sets,
pending wrap, title, cursor.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyte
from pyte import charsets, modes
from pyte.screens import Char

from .cells import plain, position, rendition, styled, text_of

HISTORY = 2000  # lines of scrollback that are kept
_MAX_CARRY = 64 << 10  # a sequence longer than this is none
# Cells of a screen that DECALN fills; the empty cells of a larger one take no memory.
_MAX_FILLED = 1 << 20

_STRING = r"|\x1b[PX^_](?:[^\x1b]|\x1b(?!\\))*\x1b\\"
_OTHERS = (
    r"(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    r"|\x1b\[(?P<prefix>[<-?]?)(?P<args>[0-9:;]*)(?P<middle>[ -/]*)(?P<final>[@-~])"
    r"|\x1b\](?P<osc>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b(?P<set>[()*+])(?P<code>[0-~])"
    r"|\x1b#(?P<sharp>[0-9])"
    r"|\x1b[ %][ -~]"
    r"|\x1b(?P<escape>[0-OQ-WYZ\\`-~])"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f-\x9f])"
)
_TOKEN = re.compile(_OTHERS + _STRING)
# Behind the last end of a string no string can end: do not search for one at each beginning.
_AFTER = re.compile(_OTHERS)
_CONTROLS = {
    "\x08": "backspace",
    "\x09": "tab",
    "\x0a": "linefeed",
    "\x0b": "linefeed",
    "\x0c": "linefeed",
    "\x0d": "carriage_return",
    "\x0e": "shift_out",
    "\x0f": "shift_in",
    "\x84": "index",
    "\x85": "next_line",
    "\x8d": "reverse_index",
}
_ESCAPES = {
    "c": "reset",
    "D": "index",
    "E": "next_line",
    "H": "set_tab_stop",
    "M": "reverse_index",
    "7": "save_cursor",
    "8": "restore_cursor",
}
_CSI = {
    "@": "insert_characters",
    "A": "cursor_up",
    "B": "cursor_down",
    "C": "cursor_forward",
    "D": "cursor_back",
    "E": "cursor_down1",
    "F": "cursor_up1",
    "G": "cursor_to_column",
    "H": "cursor_position",
    "I": "tabs",
    "J": "erase_in_display",
    "K": "erase_in_line",
    "L": "insert_lines",
    "M": "delete_lines",
    "P": "delete_characters",
    "S": "scroll_up",
    "T": "scroll_down",
    "X": "erase_characters",
    "Z": "back_tabs",
    "`": "cursor_to_column",
    "a": "cursor_forward",
    "d": "cursor_to_line",
    "e": "cursor_down",
    "f": "cursor_position",
    "g": "clear_tab_stop",
    "r": "set_margins",
    "s": "save_cursor",
    "u": "restore_cursor",
}
_ALTERNATE = frozenset((47, 1047, 1049))
# The private modes that a client's terminal must have too.
_SHOWN_MODES = (1000, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2004)
_DECOM, _DECAWM, _DECCKM, _DECTCEM = modes.DECOM, modes.DECAWM, 1 << 5, modes.DECTCEM
_KEYPAD = "keypad"


class Screen(pyte.Screen):
    """One terminal, `columns` by `lines`; `feed` it with output."""

    def __init__(self, columns: int, lines: int, *, history: int = HISTORY) -> None:
        self.history: deque[dict[int, Char]] = deque(maxlen=history)
        # Buffer and cursor of the main screen while the alternate one is shown.
        self.main: tuple[dict[int, Any], Any] | None = None
        self.keypad = False
        self.cursor_style = 0
        self.end = 0  # the offset behind what it has seen, set by the caller
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._carry = ""
        self._last = ""  # the character that REP repeats
        self._dispatch: dict[str, Callable[..., None]] = {}
        super().__init__(columns, lines)
        self._dispatch = {key: getattr(self, name) for key, name in _CSI.items()}

    # -- taking output in -------------------------------------------------------------------------

    def feed(self, data: bytes | memoryview) -> None:
        """Show what a program has written."""
        text = self._carry + self._decoder.decode(bytes(data))
        self._carry = ""
        at, size, strings = 0, len(text), text.rfind("\x1b\\")
        match, after = _TOKEN.match, _AFTER.match
        while at < size:
            token = match(text, at) if at < strings else after(text, at)
            if token is None:  # an escape that begins no sequence, or one that is not complete
                if size - at < _MAX_CARRY and _unfinished(text[at:]):
                    self._carry = text[at:]
                    return
                at += 1
                continue
            at = token.end()
            kind = token.lastgroup
            if kind == "text":
                self._last = text[at - 1]
                self.draw(token["text"])
            elif kind == "control":
                self._named(_CONTROLS.get(token["control"]))
            elif kind == "final":
                self._control_sequence(
                    token["prefix"], token["args"], token["middle"], token["final"]
                )
            elif kind == "escape":
                self._escape(token["escape"])
            elif kind == "code":
                self.define_charset(token["code"], token["set"])
            elif kind == "osc":
                number, _, value = token["osc"].partition(";")
                if number in ("0", "2"):
                    self.title = value
            elif (
                kind == "sharp"
                and token["sharp"] == "8"
                and self.lines * self.columns <= _MAX_FILLED
            ):
                self.alignment_display()

    def _named(self, name: str | None) -> None:
        if name is not None:
            getattr(self, name)()

    def _escape(self, char: str) -> None:
        if char in "=>":
            self.keypad = char == "="
        else:
            self._named(_ESCAPES.get(char))

    def _control_sequence(self, prefix: str, args: str, middle: str, final: str) -> None:
        if middle:
            if middle == " " and final == "q" and not prefix:
                self.cursor_style = _numbers(args, 0)[0]
            elif middle == "!" and final == "p":
                self._soft_reset()
            return
        if final in "hl" and prefix in ("", "?"):
            action = self.set_mode if final == "h" else self.reset_mode
            action(*_numbers(args, 0), private=prefix == "?")
        elif prefix and not (prefix == "?" and final in "JK"):
            return  # reports, key encodings, colours of other terminals
        elif final == "m":
            self.select_graphic_rendition(*_renditions(args))
        elif final == "b":
            if self._last:
                self.draw(self._last * min(_numbers(args, 1)[0] or 1, self.columns * self.lines))
        elif final == "r":
            top, bottom = [*_numbers(args, 0), 0, 0][:2]
            self.set_margins(top or None, bottom or None)
            self.cursor_position()
        elif ":" not in args and (method := self._dispatch.get(final)) is not None:
            numbers = _numbers(args, 0) if args else []
            method(*numbers[: 2 if final in "Hf" else 0 if final in "su" else 1])

    # -- what pyte lacks --------------------------------------------------------------------------

    def set_mode(self, *numbers: int, **kwargs: Any) -> None:
        """Set modes; the alternate screen among them."""
        if kwargs.get("private"):
            for number in numbers:
                if number == 1048:
                    self.save_cursor()
                elif number in _ALTERNATE and self.main is None:
                    self.main = (self.buffer, copy.copy(self.cursor))
                    self.buffer = copy.copy(self.buffer)
                    self.buffer.clear()
            numbers = tuple(n for n in numbers if n not in _ALTERNATE and n not in (3, 1048))
        if numbers:
            super().set_mode(*numbers, **kwargs)

    def reset_mode(self, *numbers: int, **kwargs: Any) -> None:
        """Reset modes; the alternate screen among them."""
        if kwargs.get("private"):
            for number in numbers:
                if number == 1048:
                    self.restore_cursor()
                elif number in _ALTERNATE and self.main is not None:
                    self.buffer, cursor = self.main
                    self.main = None
                    if number == 1049:
                        cursor.hidden = self.cursor.hidden
                        self.cursor = cursor
            numbers = tuple(n for n in numbers if n not in _ALTERNATE and n not in (3, 1048))
        if numbers:
            super().reset_mode(*numbers, **kwargs)

    def reset(self) -> None:
        """Reset everything, as when a terminal is switched on."""
        self.main = None
        self.keypad = False
        self.cursor_style = 0
        super().reset()

    def _soft_reset(self) -> None:
        self.margins = None
        self.keypad = False
        self.cursor.hidden = False
        self.mode.difference_update((modes.IRM, _DECOM, _DECCKM))
        self.mode.add(_DECAWM)
        self.select_graphic_rendition(0)
        self.charset, self.g0_charset, self.g1_charset = 0, charsets.LAT1_MAP, charsets.VT100_MAP

    def next_line(self) -> None:
        """Move to the first column of the next line."""
        self.carriage_return()
        self.index()

    def index(self) -> None:
        """Move one line down; at the bottom the screen scrolls.

        What leaves the main screen becomes history.
        """
        top, bottom = self.margins or (0, self.lines - 1)
        if self.cursor.y == bottom and top == 0 and self.main is None:
            self.history.append(self.buffer[0])
        super().index()

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        """Erase in the screen; 3 erases the scrollback alone, an unknown number nothing."""
        if how == 3:
            self.history.clear()
        elif how in (0, 1, 2):
            super().erase_in_display(how)

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        """Erase in the line of the cursor."""
        if how in (0, 1, 2):
            super().erase_in_line(how)

    def cursor_to_line(self, line: int | None = None) -> None:
        """Move to a line; in origin mode it is counted from the margin, if there is one."""
        if self.margins is None:
            self.cursor.y = (line or 1) - 1
            self.ensure_vbounds()
        else:
            super().cursor_to_line(line)

    def scroll_up(self, count: int = 0) -> None:
        """Move what the margins enclose up."""
        y, self.cursor.y = self.cursor.y, (self.margins or (0, self.lines - 1))[1]
        for _ in range(min(count or 1, self.lines)):
            self.index()
        self.cursor.y = y

    def scroll_down(self, count: int = 0) -> None:
        """Move what the margins enclose down."""
        y, self.cursor.y = self.cursor.y, (self.margins or (0, self.lines - 1))[0]
        for _ in range(min(count or 1, self.lines)):
            self.reverse_index()
        self.cursor.y = y

    def tabs(self, count: int = 0) -> None:
        """Move several tabulator stops on."""
        for _ in range(min(count or 1, self.columns)):
            self.tab()

    def back_tabs(self, count: int = 0) -> None:
        """Move several tabulator stops back."""
        for _ in range(min(count or 1, self.columns)):
            self.cursor.x = max((stop for stop in self.tabstops if stop < self.cursor.x), default=0)

    # -- giving it out ----------------------------------------------------------------------------

    @property
    def alternate(self) -> bool:
        """Whether the alternate screen is shown."""
        return self.main is not None

    def cursor_report(self) -> tuple[int, int]:
        """Return row and column as a terminal reports them.

        Both count from 1, in origin mode from the margin; never beyond the last column.
        """
        top = self.margins.top if _DECOM in self.mode and self.margins is not None else 0
        return self.cursor.y - top + 1, min(self.cursor.x, self.columns - 1) + 1

    def text(self) -> list[str]:
        """Return the lines of the screen as text, without blanks at their ends."""
        return [plain(self.buffer[y], self.columns) for y in range(self.lines)]

    def scrollback(self, *, ansi: bool = False) -> list[str]:
        """Return the lines that have left the screen at its top, oldest first.

        The lines of the main screen follow, without empty ones at its end.
        """
        buffer = self.buffer if self.main is None else self.main[0]
        render = styled if ansi else plain
        shown = [render(buffer[y], self.columns) for y in range(self.lines)]
        while shown and not shown[-1]:
            shown.pop()
        return [render(line, self.columns) for line in self.history] + shown

    def ansi(self) -> list[str]:
        """Return the lines of the screen with colours and attributes."""
        return [styled(self.buffer[y], self.columns) for y in range(self.lines)]

    def redraw(self, rows: int, columns: int, *, history: bool = False) -> bytes:
        """Return the bytes that make a reset terminal of this size show the screen.

        With `history`, the scrollback goes into the terminal's own.
        """
        out: list[str] = []
        width = min(columns, self.columns)
        if history and self.history:
            kept = list(self.history)
            out.append("\x1b[H\x1b[2J")
            out += [f"{styled(line, width)}\r\n" for line in kept]
            # the last of them leave the screen too
            out.append("\r\n" * min(rows - 1, len(kept) + rows))
        if self.main is not None:
            out += self._cells(self.main[0], rows, width)
            out.append(position(self.main[1], rows, columns))
            out.append("\x1b[?1049h")
        out += self._cells(self.buffer, rows, width)
        out += self._states(rows, columns)
        return "".join(out).encode()

    def _cells(self, buffer: Mapping[int, Any], rows: int, width: int) -> Iterable[str]:
        yield "\x1b[m\x1b[H\x1b[2J"
        # A smaller terminal shows the part with the cursor.
        first = max(0, min(self.lines - rows, self.cursor.y - rows + 1))
        for y in range(first, min(self.lines, first + rows)):
            line = styled(buffer[y], width)
            if line:
                yield f"\x1b[{y - first + 1};1H{line}"

    def _states(self, rows: int, columns: int) -> Iterable[str]:
        if self.title:
            yield f"\x1b]2;{self.title}\x07"
        if self.margins is not None and self.margins.bottom < rows:
            yield f"\x1b[{self.margins.top + 1};{self.margins.bottom + 1}r"
        if modes.IRM in self.mode:
            yield "\x1b[4h"
        if _DECCKM in self.mode:
            yield "\x1b[?1h"
        if self.keypad:
            yield "\x1b="
        for number in _SHOWN_MODES:
            if number << 5 in self.mode:
                yield f"\x1b[?{number}h"
        for which, charset in (("(", self.g0_charset), (")", self.g1_charset)):
            if charset == charsets.VT100_MAP:
                yield f"\x1b{which}0"
        if self.charset == 1:
            yield "\x0e"
        if self.cursor_style:
            yield f"\x1b[{self.cursor_style} q"
        first = max(0, min(self.lines - rows, self.cursor.y - rows + 1))
        y, x = self.cursor.y - first, min(self.cursor.x, columns - 1)
        if self.cursor.x >= self.columns <= columns:
            # A wrap is pending: only a character that is written into the last column causes that.
            x = self.columns - 1
            if x and self.buffer[self.cursor.y][x].data == "":  # a wide one
                x -= 1
            line = self.buffer[self.cursor.y]
            text = text_of(line, x, self.columns) or " "
            yield f"\x1b[{y + 1};{x + 1}H{rendition(line[x])}{text}"
        else:
            yield f"\x1b[{y + 1};{x + 1}H"
        # Last: it moves the cursor, and after it positions count from the margin.
        if _DECOM in self.mode:
            top = self.margins.top if self.margins is not None else 0
            yield f"\x1b[?6h\x1b[{max(1, y - top + 1)};{x + 1}H"
        if _DECAWM not in self.mode:
            yield "\x1b[?7l"
        yield rendition(self.cursor.attrs)
        if self.cursor.hidden:
            yield "\x1b[?25l"


def _unfinished(rest: str) -> bool:
    """Return whether more output may complete this to a sequence."""
    if len(rest) == 1 or rest[1] in "]PX^_":
        return True
    if rest[1] == "[":
        return re.fullmatch(r"\x1b\[[<-?]?[0-9:;]*[ -/]*", rest) is not None
    return len(rest) == 2 and rest[1] in "()*+# %"


def _number(digits: str) -> int:
    """Return a parameter; more than 9999 is 9999, however many digits there are."""
    return min(int(digits.lstrip("0")[:5] or "0"), 9999)


def _numbers(args: str, default: int) -> list[int]:
    return [_number(n) if n.isdigit() else default for n in args.split(";")]


def _renditions(args: str) -> list[int]:
    """Return SGR's parameters, those with colons in the form with semicolons."""
    numbers: list[int] = []
    for part in args.split(";"):
        words = part.split(":")
        if len(words) == 1:
            numbers.append(_number(part) if part else 0)
        elif words[0] in ("38", "48"):
            values = [_number(word) if word else 0 for word in words]
            # 38:2:SPACE:R:G:B has a colour space that 38;2;R;G;B has not.
            numbers += values[:2] + (values[-3:] if values[1] == 2 else values[2:3])
        elif words[0] == "4":
            numbers.append(24 if words[1] == "0" else 4)
    return numbers
