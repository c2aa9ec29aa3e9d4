"""What the user's terminal shows of a session: its very output, or a part of its screen.

Output is passed on unchanged as long as the session's screen fits into the terminal.  On a smaller
one it would be garbage: there the screen is emulated here, and the part around its cursor is drawn,
some times a second.  What the output has changed in the terminal is undone at the end.
"""

from __future__ import annotations

import time
from typing import Any

from ..screen.changes import TerminalChanges
from ..screen.clipboard import WithoutClipboard
from ..screen.drawing import View, redraw
from ..screen.queries import OldOutput
from ..screen.replay import replay
from .local_terminal import RESET, Terminal
from .session import Output, Session

_FRAME = 0.04  # seconds between two drawings of a part


class ShownScreen:
    """One session's screen on one terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._changes = TerminalChanges()
        self._old_output = OldOutput(0)
        self._without_clipboard = WithoutClipboard()
        self.clipboard = True  # the output may set the clipboard of the terminal
        self._view: View | None = None  # only a part is shown
        self.at_top = False  # the cursor was in the first line when the screen was drawn
        self.due: float | None = None  # when `update` is to be called

    @property
    def clipped(self) -> bool:
        """Whether only a part of the screen is shown."""
        return self._view is not None

    def draw(self, session: Session, *, history: bool) -> int | None:
        """Draw the session's present screen; return the offset at which its output goes on.

        None: the terminal has no size, and nothing was drawn.
        """
        size, status = self._terminal.size, session.status()
        if size is None:
            return None
        screen = replay(session, status)
        if history:
            self._terminal.put(b"\r\n" * size[0])  # what is on this screen goes into the scrollback
        drawing = redraw(screen, size[0], size[1], history=history)
        self._terminal.put(self._changes.undo() + RESET + drawing)
        self._changes.watch(drawing)
        self._without_clipboard = WithoutClipboard()  # what was held back is not needed
        self.at_top = screen.cursor.y == 0
        self._view = View(screen) if self.too_small(status["rows"], status["cols"]) else None
        self.due = None
        return screen.end

    def too_small(self, rows: int, columns: int) -> bool:
        """Return whether a screen of this size does not fit into the terminal."""
        size = self._terminal.size
        return (
            self._terminal.is_terminal
            and size is not None
            and (rows, columns) > (0, 0)
            and (size[0] < rows or size[1] < columns)
        )

    def attached(self, answer: dict[str, Any]) -> None:
        """Note where old output ends, from the answer to `attach`."""
        self._old_output = OldOutput(answer["end"])

    def show(self, output: Output) -> None:
        """Show more output."""
        if self._view is not None:
            self._view.screen.feed(output.data)
            if self.due is None:
                self.due = time.monotonic() + _FRAME
            return
        self._changes.watch(output.data)
        data = self._old_output.feed(output.offset, output.data)
        self._terminal.put(data if self.clipboard else self._without_clipboard.feed(data))

    def update(self) -> None:
        """Draw what has changed since the last drawing of a part."""
        size, self.due = self._terminal.size, None
        if self._view is not None and size is not None and not self._terminal.waiting:
            self._terminal.put(self._view.update(size[0], size[1]).encode(errors="replace"))
        elif self._view is not None:
            self.due = time.monotonic() + _FRAME  # the terminal is slow

    def leave(self) -> None:
        """Draw the last of a part, and undo what the output has changed in the terminal."""
        if self.due is not None:
            self.update()
        self._terminal.put(self._changes.undo())
