"""New pseudo-terminals, and the guard over what line disciplines hold during a dump.

The guard is the program in `criuctl.proc.linediscipline`.  It is started while the tree still runs,
because starting it takes longer than a freeze should.  It holds descriptors of the terminals'
slaves and answers within microseconds.  Even if criuctl is killed, what was typed is in the
terminal or in the guard.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CommandFailed, CriuctlError, NoSuchProcess
from ..proc import command, linediscipline, locks, tty
from ..proc.linediscipline import Held, Printed
from ..proc.tree import ProcessIdentity
from .names import DEFAULT_RUN_DIR

_TIMEOUT = 20.0  # seconds for an answer of the guard
_WINDOW = struct.Struct("4H")
# Not configurable: the numbers are the host's.
_MAKING = Path(DEFAULT_RUN_DIR) / "locks" / "terminals"
_PATIENCE = 10.0  # seconds to wait for another program that makes terminals


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Keep other criuctl programs on this host from making terminals meanwhile.

    The kernel assigns the lowest free number, and CRIU needs exactly the numbers that were chosen:
    two restores at once, or one and a new session, would take each other's.  After a long wait this
    goes on without the lock, which may still succeed.
    """
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            try:
                stack.enter_context(locks.held(_MAKING))
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # a plain user may not
                break
        yield


class Guard:
    """The guard of the terminals of one tree during its dump.

    It inherits the terminals' slaves, which are open without blocking. Its start takes as long as
    much else that a dump prepares, so it is only waited for by `ready`.
    """

    def __init__(self, root: int, terminals: Sequence[int]) -> None:
        self._root = ProcessIdentity.of(root)
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._channel.settimeout(_TIMEOUT)
        self._owed = 0  # answers to requests that were interrupted
        self._answers = ours.makefile("rb")
        try:
            with theirs:
                script = Path(linediscipline.__file__)
                self._child = command.spawn(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-E",
                        str(script),
                        str(theirs.fileno()),
                        str(root),
                    ],
                    pass_fds=[theirs.fileno(), *terminals],
                    new_session=True,
                )
        except BaseException:
            self._answers.close()
            ours.close()
            raise

    def ready(self) -> None:
        """Wait until the guard has started.  `CommandFailed`, `NoSuchProcess`."""
        self._ask("ready")

    def _ask(self, word: str) -> list[list[object]]:
        try:
            while self._owed and self._answers.readline():
                self._owed -= 1
            self._channel.sendall(f"{word}\n".encode())
            self._owed += 1
            answer = self._answers.readline()
            self._owed -= 1
        except OSError as error:
            raise self._failure(f"the guard of the terminals does not answer: {error}") from error
        if not answer:
            raise self._failure(
                f"the guard of the terminals has ended: {self._child.stderr_tail().strip()[-500:]}"
            )
        found: list[list[object]] = json.loads(answer)
        return found

    def _failure(self, what: str) -> CriuctlError:
        """Return the error for a guard that does not answer; it ends with its tree."""
        if not self._root.alive():
            return NoSuchProcess(
                f"PID {self._root.pid} has ended while its terminals were looked at"
            )
        return CommandFailed(what)

    def take(self, terminals: Sequence[int]) -> list[Held]:
        """Return what each terminal of a frozen tree holds, which is left in place."""
        return [_held(*one) for one in self._ask(" ".join(["take", *map(str, terminals)]))]

    def hold(
        self,
        terminals: Sequence[int],
        masters: Sequence[tuple[int, int]],
        blocking: Sequence[tuple[int, int, int]],
    ) -> tuple[list[Held], list[Printed]]:
        """Return what each terminal holds and take it out, until `back`, or for good if the tree
        ends.

        Return also what the `masters` (PID, descriptor) have not read yet.  `blocking` (PID,
        descriptor, flags) are made blocking again by `block`.
        """
        words = [*map(str, terminals), *(":".join(map(str, one)) for one in (*masters, *blocking))]
        answer = self._ask(" ".join(["hold", *words]))
        printed = [
            Printed(base64.b64decode(str(data)), bool(hung_up))
            for data, hung_up in answer[len(terminals) :]
        ]
        return [_held(*one) for one in answer[: len(terminals)]], printed

    def attend(self, end: int) -> None:
        """Have the guard hold this program's socket `end`: if this program is killed, the other end
        sees that only when everything is put back.
        """
        self._ask(f"attend {os.getpid()}:{end}")

    def block(self) -> None:
        """Make blocking again what CRIU has left non-blocking, once it has read the terminals."""
        self._ask("block")

    def back(self) -> None:
        """Put back what was taken out: the tree continues."""
        self._ask("back")

    def drop(self) -> None:
        """Discard what `take` has returned: the tree is about to be ended."""
        self._ask("drop")

    def close(self) -> None:
        """Let the guard end.

        If the tree still lives after a while, the guard first puts back what it holds.
        """
        with contextlib.suppress(OSError):
            self._answers.close()
            self._channel.close()
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _held(queued: object, raw: object, stopped: object, canonical: object, echo: object) -> Held:
    return Held(
        base64.b64decode(str(queued)),
        base64.b64decode(str(raw)),
        bool(stopped),
        bool(canonical),
        bool(echo),
    )


class Pty:
    """A new pseudo-terminal: `master` and `slave` are close-on-exec descriptors."""

    def __init__(
        self, rows: int = 24, columns: int = 80, xpixel: int = 0, ypixel: int = 0, *, root: str = ""
    ) -> None:
        """`root`: ``/proc/PID/root`` of the process whose mount namespace is to have it."""
        self.master, self.slave, self.path = tty.open_pair(root)
        self._root = root
        self.resize(rows, columns, xpixel, ypixel)

    @property
    def number(self) -> int:
        """Return the N of its /dev/pts/N."""
        return int(self.path.rpartition("/")[2])

    def resize(self, rows: int, columns: int, xpixel: int = 0, ypixel: int = 0) -> None:
        """Set the window's size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, _WINDOW.pack(rows, columns, xpixel, ypixel))

    def open_slave(self, flags: int) -> int:
        """Open the slave again with these flags, never as controlling terminal.

        ``O_ASYNC`` is left out: open(2) would only record it, and fcntl(2) could not set it any
        more.
        """
        unwanted = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_ASYNC
        return os.open(self._root + self.path, (flags & ~unwanted) | os.O_NOCTTY | os.O_CLOEXEC)

    def share_master(self, flags: int) -> int:
        """Return another descriptor of the master, and set these flags on it."""
        fcntl.fcntl(self.master, fcntl.F_SETFL, flags & (os.O_NONBLOCK | os.O_APPEND))
        return os.dup(self.master)

    def read_packets(self) -> None:
        """Set packet mode (TIOCPKT): the master reads packets, which also report changed modes."""
        fcntl.ioctl(self.master, termios.TIOCPKT, struct.pack("i", 1))

    def close_slave(self) -> None:
        """Close the slave: the tree has opened its own."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def close(self) -> None:
        """Hang up."""
        self.close_slave()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1


def window_size(fd: int) -> tuple[int, int, int, int]:
    """Return rows, columns and both in pixels."""
    rows, columns, x, y = _WINDOW.unpack(fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(_WINDOW.size)))
    return rows, columns, x, y
