"""Names of keys, and the bytes that a terminal sends for them.

`criuctl send --keys` and the configuration's `detach_key` use these names.  ``C-c`` is a control
key,
``M-x`` one with Alt, ``S-Tab`` one with Shift; they combine (``C-M-Left``).  Named keys are Enter,
Tab, Space, Escape, BSpace, Delete, Insert, Home, End, PageUp, PageDown, Up, Down, Left, Right and
F1 to F12.  Any other key is one character.
"""

from __future__ import annotations

import re

from ...errors import UsageError

_PLAIN = {
    "enter": "\r",
    "return": "\r",
    "tab": "\t",
    "space": " ",
    "escape": "\x1b",
    "esc": "\x1b",
    "bspace": "\x7f",
    "backspace": "\x7f",
}
_CURSOR = {"up": "A", "down": "B", "right": "C", "left": "D", "home": "H", "end": "F"}
_TILDE = {
    "insert": 2,
    "ic": 2,
    "delete": 3,
    "dc": 3,
    "pageup": 5,
    "ppage": 5,
    "pagedown": 6,
    "npage": 6,
}
_TILDE |= {
    f"f{n}": code for n, code in zip(range(5, 13), (15, 17, 18, 19, 20, 21, 23, 24), strict=True)
}
_FUNCTION = {"f1": "P", "f2": "Q", "f3": "R", "f4": "S"}
_MODIFIERS = {"S": 1, "M": 2, "C": 4}
_WORD = re.compile(r"((?:[CMS]-)*)(.+)", re.DOTALL)


def encode(word: str, *, cursor_keys: bool = False) -> bytes:
    """Return what a terminal sends for a key.  `UsageError`.

    `cursor_keys`: the program has asked for application cursor keys.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise UsageError("an empty key")
    modifiers, name = {m for m in match[1].split("-") if m}, match[2]
    code = 1 + sum(_MODIFIERS[m] for m in modifiers)
    key = name.lower()
    if key in _CURSOR:
        if code > 1:
            return f"\x1b[1;{code}{_CURSOR[key]}".encode()
        return f"\x1b{'O' if cursor_keys else '['}{_CURSOR[key]}".encode()
    if key in _FUNCTION:
        return (f"\x1b[1;{code}{_FUNCTION[key]}" if code > 1 else f"\x1bO{_FUNCTION[key]}").encode()
    if key in _TILDE:
        return (f"\x1b[{_TILDE[key]};{code}~" if code > 1 else f"\x1b[{_TILDE[key]}~").encode()
    if key in ("tab", "btab") and (modifiers == {"S"} or key == "btab"):
        return b"\x1b[Z"
    char = _PLAIN.get(key, name)
    if len(char) != 1:
        raise UsageError(
            f"{word!r} is no key",
            hint=(
                "Like C-c, M-x, Enter, Tab, Escape, Space, BSpace, Up, PageDown, F5, or one "
                "character."
            ),
        )
    if "S" in modifiers:
        char = char.upper()
    if "C" in modifiers:
        char = _control(char, word)
    return ("\x1b" if "M" in modifiers else "").encode() + char.encode(errors="surrogateescape")


def sequences(text: str) -> list[bytes]:
    """Return the ways in which a terminal sends a key, or several in a row (``C-a d``)."""
    words = text.split()
    found = [b"".join(encode(word) for word in words)] if words else []
    if len(words) == 1 and (match := re.fullmatch(r"C-(.)", words[0])):
        # If the program has asked for unambiguous keys: xterm's modifyOtherKeys, and kitty's.
        code = ord(match[1].lower())
        found += [f"\x1b[{code};5u".encode(), f"\x1b[27;5;{code}~".encode()]
    return found


def spoken(text: str) -> str:
    """Return a key as it is written for people: ``Ctrl-]`` for ``C-]``."""
    words = {"C": "Ctrl", "M": "Alt", "S": "Shift"}
    return re.sub(r"(?<!\S)((?:[CMS]-)+)(?=\S)", lambda m: _spoken(m[1], words), text)


def _spoken(modifiers: str, words: dict[str, str]) -> str:
    return "".join(f"{words[letter]}-" for letter in modifiers.split("-") if letter)


def _control(char: str, word: str) -> str:
    if char == "?":
        return "\x7f"
    upper = " @"[char == "@"] if char in " @" else char.upper()
    # The capital of a letter may be two letters.
    number = 0 if upper in " @" else ord(upper) ^ 0x40 if len(upper) == 1 else 0x20
    if number > 0x1F:
        raise UsageError(f"{word!r} is no key: no terminal has control with {char!r}")
    return chr(number)
