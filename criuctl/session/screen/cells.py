"""Lines of a screen: their cells, and the same as text with or without colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from .pen import DEFAULT, Pen, change
from .widths import NARROW

# A line that is not written to any more: pieces of text of one pen each, or text of the default.
Runs = str | Sequence[tuple[str, Pen]]


# Single characters that all terminals give the same width: narrow ones, and those of East Asia.
_CERTAIN = re.compile(rf"[{NARROW}\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]")


class Line:
    """Cells from the first column on; what is beyond the last one is blank.

    ``cells`` is what each of them shows: a grapheme cluster, or "" for the second half of the wide
    one before it.  ``pens`` is what they are drawn with.  Most lines are only ever written from
    left to right, with narrow characters: these are kept as runs until the cells are needed.
    """

    __slots__ = ("_cells", "_pens", "_runs", "_size")

    def __init__(self) -> None:
        self._runs: list[tuple[str, Pen]] | None = []
        self._size = 0  # of the runs
        self._cells: list[str] = []
        self._pens: list[Pen] = []

    @property
    def cells(self) -> list[str]:
        """Return its cells, to read and to change."""
        if self._runs is not None:
            self._expand()
        return self._cells

    @property
    def pens(self) -> list[Pen]:
        """Return the pens of its cells, to read and to change."""
        if self._runs is not None:
            self._expand()
        return self._pens

    def put(self, x: int, text: str, pen: Pen) -> None:
        """Show characters of one column each from column `x` on."""
        if self._runs is not None and x == self._size:
            if x and self._runs[-1][1] == pen:
                self._runs[-1] = (self._runs[-1][0] + text, pen)
            else:
                self._runs.append((text, pen))
            self._size += len(text)
        else:
            self.put_cells(x, text, pen)

    def put_cells(self, x: int, cells: Sequence[str], pen: Pen) -> None:
        """Show `cells`, which are a whole number of clusters, from column `x` on."""
        mine, end = self.cells, x + len(cells)
        size = len(mine)
        if x > size:
            self.pad(x)
        elif x < size:
            if mine[x] == "":
                self.split(x)
            if end < size and mine[end] == "":
                self.split(end)
        mine[x:end] = cells
        self._pens[x:end] = [pen] * len(cells)

    def _expand(self) -> None:
        """Make cells of the runs."""
        for text, pen in self._runs or ():
            self._cells += text
            self._pens += [pen] * len(text)
        self._runs = None

    def pad(self, end: int, pen: Pen = DEFAULT) -> None:
        """Make the cells below column `end` exist."""
        count = end - len(self.cells)
        if count > 0:
            self._cells += [" "] * count
            self._pens += [pen] * count

    def clear(self) -> None:
        """Make all of it blank."""
        if self._size or self._cells:
            self.__init__()  # type: ignore[misc]

    def split(self, x: int) -> None:
        """Make both halves of a wide character blank if a change begins or ends between them."""
        if 0 < x < len(self.cells) and self._cells[x] == "":
            self._cells[x - 1] = self._cells[x] = " "

    def erase(self, start: int, end: int, pen: Pen) -> None:
        """Make cells blank; `pen` is their background."""
        if start == 0 and end >= max(self._size, len(self._cells)):
            self.clear()
            if pen != DEFAULT:
                self.put(0, " " * end, pen)
            return
        self.split(start)
        self.split(end)
        if pen == DEFAULT:
            if end >= len(self._cells):
                del self._cells[start:], self._pens[start:]
                return
        else:
            self.pad(start)
        self._cells[start:end] = [" "] * (end - start)
        self._pens[start:end] = [pen] * (end - start)

    def insert(self, x: int, count: int, columns: int, pen: Pen) -> None:
        """Move the cells from `x` on to the right, and leave blank ones."""
        if x >= len(self.cells) and pen == DEFAULT:
            return
        self.pad(x)
        self.split(x)
        self._cells[x:x] = [" "] * count
        self._pens[x:x] = [pen] * count
        self.split(columns)
        del self._cells[columns:], self._pens[columns:]

    def delete(self, x: int, count: int, columns: int, pen: Pen) -> None:
        """Move the cells behind `count` of them to the left; blank ones come in."""
        if pen != DEFAULT:
            self.pad(columns)
        self.split(x)
        self.split(x + count)
        del self._cells[x : x + count], self._pens[x : x + count]
        if pen != DEFAULT:
            self.pad(columns, pen)

    def runs(self) -> Runs:
        """Return its text in pieces of one pen each, without default blanks at its end."""
        if self._runs is not None:
            return _trimmed(self._runs)
        cells, pens = self._cells, self._pens
        found, start = list[tuple[str, Pen]](), 0
        for pen, group in groupby(pens):
            end = start + len(list(group))
            found.append(("".join(cells[start:end]), pen))
            start = end
        return _trimmed(found)

    def clipped(self, left: int, right: int) -> Line:
        """Return the cells of these columns; half a wide character is blank."""
        part = Line()
        part.cells.extend(self.cells[left:right])
        part.pens.extend(self.pens[left:right])
        if part.cells and part.cells[0] == "":
            part.cells[0] = " "
        if part.cells and right < len(self.cells) and self.cells[right] == "":
            part.cells[-1] = " "
        return part


def _trimmed(runs: list[tuple[str, Pen]]) -> Runs:
    """Return runs without default blanks at their end."""
    last = len(runs)
    while last and runs[last - 1][1] == DEFAULT:
        text = runs[last - 1][0].rstrip(" ")
        if text:
            if last == 1:
                return text
            return (*runs[: last - 1], (text, DEFAULT))
        last -= 1
    return tuple(runs[:last]) if last else ""


def plain(runs: Runs) -> str:
    """Return one line as text, without blanks at its end."""
    if isinstance(runs, str):
        return runs
    return "".join([text for text, _ in runs]).rstrip(" ")


def styled(runs: Runs) -> str:
    """Return one line with its renditions; it begins and ends with the default one.

    Erased cells with a colour belong to the line.
    """
    if isinstance(runs, str):
        return runs
    out, now = [], DEFAULT
    for text, pen in runs:
        out += [change(now, pen), text]
        now = pen
    out.append(change(now, DEFAULT))
    return "".join(out)


def placed(line: Line, y: int) -> Iterable[str]:
    """Yield what draws a line in row `y` (from 0) of a terminal whose rows are blank.

    Terminals disagree about the width of rare characters: after each, the column is set.
    """
    cells, pens, now = line.cells, line.pens, DEFAULT
    size = len(cells)
    while size and cells[size - 1] == " " and pens[size - 1] == DEFAULT:
        size -= 1
    if not size:
        return
    yield f"\x1b[{y + 1};1H"
    for x in range(size):
        cell, pen = cells[x], pens[x]
        if cell == "":
            continue
        if pen is not now and pen != now:
            yield change(now, pen)
            now = pen
        yield cell
        if not _CERTAIN.fullmatch(cell):
            columns = 2 if x + 1 < len(cells) and cells[x + 1] == "" else 1
            if x + columns < size:
                yield f"\x1b[{x + columns + 1}G"
    yield change(now, DEFAULT)
