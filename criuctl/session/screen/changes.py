"""What a session's output has changed in the terminal that it is shown on, and how to undo it.

The modes that every terminal resets alike are reset in any case (`client.local_terminal.RESET`).
The others are watched here: the alternate screen, the keyboard modes of kitty's protocol (each of
the two screens has its own), and colours, which the user may have set before.
"""

from __future__ import annotations

import re

LEAVE_ALTERNATE = b"\x1b[?1049l"
_ALTERNATE = frozenset((b"47", b"1047", b"1049"))
_CHANGE = re.compile(
    rb"\x1b(?:\[\?([0-9;]{1,64})([hl])"
    rb"|\[([<>=])[0-9;]{0,16}u"
    rb"|\](4|5|1[0-9])(?=;)"  # a colour of the palette, a special colour, a colour by its use
    rb"|(c))"
)
_LONGEST = 80  # bytes of such a sequence
# Pop more than any terminal keeps.
_NO_KEYBOARD_MODES = b"\x1b[<64u\x1b[=0u"


class TerminalChanges:
    """Follows what the output does to the terminal that is given it."""

    def __init__(self) -> None:
        self.alternate = False  # it shows its alternate screen
        self._keyboard = False
        self._colours = set[int]()  # the numbers of the commands that set them
        self._escape = b""  # the end of the output, where a sequence may be cut in two

    def watch(self, data: bytes) -> None:
        """Look at more output."""
        if b"\x1b" not in data and not self._escape:
            return
        joined, seen = self._escape + data, 0
        for match in _CHANGE.finditer(joined):
            seen = match.end()
            modes, switch, keyboard, colour, reset = match.groups()
            if modes is not None:
                if not _ALTERNATE.isdisjoint(modes.split(b";")):
                    self.alternate = switch == b"h"
            elif keyboard is not None:
                self._keyboard = True
            elif colour is not None:
                self._colours.add(int(colour))
            elif reset is not None:
                self.alternate = False
        last = joined.rfind(b"\x1b", max(seen, len(joined) - _LONGEST))
        self._escape = joined[last:] if last >= 0 else b""

    def undo(self) -> bytes:
        """Return what undoes all of it, and forget it."""
        out = _NO_KEYBOARD_MODES if self._keyboard else b""
        if self.alternate:
            out = out + LEAVE_ALTERNATE + out
        for number in sorted(self._colours):
            out += b"\x1b]%d\x1b\\" % (100 + number)
        self.__init__()  # type: ignore[misc]
        return out
