"""Input of an attached terminal before it is sent: the detach key, and the terminal's own reports.

The detach key is found even if it is split over several reads; in a bracketed paste it is text.  A
key that a terminal sends as an escape sequence (as in the kitty keyboard protocol) must not hold
back a lone escape, so it is only recognised when it is complete.
"""

from __future__ import annotations

import re

from . import keys

_PASTE_BEGIN, _PASTE_END = b"\x1b[200~", b"\x1b[201~"
_REPORT = re.compile(
    rb"(?:\x1b\[[?>=<]?[0-9;:]*[cRnytuIOMm]|\x1b[\]P][^\x07\x1b]*(?:\x07|\x1b\\))+"
)


class DetachKey:
    """Finds the detach key in what is typed: across reads, never in a bracketed paste."""

    def __init__(self, key: str) -> None:
        found = keys.sequences(key)
        self._held_ones = [s for s in found if not s.startswith(b"\x1b")]
        # These are only recognised, not held back: a lone escape must not wait for more input.
        self._seen_ones = [s for s in found if s.startswith(b"\x1b")]
        self._held = b""  # what may be the beginning of the key
        self._tail = b""  # the end of what was passed on
        self._paste = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what to pass on, and whether the key came; drop what follows the key."""
        out = bytearray()
        at = 0
        while at < len(data):
            if self._paste:
                at = self._pass(data, at, out)
                continue
            ahead = self._held + data[at : at + 1]
            at += 1
            if ahead in self._held_ones:
                self._held = b""
                return bytes(out), True
            while ahead and not any(s.startswith(ahead) for s in self._held_ones):
                if self._put(ahead[:1], out):
                    return bytes(out), True
                ahead = ahead[1:]
            self._held = ahead
        return bytes(out), False

    def _pass(self, data: bytes, at: int, out: bytearray) -> int:
        """Pass on a paste up to its end; return where that is."""
        joined = self._tail + data[at:]
        end = joined.find(_PASTE_END)
        stop = len(data) if end < 0 else at + end + len(_PASTE_END) - len(self._tail)
        out += data[at:stop]
        self._tail = (self._tail + data[at:stop])[-16:]
        if end >= 0:
            self._paste, self._tail = False, b""
        return stop

    def _put(self, byte: bytes, out: bytearray) -> bool:
        self._tail = (self._tail + byte)[-16:]
        out += byte
        if self._tail.endswith(_PASTE_BEGIN):
            self._paste, self._tail = True, b""
        for sequence in self._seen_ones:
            if self._tail.endswith(sequence):
                del out[max(0, len(out) - len(sequence)) :]
                return True
        return False


def is_report(data: bytes) -> bool:
    """Return whether the terminal itself sent this: an answer to a query, the focus, the mouse."""
    return _REPORT.fullmatch(data) is not None
