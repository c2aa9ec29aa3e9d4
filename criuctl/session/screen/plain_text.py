"""Output as plain text: `strip` removes the control sequences from a stream of bytes.

It emulates nothing: what a program overwrites or erases stays in the text.  `screen` knows what is
*shown*.
"""

from __future__ import annotations

import re

_MAX_CARRY = 64 << 10  # a sequence longer than this is none

_STRING = rb"|\x1b[PX^_](?:[^\x1b]|\x1b(?!\\))*\x1b\\"
_OTHERS = (
    rb"\x1b\[[<-?]?[0-9:;]*[ -/]*[@-~]"
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    rb"|\x1b[()*+# %][ -~]|\x1b[0-OQ-WYZ\\`-~]"
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\r(?=\n)"
)
_SEQUENCE = re.compile(_OTHERS + _STRING)
# Behind the last end of a string no string can end: do not search for one at each beginning.
_AFTER = re.compile(_OTHERS)
_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[<-?]?[0-9:;]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[()*+# %])?|\r)\Z"
)

# What a copy of a typed line may hold besides its text; " \r" is how a line editor goes on in the
# next line of the screen.
_BETWEEN = re.compile(_OTHERS + _STRING + rb"|[\r\n\t]| \r(?!\n)")


def visible(data: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """Return the pieces of output that are text, each with its place, and how much of the output
    is complete: behind it a sequence may only have begun.
    """
    tail = _UNFINISHED.search(data)
    complete = len(data) - (len(tail[0]) if tail is not None and len(tail[0]) < _MAX_CARRY else 0)
    found, at = list[tuple[int, bytes]](), 0
    for match in _BETWEEN.finditer(data, 0, complete):
        if match.start() > at:
            found.append((at, data[at : match.start()]))
        at = match.end()
    if at < complete:
        found.append((at, data[at:complete]))
    return found, complete


def strip(data: bytes) -> tuple[bytes, bytes]:
    """Return output without control sequences, lines ended by a newline alone, and the rest.

    The rest may be an incomplete sequence: it belongs before the output that comes next.
    """
    tail = _UNFINISHED.search(data)
    carry = tail[0] if tail is not None and len(tail[0]) < _MAX_CARRY else b""
    data = data[: len(data) - len(carry)]
    end = data.rfind(b"\x1b\\") + 2 if b"\x1b\\" in data else 0
    return (_SEQUENCE.sub(b"", data[:end]) + _AFTER.sub(b"", data[end:])).replace(
        b"\n\r", b"\n"
    ), carry
