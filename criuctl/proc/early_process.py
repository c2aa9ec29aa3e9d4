"""A process that is forked at the start of a command, loads slow modules, and is used later.

Both ends run this program. Each of a fixed number of connections carries one request at a time. A
request and its answer are pickles, each after its length. Large data need not be sent if it lies in
memory that both ends share, `Shared`.

The process ends when its end of `EarlyProcess.control` closes, and the kernel kills it when we die.
Only we handle the terminal's signals.

This module is imported before all others, so it imports little: that is all that the process starts
with.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from . import syscalls

_CONNECTIONS = 24  # requests at once
_SHARED = 256 << 20  # bytes; memory is used only when it is touched
_NORESERVE = 0x4000
_LENGTHS = struct.Struct("=QQ")
_GRACE = 2.0  # seconds that the process may take to end by itself
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_waiting: dict[str, EarlyProcess] = {}


def begin(module: str) -> None:
    """Fork a process that loads `module`, if there are resources for one.

    Only for a process with a single thread.
    """
    with suppress(OSError):
        _waiting[module] = EarlyProcess(module)


def obtain(module: str) -> EarlyProcess | None:
    """Return the process that loads `module`, forked now or before.

    None without resources for it.
    """
    process = _waiting.pop(module, None)
    with suppress(OSError):
        process = process or EarlyProcess(module)
    return process


def end_waiting() -> None:
    """End the processes that were never used."""
    while _waiting:
        _, process = _waiting.popitem()
        process.kill()


class Shared:
    """Memory that both ends share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(
            -1, _SHARED, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
        )
        self._view = memoryview(self._memory)
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview | None:
        """Reserve so many bytes for the caller; None if less is left."""
        with self._lock:
            start = self._taken
            end = start + size + -size % mmap.PAGESIZE
            if end > _SHARED:
                return None
            self._taken = end
        return self._view[start : start + size]

    def place(self, view: memoryview) -> slice | None:
        """Return the position of `view` in it, which the other end passes to `at`."""
        if view.obj is not self._memory or not view.nbytes:
            return None
        start = syscalls.address_of(view) - syscalls.address_of(self._memory)
        return slice(start, start + view.nbytes)

    def at(self, place: slice) -> memoryview:
        """Return the memory at this position."""
        return self._view[place]


class Connection:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._end.fileno()

    def send(self, value: object, body: Sequence[memoryview] = ()) -> None:
        """Send one message and the bytes that follow it."""
        message = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._end.sendall(_LENGTHS.pack(len(message), sum(view.nbytes for view in body)) + message)
        for view in body:
            self._end.sendall(view)

    def receive(self, into: memoryview | None = None) -> tuple[Any, memoryview]:
        """Receive the next message and its bytes: in `into`, if that is given and they fit.

        `EOFError`: the other end is gone.
        """
        length, behind = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        value = pickle.loads(self._exactly(length))  # noqa: S301  # the other end is this very program
        return value, self._exactly(
            behind, into if into is not None and into.nbytes == behind else None
        )

    def patience(self, seconds: float | None) -> None:
        """Make `send` and `receive` raise `TimeoutError` if the other end does nothing for so
        long.
        """
        self._end.settimeout(seconds)

    def close(self) -> None:
        """Close the connection for the other end, also if a process that we forked has a copy."""
        with suppress(OSError):  # it is closed already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int, into: memoryview | None = None) -> memoryview:
        view, done = into if into is not None else memoryview(bytearray(size)), 0
        while done < size:
            count = self._end.recv_into(view[done:])
            if not count:
                raise EOFError
            done += count
        return view


class EarlyProcess:
    """The forked process, as its parent sees it."""

    def __init__(self, module: str) -> None:
        """Fork it; the process must have a single thread. It runs ``module.serve``.

        With the arguments ``shared, control, connections``. `OSError` without resources for it;
        then nothing is left behind.
        """
        self.shared = Shared()
        with ExitStack() as failed:
            pairs: list[tuple[socket.socket, socket.socket]] = []
            for _ in range(1 + _CONNECTIONS):
                pairs.append(socket.socketpair())
                failed.callback(pairs[-1][0].close)
                failed.callback(pairs[-1][1].close)
            self.pid, self._pidfd = self._fork(module, pairs)
            failed.pop_all()
        for _here, there in pairs:
            there.close()
        self.control, *self.connections = [Connection(here) for here, _there in pairs]

    def _fork(
        self, module: str, pairs: Sequence[tuple[socket.socket, socket.socket]]
    ) -> tuple[int, int]:
        """Return its PID and a descriptor of it."""
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                for here, _there in pairs:
                    here.close()
                _child_main(
                    module, parent, self.shared, [Connection(there) for _here, there in pairs]
                )
            try:
                return pid, os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End it, whatever it does; `reap` it before the command ends."""
        self.control.close()

    def kill(self) -> None:
        """End it at once, and reap it; for a process that was never used."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()
        for connection in self.connections:
            connection.close()
        self.reap()

    def reap(self) -> None:
        """Wait for its end, after `close`; may be called repeatedly."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd < 0:
            return
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(_GRACE * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(pidfd)


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal that the other process handles."""


def _child_main(
    module: str, parent: int, shared: Shared, connections: list[Connection]
) -> NoReturn:
    """Run the process; never returns."""
    try:
        for number in _TERMINAL_SIGNALS:
            # not SIG_IGN, which a program that it starts would inherit
            signal.signal(number, _ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # a reader of the command's output must not wait for this process
            os.dup2(null, stream)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            importlib.import_module(module).serve(shared, connections[0], connections[1:])
    except EOFError:  # it was not used, and the command ends
        pass
    finally:
        os._exit(0)
