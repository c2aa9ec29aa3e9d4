"""A recovery key: a secret that a person keeps on paper, as text that can be typed.

160 random bits and 16 bits of their hash are a number, written with 40 of 23 letters (no I, L or O,
which are misread), in eight groups of five and a check letter:

    check = sum((place + 1) * letter) + 7 * (group + 1)  mod 23        places and groups from 0

23 is a prime, so a wrong letter, two neighbours swapped and two groups swapped are always found,
*and in which group*; what slips through that (two errors in one group, one time in 23) is found by
the hash.  Case, spaces, dashes and line breaks do not matter.  No error text repeats any of it.
"""

from __future__ import annotations

import re
import secrets

from ..errors import WrongKey
from .codec import derive

LETTERS = "ABCDEFGHJKMNPQRSTUVWXYZ"
GROUPS = 8
_DATA = 5  # letters of a group, without its check letter
_SECRET, _HASH = 20, 2  # bytes
_CHECKSUM = "criuctl 2026-11 recovery key checksum"
_HINT = (
    "Look at the paper again: eight groups of six letters, none of them I, L or O, and no digits."
)
_BETWEEN = re.compile(r"[\s-]+")


def new_secret() -> bytes:
    """Return a new secret."""
    return secrets.token_bytes(_SECRET)


def to_text(secret: bytes) -> str:
    """Return the text that a person writes down."""
    number = int.from_bytes(secret + derive(secret, _CHECKSUM)[:_HASH], "big")
    groups = []
    for group in reversed(range(GROUPS)):
        values = []
        for _place in range(_DATA):
            number, value = divmod(number, len(LETTERS))
            values.append(value)
        values.reverse()
        groups.append("".join(LETTERS[value] for value in [*values, _check(values, group)]))
    return "-".join(reversed(groups))


def looks_like(text: str) -> bool:
    """Return whether `text` looks like a recovery key: a few words of letters, most of them of the
    right length.
    """
    words = _BETWEEN.split(text.strip())
    return text.isascii() and 30 <= sum(map(len, words)) <= 64 and "".join(words).isalnum()


def from_text(text: str, where: str) -> bytes:
    """Return the secret; raise `WrongKey`, which names the mistyped group in what came from
    `where`.
    """
    words = [word for word in _BETWEEN.split(text.strip().upper()) if word]
    whole = "".join(words)
    for number, word in enumerate(words, 1):
        if any(letter not in LETTERS for letter in word):
            place = next(i for i, letter in enumerate(word, 1) if letter not in LETTERS)
            raise _mistyped(
                where, f"character {place} of {_named(number, len(words))} is none of its letters"
            )
    if len(whole) != GROUPS * (_DATA + 1):
        for number, word in enumerate(words, 1):
            if len(words) > 1 and len(word) != _DATA + 1:
                raise _mistyped(where, f"group {number} has {len(word)} letters, not {_DATA + 1}")
        raise _mistyped(where, f"it has {len(whole)} letters, not {GROUPS * (_DATA + 1)}")
    number, wrong = 0, []
    for group in range(GROUPS):
        *values, check = (
            LETTERS.index(letter)
            for letter in whole[group * (_DATA + 1) : (group + 1) * (_DATA + 1)]
        )
        if _check(values, group) != check:
            wrong.append(str(group + 1))
        for value in values:
            number = number * len(LETTERS) + value
    if wrong:
        raise _mistyped(
            where,
            (
                f"group{'s' if len(wrong) > 1 else ''} {', '.join(wrong)} "
                f"{'are' if len(wrong) > 1 else 'is'} wrong"
            ),
        )
    try:
        raw = number.to_bytes(_SECRET + _HASH, "big")
    except OverflowError:
        raw = b""
    secret = raw[:_SECRET]
    if not raw or derive(secret, _CHECKSUM)[:_HASH] != raw[_SECRET:]:
        raise _mistyped(where, "its groups do not belong together")
    return secret


def _check(values: list[int], group: int) -> int:
    return (sum((place + 1) * value for place, value in enumerate(values)) + 7 * (group + 1)) % len(
        LETTERS
    )


def _named(number: int, words: int) -> str:
    return f"group {number}" if words > 1 else "the line"


def _mistyped(where: str, what: str) -> WrongKey:
    return WrongKey(f"the recovery key from {where} is mistyped: {what}", hint=_HINT)
