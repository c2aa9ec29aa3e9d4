"""Tables as text, as wide as the terminal allows.

A row is one line, so that names and ids can be selected and searched for.  A narrow terminal does
without the columns that matter least: those that are empty in every row first, then by their
`rank`.  Free text shares the width that is left, and ends with ``…`` where it is cut.  Without a
terminal (a pipe, a file) everything is printed; so it is with the variable COLUMNS set to a large
number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..quoting import printable

__all__ = ["Column", "on_terminal", "table", "terminal_width"]

_LEAST = 16  # columns of free text; with fewer, a column of a higher rank is left out instead
_GAP = "  "


class Column(NamedTuple):
    """One column of a table.

    `right`: numbers, right-aligned.  `rank`: 0 is always shown; of the others the highest is left
    out first.  `prose`: free text, which may be cut; names, ids and numbers never are.
    """

    heading: str
    right: bool = False
    rank: int = 0
    prose: bool = False


def on_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def terminal_width() -> int:
    """Return the columns of standard output's terminal, 0 if unknown; COLUMNS overrides it."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdecimal() and int(given[:6]):
        return int(given[:6])
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return 0


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    width: int | None = None,
    indent: str = "",
) -> str:
    """Return a table: columns two spaces apart under upper-case headings.

    `width` is what a line may take, 0: no limit, None: the terminal's width if standard output is
    one.  A line is longer only if the columns of rank 0 need more.  `indent` begins each line.
    """
    if width is None:
        width = terminal_width() if on_terminal() else 0
    lines = [
        [c.heading.upper() for c in columns],
        *([printable(cell) for cell in row] for row in rows),
    ]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(columns))]
    kept = list(range(len(columns)))
    if width:
        empty = [not any(line[i] for line in lines[1:]) for i in kept]
        kept, widths = _fitted(columns, widths, empty, width - len(indent))
    out = []
    for line in lines:
        cells = (_padded(line[i], widths[i], columns[i].right) for i in kept)
        out.append((indent + _GAP.join(cells)).rstrip())
    return "\n".join(out)


def _fitted(
    columns: Sequence[Column], widths: Sequence[int], empty: Sequence[bool], width: int
) -> tuple[list[int], list[int]]:
    """Return which columns are shown, and the widths of all."""
    fitted = [
        min(wide, max(_LEAST, len(column.heading))) if column.prose else wide
        for column, wide in zip(columns, widths, strict=True)
    ]
    kept = list(range(len(columns)))

    def left() -> int:
        return width - sum(fitted[i] for i in kept) - len(_GAP) * (len(kept) - 1)

    while left() < 0 and (spare := [i for i in kept if columns[i].rank]):
        kept.remove(max(spare, key=lambda i: (empty[i], columns[i].rank)))
    for i in sorted(kept, key=lambda i: columns[i].rank):
        if columns[i].prose:
            fitted[i] += min(widths[i] - fitted[i], max(0, left()))
    return kept, fitted


def _padded(cell: str, width: int, right: bool) -> str:
    cell = _cut(cell, width)
    fill = " " * (width - _width(cell))
    return fill + cell if right else cell + fill


def _cut(cell: str, width: int) -> str:
    if _width(cell) <= width:
        return cell
    while cell and _width(cell) > width - 1:
        cell = cell[: min(len(cell) - 1, width - 1)]
    return cell.rstrip() + "…"


def _width(text: str) -> int:
    """Return the columns that printable text takes."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    wide = int(wcswidth(text))
    return wide if wide >= 0 else len(text)
