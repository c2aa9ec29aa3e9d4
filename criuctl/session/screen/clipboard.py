"""Output without the sequences that set or read the clipboard of the terminal that shows it.

OSC 52 is the usual one; kitty has OSC 5522, iTerm2 ``OSC 1337 ; Copy``.  The user of a program may
want them for the own terminal; a client that only watches a session did not ask for them.

A sequence may come in any number of pieces, and with control characters inside, which terminals
skip.  The beginning of an OSC is looked for everywhere: within another string it ends that string,
and tmux and screen pass on what is in a string of their own.
"""

from __future__ import annotations

import re

_SKIPPED = rb"[\x00-\x06\x08-\x17\x19\x1c-\x1f\x7f]*"
_BEGIN = rb"(?:\x1b[\x00-\x17\x19\x1c-\x1f\x7f]*\]|\xc2\x9d)"  # also U+009D, in UTF-8


def _spelled(text: bytes) -> bytes:
    return b"".join(bytes((byte,)) + _SKIPPED for byte in text)


_NUMBERS = b"|".join(_spelled(number) for number in (b"52", b"5522"))
_COPY = rb"%s;%s[Cc]%s[Oo]%s[Pp]" % (_spelled(b"1337"), _SKIPPED, _SKIPPED, _SKIPPED)
_CLIPBOARD = re.compile(
    rb"%s%s(?:0%s)*(?:(?:%s)(?=[^0-9])|%s)" % (_BEGIN, _SKIPPED, _SKIPPED, _NUMBERS, _COPY)
)
# What may be the beginning of one, at the end of the output so far.
_PARTIAL = re.compile(
    rb"(?:%s[\x00-\x06\x08-\x17\x19\x1c-\x1f\x7f0-9;CcOo]*|\x1b[\x00-\x17\x19\x1c-\x1f\x7f]*|\xc2)\Z"
    % _BEGIN
)
_END = re.compile(rb"[\x07\x18\x1a\x1b]")
_LONGEST = 256  # bytes of a beginning; with more, it is one that hides


class WithoutClipboard:
    """Takes the sequences out of a stream of output."""

    def __init__(self) -> None:
        self._held = b""
        self._inside = False  # of a sequence that is taken out

    def feed(self, data: bytes) -> bytes:
        """Return what to show of more output; the beginning of a sequence is held back."""
        data, self._held, out = self._held + data, b"", b""
        while data:
            if self._inside:
                data = self._skip(data)
                continue
            match = _CLIPBOARD.search(data)
            if match is None:
                return out + self._hold(data)
            out += data[: match.start()]
            data, self._inside = data[match.end() :], True
        return out

    def _skip(self, data: bytes) -> bytes:
        """Return what follows the sequence, which data begins in; empty: it has not ended."""
        end = _END.search(data)
        if end is None:
            return b""
        if end[0] == b"\x1b":
            if end.end() == len(data):
                self._held = b"\x1b"
                return b""
            self._inside = False
            rest = data[end.end() :]  # of the terminator, or of another sequence
            return rest[1:] if rest.startswith(b"\\") else b"\x1b" + rest
        self._inside = False
        return data[end.end() :]

    def _hold(self, data: bytes) -> bytes:
        partial = _PARTIAL.search(data)
        if partial is None:
            return data
        if len(partial[0]) > _LONGEST:
            self._inside = True
        else:
            self._held = partial[0]
        return data[: partial.start()]
