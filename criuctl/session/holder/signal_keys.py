"""Keys that signal (^C, ^\\ and ^Z, or what the terminal has instead), and the input behind them.

The terminal signals the program as soon as it gets such a key, and gives it what was typed behind
the key as usual. A line editor that finds both at the same time mixes them up: bash adds the new
text to the line that was to be interrupted, and drops the next line or key for the interrupt; zsh
and fish lose characters. A person does not type that fast, but a client sends ``C-c Up`` at once.

So input behind such a key waits until the program in the foreground has handled the signal and
waits for input again (`ForegroundReport.ready`), or for a second if that does not happen: it
computes, or does not read the terminal at all. Another key that signals does not wait.
"""

from __future__ import annotations

import termios
import time
from collections.abc import Callable

from .event_loop import Loop

LONGEST = 1.0  # seconds that input waits
_LOOK = 0.01  # seconds between two looks at the program
_KEYS = (termios.VINTR, termios.VQUIT, termios.VSUSP)


class SignalKeys:
    """Holds input back behind a key that signals; `go_on` is called when that may be over."""

    def __init__(self, loop: Loop, go_on: Callable[[], None]) -> None:
        self._loop, self._go_on = loop, go_on
        self._until = 0.0  # monotonic time at which input waits no longer
        self._looking = False
        self.ready: Callable[[], bool] = lambda: True  # whether the program waits for input

    def hold(self, fd: int, data: bytes) -> bool:
        """Whether `data` must not be written to the terminal yet."""
        if time.monotonic() >= self._until or data.startswith(tuple(_keys(fd))):
            return False
        if not self._looking:
            self._looking = True
            self._loop.after(_LOOK, self._look)
        return True

    def piece(self, fd: int, data: bytes) -> tuple[bytes, bool]:
        """Return `data` up to the first key that signals, and whether there is one."""
        found = [at for key in _keys(fd) if (at := data.find(key)) >= 0]
        return (data[: min(found) + 1], True) if found else (data, False)

    def pressed(self) -> None:
        """Note that such a key was written."""
        self._until = time.monotonic() + LONGEST

    def _look(self) -> None:
        self._looking = False
        if self.ready():
            self._until = 0.0
        self._go_on()


def _keys(fd: int) -> list[bytes]:
    """Return the keys that signal now."""
    try:
        _, _, _, flags, _, _, characters = termios.tcgetattr(fd)
    except (OSError, termios.error):
        return []
    if not flags & termios.ISIG:
        return []
    return [characters[key] for key in _KEYS if characters[key] != b"\0"]
