"""The terminal modes that the programs of a session have set, and the queries they have sent.

That is enough to redraw and to reset a client's terminal, and to answer the queries.  The holder
does not emulate a terminal (clients do, from the log); it only watches for the few sequences that
switch modes.  One compiled expression runs over the output as it lies in the log; text without
escapes costs a ``memchr``.  A sequence that a read cuts in two is carried over to the next read.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

_MAX_CARRY = 512  # a title longer than this is not a title
_SMALL = 4096  # bytes that may be copied to be joined with what was carried over
_SEQUENCE = re.compile(
    rb"\x1b(?:"
    # DECSET, DECRST, DECSTR, ED; queries
    rb"\[(?:\?([0-9;]{1,64})([hl])|(!p)|([23])J|(\??6n|5n|>?0?c)"
    rb"|([<>=])([0-9]{0,4})(?:;([0-9]))?u|>4(?:;([0-9]))?m)"  # how keys are reported
    rb"|(c)|([=>])"  # RIS, DECKPAM and DECKPNM
    rb"|\][02];([^\x07\x1b\x00]{0,400})(?:\x07|\x1b\\)"  # title
    rb")"
)
_BEGINNING = re.compile(
    rb"\x1b(?:\[(?:\?[0-9;]{0,64}|!|[02356]|[<>=][0-9]{0,4}(?:;[0-9]?)?)?"
    rb"|\][02]?(?:;[^\x07\x1b\x00]{0,400}\x1b?)?)?\Z"
)
_MOUSE = frozenset((9, 1000, 1001, 1002, 1003, 1005, 1006, 1015, 1016))
_ALTERNATE = frozenset((47, 1047, 1049))
_MAX_KEYBOARD = 16  # entries of a stack


@dataclass(slots=True)
class Modes:
    """The present modes; `feed` updates them."""

    alternate: bool = False
    bracketed_paste: bool = False
    mouse: list[int] = field(default_factory=list)
    focus: bool = False
    keypad: bool = False
    cursor_keys: bool = False
    cursor_visible: bool = True
    title: str = ""
    # The stacks of kitty's keyboard modes: of the screen that is shown, and of the other one.
    keyboard: list[int] = field(default_factory=list)
    other_keyboard: list[int] = field(default_factory=list)
    modify_other_keys: int = 0
    alternate_since: int | None = None
    cleared_at: int | None = None
    # Queries without an answer: (offset behind it, query).
    asked: list[tuple[int, str]] = field(default_factory=list)
    carry: bytes = b""  # an incomplete sequence at the end of the last output

    def feed(self, data: memoryview, offset: int) -> None:
        """Look at output `data`, whose first byte has this offset in the log."""
        if self.carry:
            carried, self.carry = self.carry, b""
            if len(data) < _SMALL:
                data, offset = memoryview(carried + data), offset - len(carried)
            else:
                for match in _SEQUENCE.finditer(carried + data[:_MAX_CARRY]):
                    if match.start() < len(carried):
                        self._apply(match, offset - len(carried))
        for match in _SEQUENCE.finditer(data):
            self._apply(match, offset)
        tail = bytes(data[-_MAX_CARRY:])
        last = tail.rfind(b"\x1b")
        if last >= 0:
            # A title may end by ESC \: then the sequence began at the escape before.
            if (
                tail.endswith(b"\x1b")
                and (before := tail.rfind(b"\x1b]", 0, last)) >= 0
                and _BEGINNING.match(tail, before)
            ):
                last = before
            if _BEGINNING.match(tail, last):
                self.carry = tail[last:]

    def to_dict(self) -> dict[str, Any]:
        """Return the modes as the protocol has them."""
        found = asdict(self)
        del found["carry"]
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Modes:
        """Return the modes that `to_dict`, of this or another version, described."""
        modes = cls()
        for key, value in values.items():
            if key in cls.__slots__ and key != "carry":
                setattr(modes, key, value)
        return modes

    def _apply(self, match: re.Match[bytes], offset: int) -> None:
        numbers, switch, soft_reset, erase, query, stack, flags, how, keys, reset, keypad, title = (
            match.groups()
        )
        if numbers is not None:
            for number in numbers.split(b";"):
                if number:
                    self._private(int(number), switch == b"h", offset + match.start())
        elif erase is not None:
            if erase == b"2":
                self.cleared_at = offset + match.start()
        elif query is not None:
            self.asked.append((offset + match.end(), query.decode()))
        elif stack is not None:
            change_keyboard(self.keyboard, stack.decode(), int(flags or 0), int(how or 0))
        elif keypad is not None:
            self.keypad = keypad == b"="
        elif title is not None:
            self.title = title.decode(errors="replace")
        elif reset is not None:
            self.__init__(cleared_at=offset + match.start(), asked=self.asked)  # type: ignore[misc]
        elif soft_reset is not None:
            self.keypad = self.cursor_keys = False
            self.cursor_visible = True
        else:
            self.modify_other_keys = int(keys or 0)

    def _private(self, number: int, on: bool, at: int) -> None:
        if number in _ALTERNATE:
            if on != self.alternate:
                self.keyboard, self.other_keyboard = self.other_keyboard, self.keyboard
            if on and not self.alternate:
                self.alternate_since = at
            self.alternate = on
            if not on:
                self.alternate_since = None
        elif number in _MOUSE:
            if on != (number in self.mouse):
                self.mouse = sorted({*self.mouse, number} if on else {*self.mouse} - {number})
        elif number == 2004:
            self.bracketed_paste = on
        elif number == 1004:
            self.focus = on
        elif number == 1:
            self.cursor_keys = on
        elif number == 25:
            self.cursor_visible = on


def change_keyboard(stack: list[int], what: str, flags: int, how: int) -> None:
    """Push, pop or set (`what`: ``>``, ``<``, ``=``) modes of kitty's keyboard protocol."""
    if what == ">":
        stack.append(flags)
        del stack[:-_MAX_KEYBOARD]
    elif what == "<":
        del stack[max(0, len(stack) - (flags or 1)) :]
    else:
        now = stack.pop() if stack else 0
        stack.append(now | flags if how == 2 else now & ~flags if how == 3 else flags)
