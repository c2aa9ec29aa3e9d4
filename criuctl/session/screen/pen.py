"""What a character is drawn with: attributes, colours as they were given, and a link.

A `Pen` holds for each property the parameter that sets it, so that drawing again needs no
translation: a colour of the palette stays one, a curly underline stays curly.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MAX_PARAMETERS = 256  # characters of one sequence
_MAX_LINK = 2083  # characters, as most terminals have it


class Pen(NamedTuple):
    """Each property as the parameter of SGR that sets it; "" is the default."""

    bold: str = ""
    dim: str = ""
    italic: str = ""
    underline: str = ""
    blink: str = ""
    reverse: str = ""
    conceal: str = ""
    strike: str = ""
    overline: str = ""
    foreground: str = ""
    background: str = ""
    underline_colour: str = ""
    link: str = ""  # parameters and address of OSC 8


DEFAULT = Pen()

_SET = {
    1: "bold",
    2: "dim",
    3: "italic",
    4: "underline",
    5: "blink",
    6: "blink",
    7: "reverse",
    8: "conceal",
    9: "strike",
    21: "underline",
    53: "overline",
}
_CLEARED = {
    22: ("bold", "dim"),
    23: ("italic",),
    24: ("underline",),
    25: ("blink",),
    27: ("reverse",),
    28: ("conceal",),
    29: ("strike",),
    39: ("foreground",),
    49: ("background",),
    55: ("overline",),
    59: ("underline_colour",),
}
_EXTENDED = {38: "foreground", 48: "background", 58: "underline_colour"}


@lru_cache(maxsize=4096)
def changed(pen: Pen, parameters: str) -> Pen:
    """Return the pen after ``CSI parameters m``."""
    values = pen._asdict()
    words = parameters[:_MAX_PARAMETERS].split(";")
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        parts = word.split(":")
        number = _number(parts[0])
        if number in _EXTENDED:
            if len(parts) == 1:  # the colour is in the words behind it
                count = 2 if words[at : at + 1] == ["5"] else 4
                parts, at = [word, *words[at : at + count]], at + count
            if colour := _colour(parts):
                values[_EXTENDED[number]] = colour
        elif number == 0:
            values = DEFAULT._asdict() | {"link": pen.link}
        elif number == 4 and len(parts) > 1:
            style = _number(parts[1])
            values["underline"] = f"4:{style}" if 1 < style < 6 else "4" if style else ""
        elif len(parts) > 1:
            continue
        elif number in _SET:
            values[_SET[number]] = str(number)
        elif number in _CLEARED:
            values |= dict.fromkeys(_CLEARED[number], "")
        elif 30 <= number < 38 or 90 <= number < 98:
            values["foreground"] = str(number)
        elif 40 <= number < 48 or 100 <= number < 108:
            values["background"] = str(number)
    return Pen(**values)


@lru_cache(maxsize=4096)
def erased(pen: Pen) -> Pen:
    """Return what erased cells have of a pen: its background."""
    return Pen(background=pen.background)


def linked(pen: Pen, text: str) -> Pen:
    """Return the pen after ``OSC 8 ; text``, which is parameters, a semicolon, and an address."""
    address = text.partition(";")[2]
    if not address or len(text) > _MAX_LINK or not text.isprintable():
        return pen._replace(link="")
    return pen._replace(link=text)


def change(old: Pen, new: Pen) -> str:
    """Return the sequences that make a terminal draw with `new` after `old`."""
    out = rendition(new) if old[:-1] != new[:-1] else ""
    if old.link != new.link:
        out += f"\x1b]8;{new.link or ';'}\x1b\\"
    return out


@lru_cache(maxsize=4096)
def rendition(pen: Pen) -> str:
    """Return the sequence that sets all of a pen except its link."""
    codes = [code for code in pen[:-1] if code]
    return f"\x1b[0;{';'.join(codes)}m" if codes else "\x1b[m"


def _colour(parts: list[str]) -> str:
    """Return the parameter of an extended colour; "" if it is none."""
    which = _number(parts[0])
    values = [_number(part) for part in parts[1:]]
    if len(values) > 1 and values[0] == 5 and values[1] < 256:
        numbers = [5, values[1]]
    elif len(values) > 3 and values[0] == 2 and max(values[-3:]) < 256:
        numbers = [2, *values[-3:]]  # 38:2:SPACE:R:G:B names a colour space, too
    else:
        return ""
    if which == 58:  # terminals that know it know colons; others would read 58;5 as blinking
        head = "58:2:" if numbers[0] == 2 else "58:5"
        return ":".join([head, *map(str, numbers[1:])])
    return ";".join(map(str, [which, *numbers]))


def _number(word: str) -> int:
    """Return a parameter; what is too long, or none, is 0 or 9999."""
    digits = word.lstrip("0")
    return min(int(digits[:5]), 9999) if digits.isdecimal() else 0
