"""The terminal at the user's end of an attached session; pipes work too, with fewer features.

Nothing here blocks: what the terminal does not take is kept, and the attach client reads no more of
the session while too much waits.  O_NONBLOCK is set on an open file description of this process's
own, because the inherited one is shared with other processes.  What was changed is put back on
exit, whatever the session's programs have asked of the terminal meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import struct
import termios
import time
import tty
from collections import deque
from types import TracebackType
from typing import Any, Self

_LAST_SECONDS = 2.0  # for the terminal to take what still waits when it is left

# Puts a terminal back into the modes that a shell expects.
RESET = (
    b"\x1b[?2026l"  # show what comes
    b"\x1b7\x1b[?6l\x1b[r\x1b8"  # reset the margins, keep the cursor
    b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l"
    b"\x1b[?9l\x1b[?2004l\x1b[?2031l\x1b[?2048l\x1b[?1l\x1b>\x1b[4l\x1b[20l\x1b[?7h\x1b[?5l"
    b"\x1b[?25h\x1b(B\x1b)B\x0f\x1b[0 q\x1b[>4m\x1b]8;;\x1b\\\x1b[m"
)


class NotShown(OSError):
    """Standard output takes nothing: it may be a file on a full disk."""


class Terminal:
    """This process's terminal: raw inside the ``with`` block, put back after it."""

    def __init__(self, stdin: int = 0, stdout: int = 1) -> None:
        self.stdin, self._stdout = stdin, stdout
        self.keyboard, self.is_terminal = os.isatty(stdin), os.isatty(stdout)
        self._saved: list[Any] | None = None
        self._out = stdout
        self._small = False  # a write might block: write little, when there is room
        self._waiting: deque[memoryview] = deque()
        self.waiting = 0  # bytes not taken yet
        self.drew = False

    def __enter__(self) -> Self:
        mode = os.fstat(self._stdout).st_mode
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            # O_NONBLOCK on the inherited description would affect every process that shares it.
            if self.is_terminal:
                self._out = os.open(os.ttyname(self._stdout), flags)
            elif stat.S_ISFIFO(mode):
                self._out = os.open(f"/proc/self/fd/{self._stdout}", flags)
            else:
                self._small = not stat.S_ISREG(mode)
        except OSError:
            self._small = True
        if self.keyboard:
            self._saved = termios.tcgetattr(self.stdin)
            tty.setraw(self.stdin, termios.TCSANOW)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                self._finish()
        finally:
            if self._saved is not None:
                with contextlib.suppress(termios.error):
                    # At once: a terminal that was stopped (^S) would never drain.
                    termios.tcsetattr(self.stdin, termios.TCSANOW, self._saved)
            if self._out != self._stdout:
                os.close(self._out)

    @property
    def size(self) -> tuple[int, int, int, int] | None:
        """Return rows, columns and both in pixels; None: no terminal, or it has no size."""
        for fd in (self._stdout, self.stdin):
            with contextlib.suppress(OSError):
                rows, columns, x, y = struct.unpack("4H", _window(fd))
                if rows and columns:
                    return rows, columns, x, y
        return None

    @property
    def out(self) -> int:
        """Return the descriptor to wait for while output waits."""
        return self._out

    def put(self, data: bytes | memoryview) -> None:
        """Show `data`, now or as soon as the terminal takes it."""
        if data:
            self._waiting.append(memoryview(data))
            self.waiting += len(data)
            if len(self._waiting) == 1:
                self.flush()

    def flush(self) -> None:
        """Write what the terminal takes.  `BrokenPipeError` if it has no reader, `NotShown`."""
        while self._waiting:
            if self._small and not select.select([], [self._out], [], 0)[1]:
                return
            piece = self._waiting[0]
            try:
                count = os.write(self._out, piece[:4096] if self._small else piece)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:  # the terminal hung up; SIGHUP is on its way
                    self._waiting.clear()
                    self.waiting = 0
                    return
                if error.errno == errno.EPIPE:
                    raise
                raise NotShown(error.errno, error.strerror) from error
            self.waiting -= count
            if count == len(piece):
                self._waiting.popleft()
            else:
                self._waiting[0] = piece[count:]

    def _finish(self) -> None:
        """Show what still waits, then put the modes back; give up a terminal that is stopped."""
        deadline = time.monotonic() + _LAST_SECONDS
        if self.is_terminal and self.drew:
            self.put(RESET)
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._out], [], left)
            self.flush()


def _window(fd: int) -> bytes:
    return fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)


def fields_of(size: tuple[int, int, int, int]) -> dict[str, int]:
    """Return a size as the protocol has it."""
    return {"rows": size[0], "cols": size[1], "xpixel": size[2], "ypixel": size[3]}
