"""How many columns a character takes, and which characters share a cell.

A cell holds a grapheme cluster: a character, and those that combine with it.  The widths are those
of the wcwidth library, which follows Unicode; the standard library's tables are too old for it.
"""

from __future__ import annotations

from functools import lru_cache

MAX_CLUSTER = 32  # characters in one cell; a program may print combining ones for ever

# Characters of one column that combine with nothing before them: what most programs print.
NARROW = (
    r" -~\xa0-\xac\xae-\u02ff\u0400-\u0482\u048a-\u052f"
    r"\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u2500-\u259f\u2800-\u28ff"
)
_SOFT_HYPHEN = "\xad"  # terminals show it, as a hyphen
_ZWJ = "\u200d"
_VS16 = "\ufe0f"  # the character before it is an emoji


@lru_cache(maxsize=8192)
def width(char: str) -> int:
    """Return the columns of a printable character: 0, 1 or 2.  0: it belongs to the one before."""
    from wcwidth import wcwidth  # takes long to load, and is not needed for most output

    return 1 if char == _SOFT_HYPHEN else max(0, wcwidth(char))


def joins(cluster: str, char: str) -> bool:
    """Return whether `char`, which has a width of its own, belongs to the cell of `cluster`."""
    if not cluster:
        return False
    last = cluster[-1]
    if last == _ZWJ:
        return _pictograph(char)
    if "\U0001f1e6" <= char <= "\U0001f1ff":  # two letters are a flag
        return len(cluster) == 1 and "\U0001f1e6" <= last <= "\U0001f1ff"
    return "\U0001f3fb" <= char <= "\U0001f3ff" and _pictograph(cluster[0])  # a skin tone


@lru_cache(maxsize=1024)
def widened(cluster: str, char: str) -> bool:
    """Return whether `char` makes the narrow `cluster` take two columns."""
    if char == _VS16:
        from wcwidth import wcswidth

        return int(wcswidth(cluster[0] + _VS16)) == 2
    return width(char) > 0 and joins(cluster, char)


def _pictograph(char: str) -> bool:
    return char >= "\U0001f000" or "\u2190" <= char <= "\u2bff" or char in "©®‼⁉™ℹ〰〽㊗㊙"
