"""The bytes that make a terminal show a screen.

`redraw` makes a terminal that was reset look and behave like it: history in the terminal's own
scrollback, cells, margins, modes, character sets, pending wrap, colours, title, cursor.  A `Screen`
that is fed with it is the same screen, so it is also how a screen is stored.  `View` shows a part.
"""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Line, placed, styled
from .grid import Cursor
from .pen import DEFAULT, change, rendition
from .screen import MOUSE_MODES, Screen


def redraw(screen: Screen, rows: int, columns: int, *, history: bool = False) -> bytes:
    """Return the bytes that make a reset terminal of this size show the screen.

    With `history`, the scrollback goes into the terminal's own.
    """
    out: list[str] = []
    if history and screen.history:
        kept = list(screen.history)
        out.append("\x1b[H\x1b[2J")
        out += [f"{styled(runs)}\r\n" for runs in kept]
        out.append("\r\n" * min(rows - 1, len(kept) + rows))  # the last of them leave it, too
    if rows < screen.lines or columns < screen.columns:
        # Places of the mouse would be wrong there.
        out.append(_whole_terminal(screen, screen.modes - MOUSE_MODES))
        out.append(View(screen).update(rows, columns))
    else:
        out += _exactly(screen)
    return "".join(out).encode(errors="replace")


class View:
    """The part of a screen around the cursor, on a smaller terminal.

    As in tmux, the part moves no farther than the cursor needs.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._top = self._left = 0
        self._shown: list[str] | None = None  # what each row of the terminal was drawn with

    def update(self, rows: int, columns: int) -> str:
        """Return what makes a terminal of this size show the present screen.

        At first the terminal may show anything; later, what the last update has made it show.
        """
        screen = self.screen
        x, y = min(screen.cursor.x, screen.columns - 1), screen.cursor.y
        self._top = _start(self._top, y, rows, screen.lines)
        self._left = _start(self._left, x, columns, screen.columns)
        right = self._left + columns
        lines = [
            "".join(placed(line.clipped(self._left, right), row))
            for row, line in enumerate(screen.rows[self._top : self._top + rows])
        ]
        lines += [""] * (rows - len(lines))
        out = ["\x1b[?25l\x1b[m"]
        shown = (
            self._shown if self._shown is not None and len(self._shown) == rows else [None] * rows
        )
        for row, (old, new) in enumerate(zip(shown, lines, strict=True)):
            if old != new:
                out.append(f"\x1b[{row + 1};1H\x1b[2K{new}")
        self._shown = lines
        out.append(f"\x1b[{y - self._top + 1};{x - self._left + 1}H")
        if screen.visible:
            out.append("\x1b[?25h")
        return "".join(out)


def _start(start: int, place: int, size: int, whole: int) -> int:
    """Return the first of `size` rows, or columns, of `whole` that show `place`."""
    start = min(max(start, place - size + 1), place)
    return max(0, min(start, whole - size))


def _exactly(screen: Screen) -> Iterable[str]:
    """Yield what makes a terminal that is large enough the same."""
    if screen.main is not None:
        rows, saved = screen.main
        yield from _cells(rows)
        yield from _cursor(screen, rows, saved or Cursor())
        yield from (f"\x1b[>{flags}u" for flags in screen.other_keyboard)
        yield "\x1b[?1049h"  # saves the cursor
    yield _whole_terminal(screen, screen.modes)
    yield from _cells(screen.rows)
    if screen.tab_stops != set(range(8, screen.columns, 8)):
        yield "\x1b[3g"
        yield from (f"\x1b[{stop + 1}G\x1bH" for stop in sorted(screen.tab_stops))
    if (screen.top, screen.bottom) != (0, screen.lines - 1):
        yield f"\x1b[{screen.top + 1};{screen.bottom + 1}r"
    if screen.saved is not None:
        yield from _cursor(screen, screen.rows, screen.saved)
        yield "\x1b7\x1b[?6l"
    yield from _cursor(screen, screen.rows, screen.cursor)
    if screen.insert_mode:
        yield "\x1b[4h"
    if screen.newline:
        yield "\x1b[20h"
    if not screen.autowrap:
        yield "\x1b[?7l"
    if not screen.visible:
        yield "\x1b[?25l"


def _whole_terminal(screen: Screen, modes: set[int]) -> str:
    """Return what sets `modes`, and others that do not depend on places."""
    out = [f"\x1b]2;{screen.title}\x1b\\"] if screen.title else []
    out += [f"\x1b]{key};{colour}\x1b\\" for key, colour in screen.colours.items()]
    out += [f"\x1b[?{number}h" for number in sorted(modes)]
    out += [f"\x1b[>{flags}u" for flags in screen.keyboard]
    if screen.keypad:
        out.append("\x1b=")
    if screen.modify_other_keys:
        out.append(f"\x1b[>4;{screen.modify_other_keys}m")
    if screen.cursor_style:
        out.append(f"\x1b[{screen.cursor_style} q")
    return "".join(out)


def _cells(rows: list[Line]) -> Iterable[str]:
    yield "\x1b[m\x1b[H\x1b[2J"
    for y, line in enumerate(rows):
        yield from placed(line, y)


def _cursor(screen: Screen, rows: list[Line], cursor: Cursor) -> Iterable[str]:
    """Yield what puts the cursor in place, with its pen, character sets and origin."""
    yield "\x1b(B\x1b)B\x0f\x1b[m\x1b]8;;\x1b\\"
    x, top = min(cursor.x, screen.columns - 1), 0
    if cursor.origin:
        yield "\x1b[?6h"
        top = screen.top
    if cursor.x >= screen.columns:
        # A wrap is pending: only a character that is written into the last column causes that.
        cells, pens = rows[cursor.y].cells, rows[cursor.y].pens
        if x and x < len(cells) and cells[x] == "":  # a wide one
            x -= 1
        shown, pen = (cells[x], pens[x]) if x < len(cells) else (" ", DEFAULT)
        yield f"\x1b[{cursor.y - top + 1};{x + 1}H{change(DEFAULT, pen)}{shown}"
        yield change(pen, DEFAULT)
    else:
        yield f"\x1b[{cursor.y - top + 1};{x + 1}H"
    yield f"{rendition(cursor.pen)}\x1b]8;{cursor.pen.link or ';'}\x1b\\"
    for which, charset in zip("()", cursor.sets, strict=True):
        if charset:
            yield f"\x1b{which}0"
    if cursor.shifted:
        yield "\x0e"
