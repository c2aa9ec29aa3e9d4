"""The cells of one terminal, its cursor, and what control sequences do to them.

Lines that leave the main screen at its top become history, which is kept up to a number of lines
and of characters.  Sizes are bounded too: what a program prints must not cost more memory than a
large screen has.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .cells import Line, Runs
from .pen import DEFAULT, Pen, erased
from .widths import MAX_CLUSTER, joins, widened, width

_MAX_LINES, _MAX_COLUMNS = 1024, 2048
_MAX_HISTORY = 128 << 20  # bytes, about
_RUN_COST = 112
_MAX_FILLED = 1 << 16
Charset = Literal["", "0"]  # "0": line drawing

# The characters of DEC's line drawing set, from "_" on.
_DRAWING = dict(zip(range(0x5F, 0x7F), " ◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·", strict=True))


@dataclass(slots=True)
class Cursor:
    """What DECSC saves: the place, and how characters are drawn.

    ``x`` is the number of columns while a wrap is pending.
    """

    x: int = 0
    y: int = 0
    pen: Pen = DEFAULT
    sets: tuple[Charset, Charset] = ("", "")
    shifted: bool = False  # the second of the two is used
    origin: bool = False  # rows count from the margin


class Grid:
    """`columns` by `lines` cells, and another screen of them while the alternate one is shown."""

    def __init__(self, columns: int, lines: int, history: int) -> None:
        # A program may give its terminal any size, 0 included.
        self.columns = max(1, min(columns, _MAX_COLUMNS))
        self.lines = max(1, min(lines, _MAX_LINES))
        self.history: deque[Runs] = deque(maxlen=history)
        self._cost = 0  # of all history
        self.reset()

    def reset(self) -> None:
        """Make everything as when a terminal is switched on, except the history."""
        self.rows = [Line() for _ in range(self.lines)]
        self.cursor = Cursor()
        self.saved: Cursor | None = None
        # Rows and saved cursor of the main screen while the alternate one is shown.
        self.main: tuple[list[Line], Cursor | None] | None = None
        self.top, self.bottom = 0, self.lines - 1
        self.tab_stops = set(range(8, self.columns, 8))
        self.insert_mode, self.autowrap = False, True

    # -- drawing ----------------------------------------------------------------------------------

    def draw(self, text: str) -> None:
        """Show characters of one column each."""
        cursor, size = self.cursor, len(text)
        if cursor.sets[cursor.shifted]:
            text = text.translate(_DRAWING)
        if size < self.columns - cursor.x and not self.insert_mode:  # nearly always
            self.rows[cursor.y].put(cursor.x, text, cursor.pen)
            cursor.x += size
            return
        at = 0
        while at < size:
            room = self.columns - cursor.x
            if room <= 0:
                room = self._wrap()
            piece = text[at : at + room] if at or room < size else text
            if not self.autowrap and size - at > room:
                piece, at = piece[:-1] + text[-1], size  # the last column shows the last of them
            at += len(piece)
            self._put(piece, len(piece))

    def draw_clusters(self, text: str) -> None:
        """Show characters of any width."""
        for char in text:
            columns = width(char)
            # East Asian characters join nothing.
            if columns == 0 or (not "\u2e80" <= char < "\ue000" and joins(self._before(), char)):
                self._combine(char)
            elif columns <= self.columns:
                if self.columns - self.cursor.x < columns:
                    if self.autowrap:
                        self._wrap()
                    else:
                        self.cursor.x = self.columns - columns
                self._put(char, columns)

    def _put(self, text: str, columns: int) -> None:
        cursor, line = self.cursor, self.rows[self.cursor.y]
        if self.insert_mode:
            line.insert(cursor.x, columns, self.columns, DEFAULT)
        if len(text) == columns:
            line.put(cursor.x, text, cursor.pen)
        else:
            line.put_cells(cursor.x, (text, ""), cursor.pen)
        cursor.x += columns
        if cursor.x >= self.columns and not self.autowrap:
            cursor.x = self.columns - 1

    def _wrap(self) -> int:
        """Go to where the next character is shown after the last column; return the room there."""
        if not self.autowrap:
            self.cursor.x = self.columns - 1
            return 1
        self.cursor.x = 0
        self.index()
        return self.columns

    def _head(self) -> int:
        """Return the column of the cluster before the cursor; -1 if there is none."""
        cells, x = self.rows[self.cursor.y].cells, self.cursor.x - 1
        if x >= len(cells):
            return -1
        return x - 1 if x > 0 and cells[x] == "" else x

    def _before(self) -> str:
        x = self._head()
        return self.rows[self.cursor.y].cells[x] if x >= 0 else ""

    def _combine(self, char: str) -> None:
        """Add a character to the cluster before the cursor."""
        x, line = self._head(), self.rows[self.cursor.y]
        if x < 0:
            return
        cluster = line.cells[x]
        if len(cluster) >= MAX_CLUSTER:
            return
        line.cells[x] = cluster + char
        narrow = x + 1 == self.cursor.x
        if narrow and self.cursor.x < self.columns and widened(cluster, char):
            line.put_cells(x, (cluster + char, ""), line.pens[x])
            self.cursor.x += 1

    # -- moving -----------------------------------------------------------------------------------

    def index(self) -> None:
        """Move one line down; at the bottom margin what the margins enclose moves up."""
        if self.cursor.y == self.bottom:
            self.scroll_up(1)
        elif self.cursor.y < self.lines - 1:
            self.cursor.y += 1

    def reverse_index(self) -> None:
        """Move one line up; at the top margin what the margins enclose moves down."""
        if self.cursor.y == self.top:
            self.scroll_down(1)
        elif self.cursor.y:
            self.cursor.y -= 1

    def up(self, count: int) -> None:
        """Move up, not across the top margin."""
        y = self.cursor.y
        self.cursor.y = max(self.top if y >= self.top else 0, y - count)

    def down(self, count: int) -> None:
        """Move down, not across the bottom margin."""
        y = self.cursor.y
        self.cursor.y = min(self.bottom if y <= self.bottom else self.lines - 1, y + count)

    def lines_down(self, count: int) -> None:
        """Move down, to the first column."""
        self.down(count)
        self.cursor.x = 0

    def lines_up(self, count: int) -> None:
        """Move up, to the first column."""
        self.up(count)
        self.cursor.x = 0

    def across(self, count: int) -> None:
        """Move by columns, to the left if `count` is negative."""
        x = min(self.cursor.x, self.columns - 1)
        self.cursor.x = max(0, min(self.columns - 1, x + count))

    def column(self, x: int) -> None:
        """Move to a column, from 0."""
        self.cursor.x = max(0, min(self.columns - 1, x))

    def row(self, y: int) -> None:
        """Move to a row, from 0; in origin mode from the top margin, and not beyond the other."""
        if self.cursor.origin:
            self.cursor.y = max(self.top, min(self.bottom, self.top + y))
        else:
            self.cursor.y = max(0, min(self.lines - 1, y))

    def tab(self, count: int) -> None:
        """Move on by tabulator stops; back if `count` is negative."""
        x, last = min(self.cursor.x, self.columns - 1), self.columns - 1
        if count > 0:
            stops = [stop for stop in self.tab_stops if x < stop <= last]
            self.cursor.x = heapq.nsmallest(count, stops)[-1] if count <= len(stops) else last
        else:
            stops = [stop for stop in self.tab_stops if stop < x]
            self.cursor.x = heapq.nlargest(-count, stops)[-1] if -count <= len(stops) else 0

    def clear_tab_stop(self, how: int) -> None:
        """Remove the tabulator stop at the cursor (0), or all (3)."""
        if how == 0:
            self.tab_stops.discard(self.cursor.x)
        elif how == 3:
            self.tab_stops.clear()

    def margins(self, top: int, bottom: int) -> None:
        """Set the first and the last row that scroll, from 0; move to the first place."""
        bottom = min(bottom, self.lines - 1)
        if 0 <= top < bottom:
            self.top, self.bottom = top, bottom
            self.column(0)
            self.row(0)

    def save(self) -> None:
        """Save the cursor (DECSC)."""
        self.saved = replace(self.cursor)

    def restore(self) -> None:
        """Put the saved cursor back (DECRC); without one, the first place and the defaults."""
        self.cursor = replace(self.saved) if self.saved is not None else Cursor()

    def switch(self, alternate: bool) -> None:
        """Show the alternate screen, which is blank then, or the main one."""
        if alternate and self.main is None:
            self.main = (self.rows, self.saved)
            self.rows, self.saved = [Line() for _ in range(self.lines)], None
        elif not alternate and self.main is not None:
            self.rows, self.saved = self.main
            self.main = None

    # -- erasing and moving cells -----------------------------------------------------------------

    def scroll_up(self, count: int) -> None:
        """Move what the margins enclose up."""
        count = min(count, self.bottom - self.top + 1)
        if self.top == 0 and self.main is None:
            self.remember(line.runs() for line in self.rows[:count])
        del self.rows[self.top : self.top + count]
        at = self.bottom + 1 - count
        self.rows[at:at] = self.blank(count)

    def scroll_down(self, count: int) -> None:
        """Move what the margins enclose down."""
        count = min(count, self.bottom - self.top + 1)
        del self.rows[self.bottom + 1 - count : self.bottom + 1]
        self.rows[self.top : self.top] = self.blank(count)

    def move_lines(self, count: int) -> None:
        """Insert lines at the cursor, or delete them if `count` is negative."""
        y, cursor = self.cursor.y, self.cursor
        if not self.top <= y <= self.bottom:
            return
        number = min(abs(count), self.bottom - y + 1)
        if count > 0:
            del self.rows[self.bottom + 1 - number : self.bottom + 1]
            self.rows[y:y] = self.blank(number)
        else:
            del self.rows[y : y + number]
            at = self.bottom + 1 - number
            self.rows[at:at] = self.blank(number)
        cursor.x = 0

    def move_cells(self, count: int) -> None:
        """Insert blank cells at the cursor, or delete cells if `count` is negative."""
        x, line = min(self.cursor.x, self.columns - 1), self.rows[self.cursor.y]
        number, pen = min(abs(count), self.columns - x), erased(self.cursor.pen)
        if count > 0:
            line.insert(x, number, self.columns, pen)
        else:
            line.delete(x, number, self.columns, pen)
        self.cursor.x = x

    def erase_cells(self, count: int) -> None:
        """Erase cells from the cursor on."""
        x = min(self.cursor.x, self.columns - 1)
        end = min(x + count, self.columns)
        self.rows[self.cursor.y].erase(x, end, erased(self.cursor.pen))

    def erase_line(self, how: int) -> None:
        """Erase from the cursor on (0), up to it (1), or all of its line (2)."""
        x = min(self.cursor.x, self.columns - 1)
        ends = {0: (x, self.columns), 1: (0, x + 1), 2: (0, self.columns)}.get(how)
        if ends is not None:
            self.rows[self.cursor.y].erase(*ends, erased(self.cursor.pen))

    def erase_screen(self, how: int) -> None:
        """Erase from the cursor on (0), up to it (1), or all (2); 3 is the history alone."""
        y, pen = self.cursor.y, erased(self.cursor.pen)
        if how == 3:
            self.history.clear()
            self._cost = 0
            return
        others = {0: self.rows[y + 1 :], 1: self.rows[:y], 2: self.rows}.get(how, [])
        for line in others:
            line.erase(0, self.columns, pen)
        if how in (0, 1):
            self.erase_line(how)

    def fill(self) -> None:
        """Fill the screen with the letter E (DECALN), unless it is larger than any window."""
        if self.lines * self.columns > _MAX_FILLED:
            return
        self.top, self.bottom = 0, self.lines - 1
        for line in self.rows:
            line.erase(0, self.columns, DEFAULT)
            line.put(0, "E" * self.columns, DEFAULT)
        self.cursor.x = self.cursor.y = 0

    def blank(self, count: int) -> list[Line]:
        """Return new lines, with the background of the pen."""
        lines = [Line() for _ in range(count)]
        if self.cursor.pen.background:
            for line in lines:
                line.put(0, " " * self.columns, erased(self.cursor.pen))
        return lines

    # -- history ----------------------------------------------------------------------------------

    def remember(self, lines: Iterable[Runs]) -> None:
        """Add lines to the history, and drop the oldest if it is too long."""
        history = self.history
        for runs in lines:
            if len(history) == history.maxlen:
                if not history.maxlen:
                    return
                self._cost -= _cost(history[0])
            history.append(runs)
            self._cost += _cost(runs)
        while self._cost > _MAX_HISTORY:
            self._cost -= _cost(history.popleft())


def _cost(runs: Runs) -> int:
    """Return about how many bytes a line takes."""
    if isinstance(runs, str):
        return len(runs) + 50
    return sum([len(text) for text, _ in runs]) + _RUN_COST * len(runs)
