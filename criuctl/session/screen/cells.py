"""Lines of a `Screen` as text, plain or with colours and attributes, and the cursor's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyte import graphics
from pyte.screens import Char, wcwidth

BLANK = Char(" ")

_FOREGROUND = {
    name: number
    for table in (graphics.FG_ANSI, graphics.FG_AIXTERM)
    for number, name in table.items()
}
_BACKGROUND = {
    name: number
    for table in (graphics.BG_ANSI, graphics.BG_AIXTERM)
    for number, name in table.items()
}
_ATTRIBUTES = (
    ("bold", 1),
    ("italics", 3),
    ("underscore", 4),
    ("blink", 5),
    ("reverse", 7),
    ("strikethrough", 9),
)


def plain(line: Mapping[int, Char], columns: int) -> str:
    """Return one line as text, without blanks at its end."""
    last = max((x for x in line if x < columns), default=-1)
    return "".join(text_of(line, x, columns) for x in range(last + 1)).rstrip(" ")


def text_of(line: Mapping[int, Char], x: int, columns: int) -> str:
    """Return what cell `x` shows: "" for half of an overwritten wide character."""
    data = line[x].data
    if _stub(data):
        return data if x and _wide(line[x - 1].data) else " "
    if _wide(data) and (x + 1 >= columns or not _stub(line[x + 1].data)):
        return " "
    return data


def _stub(data: str) -> bool:
    """Return whether this is the second half of a wide character, perhaps with an accent."""
    return data == "" or (data > "\x7f" and wcwidth(data[0]) == 0)


def _wide(data: str) -> bool:
    return data > "\u10ff" and wcwidth(data[0]) == 2


def styled(line: Mapping[int, Char], columns: int) -> str:
    """Return one line with its renditions; it begins and ends with the default one.

    Erased cells with a colour belong to the line.
    """
    last = max((x for x, char in line.items() if x < columns and char != BLANK), default=-1)
    out, now = [], BLANK
    for x in range(last + 1):
        char = line[x]
        if char[1:] != now[1:]:
            out.append(rendition(char))
            now = char
        out.append(text_of(line, x, columns))
    if now[1:] != BLANK[1:]:
        out.append("\x1b[m")
    return "".join(out)


def rendition(char: Char) -> str:
    """Return the sequence that makes a terminal draw as this cell is drawn."""
    codes = ["0", *(str(code) for name, code in _ATTRIBUTES if getattr(char, name))]
    for colour, names, extended in ((char.fg, _FOREGROUND, 38), (char.bg, _BACKGROUND, 48)):
        if colour in names:
            if colour != "default":
                codes.append(str(names[colour]))
        else:
            codes.append(
                f"{extended};2;{int(colour[0:2], 16)};{int(colour[2:4], 16)};{int(colour[4:6], 16)}"
            )
    return f"\x1b[{';'.join(codes)}m"


def position(cursor: Any, rows: int, columns: int) -> str:
    """Return the sequence that puts the cursor in place on a terminal that may be smaller."""
    return f"\x1b[{min(cursor.y, rows - 1) + 1};{min(cursor.x, columns - 1) + 1}H"
