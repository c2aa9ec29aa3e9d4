"""A terminal emulator: what a terminal shows after the bytes of a session's log.

`Screen` reads the stream: text, and the whole grammar of control sequences, so that device control
strings, private parameters or colons never end up as text.  `Grid`, from which it derives, keeps
the cells.  Lines that scroll by at once never become cells, and text is put into them a run at a
time: plain output costs 20 ns a byte, output with colours about 160.

Why an emulator of our own: it runs on hostile bytes, mostly as root.  `pyte` loses text after
characters without a width and takes 1.3 µs a byte.  asciinema's `avt` (wheel `pyavt`) has one
character to a cell, so that a combining accent moves the cursor, knows neither links nor conceal
nor styles of underlines, and panics in native code.  Debian 12's `libvterm` knows neither links nor
dim nor conceal, has the widths of 2020, and differs in its structures from Debian 13's.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from .cells import plain, styled
from .grid import Cursor, Grid
from .modes import change_keyboard
from .pen import DEFAULT, changed, linked
from .widths import NARROW, width

HISTORY = 2000  # lines of scrollback that are kept
_MAX_CARRY = 8 << 10  # characters of a sequence that are kept; the rest of it is dropped
_MAX_TITLE = 400
_MAX_ARGS = 400  # characters of a sequence's parameters
_MAX_COLOURS = 300

_STRING_END = r"(?:\x07|\x1b\\|\x9c|(?=[\x18\x1a]|\x1b[^\\]))"
_INSIDE = r"\x00-\x17\x19\x1c-\x1f\x7f"
_TOKEN = re.compile(
    r"(?P<lines>(?:[ -~]*+\r\n){4,})"
    rf"|(?P<narrow>[{NARROW}]+)"
    r"|(?P<control>\r\n|[\x00-\x1a\x1c-\x1f\x7f-\x9f])"
    r"|\x1b\[(?:(?P<args>[0-9:;]*)m|(?P<prefix>[<-?]?)(?P<numbers>[0-9:;]*)"
    r"(?P<middle>[ -/]*)(?P<final>[@-~]))"
    rf"|(?P<other>[^\x00-\x1f\x7f-\x9f{NARROW}]+)"
    r"|\x1b(?P<set>[()])(?P<code>[0-~])"
    rf"|\x1b\](?P<osc>[^\x07\x1b\x9c\x18\x1a]*){_STRING_END}"
    r"|\x1b(?P<escape>[0-OQ-WYZ\\`-~]|#[0-9])"
    # Nothing that is known: strings, designations of other sets, sequences with odd characters.
    rf"|\x1b(?:[PX^_][^\x07\x1b\x9c\x18\x1a]*{_STRING_END}|[*+ %#][0-~]|\[[ -?]*[@-~\x18\x1a])"
    # A sequence with control characters in it, which are carried out first.
    rf"|\x1b(?P<mixed>\[[ -?{_INSIDE}]*[@-~])"
    # One that more output may complete.
    rf"|(?P<cut>\x1b(?:[()*+ %#]|\[[ -?{_INSIDE}]*|[\]PX^_][^\x07\x1b\x9c\x18\x1a]*\x1b?)?\Z)"
    r"|\x1b\[[ -?]*"
)
_SEQUENCE_OVER = re.compile(r"[@-~]|(?=[\x18\x1a\x1b])")
_STRING_OVER = re.compile(_STRING_END)
_ALTERNATE = frozenset((47, 1047, 1049))
MOUSE_MODES = frozenset((9, 1000, 1001, 1002, 1003, 1005, 1006, 1007, 1015, 1016))
# Private modes that a client's terminal must have too.
SHOWN_MODES = MOUSE_MODES | {1, 5, 1004, 2004}


class Screen(Grid):
    """One terminal, `columns` by `lines`; `feed` it with output."""

    def __init__(self, columns: int, lines: int, *, history: int = HISTORY) -> None:
        self.end = 0  # the offset behind what it has seen, set by the caller
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._carry = ""
        self._skip: re.Pattern[str] | None = None  # ends a sequence that is too long to be kept
        super().__init__(columns, lines, history)

    def reset(self) -> None:
        """Make everything as when a terminal is switched on, except the history."""
        super().reset()
        self.title = ""
        self.visible = True  # the cursor
        self.keypad = self.newline = False
        self.cursor_style = self.modify_other_keys = 0
        self.modes = set[int]()  # those of `SHOWN_MODES` that are set
        self.keyboard = list[int]()  # kitty's modes, the present ones last
        self.other_keyboard = list[int]()  # ... of the screen that is not shown
        self.colours = dict[str, str]()  # OSC number, perhaps with an index -> colour
        self._last = ""  # the character that REP repeats

    # -- taking output in -------------------------------------------------------------------------

    def feed(self, data: bytes | memoryview) -> None:
        """Show what a program has written."""
        text = self._carry + self._decoder.decode(bytes(data))
        self._carry = ""
        if self._skip is not None:
            over = self._skip.search(text)
            if over is None:
                self._carry = "\x1b" if text.endswith("\x1b") else ""
                return
            self._skip, text = None, text[over.end() :]
        self._show(text)

    def _show(self, text: str) -> None:
        cursor, draw = self.cursor, self.draw
        for token in _TOKEN.finditer(text):
            kind = token.lastgroup
            if kind == "narrow":
                draw(token[0])
                self._last = text[token.end() - 1]
            elif kind == "args":
                cursor = self.cursor
                cursor.pen = changed(cursor.pen, token["args"])
            elif kind == "final":
                self._control_sequence(*token.group("prefix", "numbers", "middle", "final"))
            elif kind == "control":
                self._control(token[0])
            elif kind == "lines":
                self._lines(token[0].split("\r\n")[:-1])
            elif kind == "other":
                self.draw_clusters(token[0])
                self._last = text[token.end() - 1]
            elif kind == "escape":
                self._escape(token["escape"])
            elif kind == "code":
                sets = list(self.cursor.sets)
                sets[token["set"] == ")"] = "0" if token["code"] == "0" else ""
                self.cursor.sets = (sets[0], sets[1])
            elif kind == "osc":
                self._command(*token["osc"].partition(";")[::2])
            elif kind == "mixed":
                controls = re.sub(r"[ -~]", "", token["mixed"])
                self._show(f"{controls}\x1b{re.sub(f'[{_INSIDE}]', '', token['mixed'])}")
            elif kind == "cut":
                self._keep(token["cut"])

    def _keep(self, cut: str) -> None:
        """Keep the beginning of a sequence until the rest comes, but not without end."""
        if len(cut) <= _MAX_CARRY:
            self._carry = cut
        else:
            self._skip = _SEQUENCE_OVER if cut[1] == "[" else _STRING_OVER
            self._carry = "\x1b" if cut.endswith("\x1b") else ""

    def _lines(self, texts: list[str]) -> None:
        """Show lines of plain text, each ended by a new line."""
        first, cursor = 0, self.cursor
        while first < len(texts) and (first == 0 or cursor.y != self.bottom):
            self._line(texts[first])
            first += 1
        # What scrolls through all of the screen goes directly into the history.
        last = len(texts) - self.lines + 1
        if (
            last > first
            and (self.top, self.bottom) == (0, self.lines - 1)
            and not (self.insert_mode or cursor.sets[cursor.shifted] or cursor.pen.background)
            and self.autowrap
        ):
            if self.main is None:
                self.remember(line.runs() for line in self.rows[:-1])
                size, pen, maxlen = self.columns, cursor.pen, self.history.maxlen or 0
                for text in texts[max(first, last - maxlen) : last]:
                    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
                    shown = [piece.rstrip(" ") if pen is DEFAULT else piece for piece in pieces]
                    self.remember(
                        piece if pen is DEFAULT or not piece else ((piece, pen),) for piece in shown
                    )
            self.rows = self.blank(self.lines)
            cursor.y, first = 0, last
        for text in texts[first:]:
            self._line(text)

    def _line(self, text: str) -> None:
        if text:
            self.draw(text)
            self._last = text[-1]
        self.cursor.x = 0
        self.index()

    def _control(self, control: str) -> None:
        if control == "\r\n":
            self.cursor.x = 0
            self.index()
        elif control in "\n\v\f\x84":
            if self.newline and control != "\x84":
                self.cursor.x = 0
            self.index()
        elif control == "\r":
            self.cursor.x = 0
        elif control == "\b":
            self.across(-1)
        elif control == "\t":
            self.tab(1)
        elif control in "\x0e\x0f":
            self.cursor.shifted = control == "\x0e"
        elif control == "\x85":
            self.cursor.x = 0
            self.index()
        elif control == "\x88":
            self._escape("H")
        elif control == "\x8d":
            self.reverse_index()

    def _escape(self, char: str) -> None:
        if char in "=>":
            self.keypad = char == "="
        elif char == "H":
            self.tab_stops.add(min(self.cursor.x, self.columns - 1))
        elif (action := _ESCAPES.get(char)) is not None:
            action(self)

    def _control_sequence(self, prefix: str, args: str, middle: str, final: str) -> None:
        if middle or ":" in args:
            if middle == " " and final == "q" and not prefix:
                self.cursor_style = _numbers(args)[0]
            elif middle == "!" and final == "p":
                self._soft_reset()
            return
        numbers = _numbers(args)
        if final in "hl" and prefix in ("", "?"):
            for number in numbers:
                if prefix:
                    self._private(number, final == "h")
                elif number == 4:
                    self.insert_mode = final == "h"
                elif number == 20:
                    self.newline = final == "h"
        elif prefix and final == "u":
            if prefix != "?":
                change_keyboard(self.keyboard, prefix, *[*numbers, 0][:2])
        elif prefix == ">" and final == "m":
            if numbers[0] in (0, 4):
                self.modify_other_keys = numbers[1] if len(numbers) > 1 else 0
        elif prefix and not (prefix == "?" and final in "JK"):
            return  # reports, and what only other terminals know
        elif (action := _COUNTED.get(final)) is not None:
            action(self, numbers[0] or 1)
        elif (action := _NUMBERED.get(final)) is not None:
            action(self, numbers[0])
        elif final in "Hf":
            self.column((numbers[1] if len(numbers) > 1 else 1) - 1)
            self.row((numbers[0] or 1) - 1)
        elif final == "r":
            last = numbers[1] if len(numbers) > 1 and numbers[1] else self.lines
            self.margins(max(0, numbers[0] - 1), last - 1)
        elif final == "b" and self._last:
            # As tmux: not beyond the end of the line.
            room = self.columns - self.cursor.x
            repeated = self._last * min(numbers[0] or 1, room)
            (self.draw if width(self._last) == 1 else self.draw_clusters)(repeated)
        elif final in "su" and not args:
            (self.save if final == "s" else self.restore)()

    def _private(self, number: int, on: bool) -> None:
        """Set or reset a private mode."""
        if number in _ALTERNATE:
            if on != (self.main is not None):
                self.keyboard, self.other_keyboard = self.other_keyboard, self.keyboard
                if on and number == 1049:
                    self.save()
                self.switch(on)
                if not on and number == 1049:
                    self.restore()
        elif number == 1048:
            (self.save if on else self.restore)()
        elif number == 6:
            self.cursor.origin = on
            self.column(0)
            self.row(0)
        elif number == 7:
            self.autowrap = on
        elif number == 25:
            self.visible = on
        elif number in SHOWN_MODES:
            (self.modes.add if on else self.modes.discard)(number)

    def _command(self, number: str, text: str) -> None:
        """Carry out an operating system command."""
        if number in ("0", "2"):
            self.set_title(text)
        elif number == "8":
            self.cursor.pen = linked(self.cursor.pen, text)
        elif number == "4":
            words = text.split(";")
            for index, colour in zip(words[::2], words[1::2], strict=False):
                self._colour(f"4;{index[:3]}", colour)
        elif number == "104":
            self._forget("4;", text)
        elif number in _DYNAMIC_COLOURS:
            for offset, colour in enumerate(text.split(";")[:10]):
                self._colour(str(int(number) + offset), colour)
        elif number[:2] == "11" and number[1:] in _DYNAMIC_COLOURS:
            self.colours.pop(number[1:], None)

    def _colour(self, key: str, colour: str) -> None:
        if re.fullmatch(r"[0-9a-zA-Z:/#., -]{1,64}", colour) and len(self.colours) < _MAX_COLOURS:
            self.colours[key] = colour

    def _forget(self, prefix: str, indexes: str) -> None:
        """Forget colours of the palette; all if no index is named."""
        named = {prefix + index for index in indexes.split(";")} if indexes else None
        for key in [key for key in self.colours if key.startswith(prefix)]:
            if named is None or key in named:
                del self.colours[key]

    def _soft_reset(self) -> None:
        self.top, self.bottom = 0, self.lines - 1
        self.keypad = self.insert_mode = False
        self.visible = self.autowrap = True
        self.modes.discard(1)
        self.saved = None
        self.cursor = Cursor(self.cursor.x, self.cursor.y)

    def set_title(self, text: str) -> None:
        """Set the title; only what can be printed in it is kept."""
        self.title = "".join(filter(str.isprintable, text[:_MAX_TITLE]))

    # -- giving it out ----------------------------------------------------------------------------

    @property
    def alternate(self) -> bool:
        """Whether the alternate screen is shown."""
        return self.main is not None

    @property
    def pending(self) -> bytes:
        """The beginning of a sequence or a character that the last output has ended with."""
        skipped = (
            b"" if self._skip is None else b"\x1b_" if self._skip is _STRING_OVER else b"\x1b["
        )
        return skipped + self._carry.encode() + self._decoder.getstate()[0]

    def cursor_report(self) -> tuple[int, int]:
        """Return row and column as a terminal reports them.

        Both count from 1, in origin mode from the margin; never beyond the last column.
        """
        cursor = self.cursor
        top = self.top if cursor.origin else 0
        return cursor.y - top + 1, min(cursor.x, self.columns - 1) + 1

    def text(self) -> list[str]:
        """Return the lines of the screen as text, without blanks at their ends."""
        return [plain(line.runs()) for line in self.rows]

    def ansi(self) -> list[str]:
        """Return the lines of the screen with colours and attributes."""
        return [styled(line.runs()) for line in self.rows]

    def scrollback(self, *, ansi: bool = False) -> list[str]:
        """Return the lines that have left the screen at its top, oldest first.

        The lines of the main screen follow, without empty ones at its end.
        """
        render = styled if ansi else plain
        rows = self.rows if self.main is None else self.main[0]
        shown = [render(line.runs()) for line in rows]
        while shown and not shown[-1]:
            shown.pop()
        return [render(runs) for runs in self.history] + shown


_DYNAMIC_COLOURS = frozenset(str(number) for number in range(10, 20))
_ESCAPES: dict[str, Callable[[Screen], object]] = {
    "c": Screen.reset,
    "D": Screen.index,
    "E": lambda screen: screen._control("\x85"),
    "M": Screen.reverse_index,
    "7": Screen.save,
    "8": Screen.restore,
    "#8": Screen.fill,
}
# Without a number, or with 0, these do it once.
_COUNTED: dict[str, Callable[[Screen, int], object]] = {
    "@": Screen.move_cells,
    "A": Screen.up,
    "B": Screen.down,
    "C": Screen.across,
    "D": lambda screen, count: screen.across(-count),
    "E": Screen.lines_down,
    "F": Screen.lines_up,
    "G": lambda screen, number: screen.column(number - 1),
    "I": Screen.tab,
    "L": Screen.move_lines,
    "M": lambda screen, count: screen.move_lines(-count),
    "P": lambda screen, count: screen.move_cells(-count),
    "S": Screen.scroll_up,
    "T": Screen.scroll_down,
    "X": Screen.erase_cells,
    "Z": lambda screen, count: screen.tab(-count),
    "`": lambda screen, number: screen.column(number - 1),
    "a": Screen.across,
    "d": lambda screen, number: screen.row(number - 1),
    "e": Screen.down,
}
_NUMBERED: dict[str, Callable[[Screen, int], object]] = {
    "J": Screen.erase_screen,
    "K": Screen.erase_line,
    "g": Screen.clear_tab_stop,
}


def _numbers(args: str) -> list[int]:
    """Return parameters; what is missing is 0, and more than 9999 is 9999."""
    if args.isdecimal() and len(args) < 5:
        return [int(args)]
    words = [word.partition(":")[0].lstrip("0") for word in args[:_MAX_ARGS].split(";")]
    return [min(int(word[:5] or "0"), 9999) for word in words]
