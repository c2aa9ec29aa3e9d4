"""The master side of a session's terminal: output into the log, input out of a queue.

It reads and writes in large steps and never blocks.  The slave side is kept open here too: a
terminal whose last user closed it for a moment would otherwise report a hang-up for ever, and the
session's end is known from its process, not from its terminal.  Reading until the kernel has
nothing more is exact: it first delivers what writers have put into the terminal's buffers.

Input is written in the order in which it was accepted, chunk by chunk, as the terminal takes it.
While it is `held` (a checkpoint is being made, or the tree is not here) it waits in the queue, and
for a moment behind a key that signals (`signal_keys`).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..screen.modes import Modes
from ..screen.shell_marks import ShellMarks
from .base64_text import decoded, encoded
from .event_loop import READ, WRITE, Loop
from .output_log import OutputLog
from .signal_keys import SignalKeys

_BATCH = 256 << 10  # bytes read before clients get their share
_WRITE = 4096
COMMAND = "command"  # the kind of input that no person typed: a command for the shell
_TIOCGPTPEER = 0x5441
_TIOCGSID = 0x5429  # not in the termios module


@dataclass(slots=True)
class Chunk:
    """Input that was accepted."""

    data: bytes
    who: dict[str, Any]  # the operator, as the audit log names it
    kind: str
    connection: int = -1  # descriptor of the connection that waits for the answer, -1 for none
    request: int = 0
    at: int = 0  # bytes written already
    offset: int = -1  # the log's end when the first byte was written
    answered: bool = False


class Master:
    """One terminal, or none at the moment."""

    def __init__(self, loop: Loop, log: OutputLog, modes: Modes) -> None:
        self._loop, self.log, self.modes = loop, log, modes
        self.marks = ShellMarks()
        self.fd = -1
        self._slave = -1
        self.rows, self.cols, self.xpixel, self.ypixel = 24, 80, 0, 0
        self.queue: deque[Chunk] = deque()
        self.queued = 0  # bytes of input not yet written
        self.held = False
        self.reserved = False  # only input of the kind `COMMAND` is written
        self.signal_keys = SignalKeys(loop, self.write)
        self.on_output: Callable[[], None] = lambda: None
        self.on_begun: Callable[[Chunk, bool], None] = lambda chunk, hidden: None
        self.on_written: Callable[[Chunk], None] = lambda chunk: None
        self.on_broken: Callable[[], None] = lambda: None
        self.on_released: Callable[[], None] = lambda: None

    # -- the terminal -----------------------------------------------------------------------------

    def open(self, fd: int) -> None:
        """Take a master, which is closed by `close`."""
        self.fd = fd
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._slave = fcntl.ioctl(fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self.rows, self.cols, self.xpixel, self.ypixel = struct.unpack(
            "HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8)
        )
        self._watch()

    def close(self) -> None:
        """Read what is left of the output, and close the terminal."""
        if self.fd >= 0:
            self.drain()
            self._loop.unwatch(self.fd)
            for fd in (self.fd, self._slave):
                if fd >= 0:
                    os.close(fd)
            self.fd = self._slave = -1

    def resize(self, rows: int, cols: int, xpixel: int, ypixel: int) -> bool:
        """Set the window size; return whether it changed."""
        new = (rows, cols, xpixel, ypixel)
        if new == (self.rows, self.cols, self.xpixel, self.ypixel):
            return False
        self.rows, self.cols, self.xpixel, self.ypixel = new
        if self.fd >= 0:
            set_window_size(self.fd, *new)
        return True

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed; a password prompt does not."""
        try:
            return bool(termios.tcgetattr(self.fd)[3] & termios.ECHO)
        except (OSError, termios.error):
            return False

    def leader(self) -> int:
        """Return the PID of the process that leads the terminal's session; 0 if there is none."""
        try:
            data = fcntl.ioctl(self.fd, _TIOCGSID, bytes(4))
        except (OSError, ValueError):  # ValueError: the session has no terminal
            return 0
        return int(struct.unpack("i", data)[0])

    @property
    def canonical(self) -> bool:
        """Whether the terminal itself edits lines; a line editor does that itself."""
        try:
            return bool(termios.tcgetattr(self.fd)[3] & termios.ICANON)
        except (OSError, termios.error):
            return False

    @property
    def line_mode(self) -> bool:
        """Whether the terminal itself edits and echoes lines, and adds what is typed to them."""
        try:
            flags = termios.tcgetattr(self.fd)[3]
        except (OSError, termios.error):
            return False
        return bool(flags & termios.ICANON and flags & termios.ECHO)

    @property
    def slave(self) -> int:
        """Return the descriptor of the slave side; -1: there is no terminal."""
        return self._slave

    @property
    def unread(self) -> bool:
        """Whether there is input that no program has read yet."""
        return bool(self.queue) or self.unread_by_programs

    @property
    def unread_by_programs(self) -> bool:
        """Whether the terminal has input that no program has read yet, or signalled for.

        The kernel moves what is written to the master on to the programs' side in the background,
        and has done so for all of it when a poll of that side returns.
        """
        try:
            side = select.poll()
            side.register(self._slave, select.POLLIN)
            side.poll(0)
            waiting = fcntl.ioctl(self._slave, termios.FIONREAD, b"\0" * 4)
        except (OSError, ValueError):  # ValueError: the session has no terminal
            return False
        return waiting != b"\0" * 4

    # -- output -----------------------------------------------------------------------------------

    def drain(self, limit: int = 1 << 24) -> None:
        """Read until nothing is left, but at most `limit` bytes: a running tree may print for
        ever.
        """
        end = self.log.end + limit
        while self.fd >= 0 and self.log.end < end and self._read():
            pass

    def _ready(self, events: int) -> None:
        if events & ~WRITE:
            self._read()
        if events & WRITE and self.fd >= 0:
            self.write()

    def _read(self) -> bool:
        """Read one batch; return False when nothing is left.

        The kernel gives at most 4 KiB at a time; nearly all of the holder's time is spent in these
        reads.
        """
        log, fd = self.log, self.fd
        start, more = log.end, True
        while more and log.end - start < _BATCH:
            room, count = log.room(), 0
            try:
                while count < len(room):
                    got = os.readv(fd, [room[count:]])
                    count += got
                    if not got:
                        more = False
                        break
            except BlockingIOError:
                more = False
            except OSError:  # EIO: hung up, for good
                more = False
                self._loop.unwatch(fd)
                self._loop.soon(self.on_broken)
            log.advance(count)
        position = start
        while position < log.end:
            piece = log.view(position, log.end - position)
            if self.modes.carry or self.marks.waiting or log.escapes(position, len(piece)):
                self.modes.feed(memoryview(piece), position)
                self.marks.feed(memoryview(piece), position)
            position += len(piece)
        if log.end > start:
            self.on_output()
            log.flush()
        return more

    # -- input ------------------------------------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        """Add input to the queue; the parts of a command come before other input."""
        before = sum(one.kind == COMMAND for one in self.queue)
        if chunk.kind == COMMAND and not (self.queue and self.queue[0].at):
            self.queue.insert(before, chunk)
        else:
            self.queue.append(chunk)
        self.queued += len(chunk.data)
        if len(self.queue) == 1 or chunk.kind == COMMAND:
            self.write()

    def reserve(self) -> None:
        """Write the parts of a command alone; other input waits."""
        self.reserved = True

    def release(self) -> None:
        """Go on writing all input."""
        if self.reserved:
            self.reserved = False
            self.write()

    def hold(self, held: bool) -> None:
        """Hold input back, or go on writing it."""
        self.held = held
        if not held:
            self.write()
            self.on_released()

    def drop(self, unless: Callable[[Chunk], bool]) -> list[Chunk]:
        """Remove queued input unless it is to stay; return what was removed."""
        dropped = [chunk for chunk in self.queue if not unless(chunk)]
        self.queue = deque(chunk for chunk in self.queue if unless(chunk))
        self.queued = sum(len(chunk.data) - chunk.at for chunk in self.queue)
        return dropped

    def forget(self, connection: int) -> None:
        """Send no more answers to a client that is gone; its input is still written."""
        for chunk in self.queue:
            if chunk.connection == connection:
                chunk.connection = -1

    def write(self) -> None:
        """Write what the terminal takes."""
        if self.fd < 0 or self.held:
            return
        try:
            while self._writable():
                chunk = self.queue[0]
                if chunk.offset < 0:
                    chunk.offset = self.log.end
                    self.on_begun(chunk, not self.echoes)
                piece, signals = self.signal_keys.piece(self.fd, self._next())
                count = os.write(self.fd, piece)
                chunk.at += count
                self.queued -= count
                if signals and count == len(piece):
                    self.signal_keys.pressed()
                if chunk.at == len(chunk.data):
                    self.queue.popleft()
                    self.on_written(chunk)
        except BlockingIOError:
            pass
        except OSError:
            self._loop.soon(self.on_broken)
        self._watch()

    def _writable(self) -> bool:
        """Whether there is input to write now."""
        if self.held or not self.queue or (self.reserved and self.queue[0].kind != COMMAND):
            return False
        return not self.signal_keys.hold(self.fd, self._next())

    def _next(self) -> bytes:
        chunk = self.queue[0]
        return chunk.data[chunk.at : chunk.at + _WRITE]

    def _watch(self) -> None:
        if self.fd >= 0:
            waiting = self._writable()
            self._loop.watch(self.fd, READ | WRITE if waiting else READ, self._ready)

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "master": self.fd,
            "size": [self.rows, self.cols, self.xpixel, self.ypixel],
            "held": self.held,
            "reserved": self.reserved,
            "queue": [asdict(chunk) | {"data": encoded(chunk.data)} for chunk in self.queue],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        self.held, self.reserved = state["held"], state.get("reserved", False)
        self.rows, self.cols, self.xpixel, self.ypixel = state["size"]
        for values in state["queue"]:
            chunk = Chunk(**values | {"data": decoded(values["data"])})
            self.queue.append(chunk)
            self.queued += len(chunk.data) - chunk.at
        if state["master"] >= 0:
            self.open(state["master"])


def set_window_size(fd: int, rows: int, cols: int, xpixel: int = 0, ypixel: int = 0) -> None:
    """Set the window size of a terminal; a change sends SIGWINCH to its foreground group."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, xpixel, ypixel))
