"""A child process that is followed by its pidfd.

`command` starts children. A `Child` is never ended unless its owner asks: neither losing the object
nor an exception kills it, because a CRIU killed half way leaves a tree frozen. The owner calls
`wait`, or uses the child in a ``with`` block, which ends it at exit. Its stderr goes to a memory
file, whose end can be read at any time; no thread copies it and nothing blocks.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from ..errors import CommandFailed, TimedOut

STDERR_TAIL = 16 * 1024  # bytes of stderr that errors and `Child.stderr_tail` keep
GRACE = 2.0  # seconds between SIGTERM and SIGKILL


class Started(Protocol):
    """A process that ``subprocess`` has started."""

    pid: int
    returncode: int | Any  # None until it is reaped

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Reap the process."""


class Child:
    """A running child process, followed by its pidfd. The module's docstring says who ends it."""

    def __init__(self, process: Started, argv: tuple[str, ...], stderr_fd: int | None) -> None:
        self._process = process
        self._stderr = stderr_fd
        self.argv = argv
        self.pid: int = process.pid
        self.returncode: int | None = None
        self.pidfd: int = -1
        try:
            # not reaped yet, so the PID is still this process
            self.pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            self._close_fds()
            raise

    def __repr__(self) -> str:
        return f"<Child {self.pid} {shlex.join(self.argv)!r} {self.returncode}>"

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal's number) if the child has ended, else None.

        Reaps the child.
        """
        if self.returncode is None:
            try:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                # A waitpid(-1) elsewhere reaped it: its exit code is unknown, and 0 would be wrong.
                self._ended(-1)
                raise CommandFailed(
                    f"{self.argv[0]}: was reaped by other code, its exit code is lost"
                ) from None
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self._ended(result.si_status if exited else -result.si_status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the child ends and return the exit code.

        `TimedOut` after `timeout` seconds; the child is left alone.
        """
        if self.poll() is None:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            deadline = None if timeout is None else time.monotonic() + timeout
            while self.poll() is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(
                        f"{self.argv[0]} (PID {self.pid}) is still running after {timeout:g} s"
                    )
                poller.poll(None if left is None else left * 1000)
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal; does nothing if the child has ended."""
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass  # a zombie that poll() has not reaped yet

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.signal(signal.SIGKILL)

    def end(self, grace: float = GRACE) -> int:
        """Send SIGTERM, after `grace` seconds SIGKILL; return the exit code."""
        self.terminate()
        try:
            return self.wait(grace)
        except TimedOut:
            self.kill()
            return self.wait()

    def stderr_tail(self, size: int = STDERR_TAIL) -> str:
        """Return the last `size` bytes of stderr so far; "" if the caller passed its own stderr."""
        if self._stderr is None:
            return ""
        length = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, size, max(0, length - size)).decode(errors="replace")

    def close(self) -> None:
        """Close the pidfd and stderr of a child that has ended; a running child is left alone."""
        if self.returncode is not None:
            self._close_fds()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.poll() is None:
            self.end()
        self._close_fds()

    def __del__(self) -> None:
        self._close_fds()

    def _ended(self, returncode: int) -> None:
        self.returncode = returncode
        self._process.returncode = returncode  # shows Popen that there is nothing left to reap

    def _close_fds(self) -> None:
        for fd in (self.pidfd, self._stderr):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.pidfd, self._stderr = -1, None


class InterruptsDeferred:
    """Defer signals that raise (``^C``, a handler that raises for SIGTERM) until the block is left.

    An exception in the middle of starting a child would lose the child: it would run, and its PID
    would be unknown. Blocking the signals instead would be inherited by the child. Only the main
    thread runs handlers.
    """

    def __enter__(self) -> Self:
        self._came: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        if threading.current_thread() is threading.main_thread():
            # the last: a freeze is too long
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGURG):
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, signal.Handlers):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def forget(self) -> None:
        """Raise for none of them, also when the block is left, and for none that comes later."""
        self._handlers.clear()
        self._came.clear()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._came:
            self._handlers[number](number, None)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(number)
