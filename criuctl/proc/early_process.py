"""A process that is forked off at the very beginning of a command, loads what takes long to load,
and is asked for it later.

Both ends are this very program.  Each of a fixed number of connections carries one request at a
time, as a pickle behind its length, and its answer alike.  What is large need not be sent if it
lies in memory that both ends have, `Shared`.

The process ends when its end of `Aside.control` closes, and is killed by the kernel when we die.
Signals of a terminal are ours alone to serve.

This module is imported before anything else is, so it imports little; that is all that the process
begins with.
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
_SHARED = 256 << 20  # bytes; nothing is taken of the machine before it is touched
_NORESERVE = 0x4000
_LENGTHS = struct.Struct("=QQ")
_GRACE = 2.0  # seconds in which the process ends by itself
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_waiting: dict[str, Aside] = {}


def begin(module: str) -> None:
    """Fork off a process that loads `module`, where there is room for one; for a process that has
    one thread as yet.
    """
    with suppress(OSError):
        _waiting[module] = Aside(module)


def begun(module: str) -> Aside | None:
    """The process that loads `module`; one that was forked off before, if there is one.  None:
    there is no room for one.
    """
    aside = _waiting.pop(module, None)
    with suppress(OSError):
        aside = aside or Aside(module)
    return aside


def end_waiting() -> None:
    """End those that nobody has asked for."""
    while _waiting:
        _, aside = _waiting.popitem()
        aside.kill()


class Shared:
    """Memory that both ends have."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(
            -1, _SHARED, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
        )
        self._view = memoryview(self._memory)
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview | None:
        """So much of it, which nobody else has from then on, if there is as much left."""
        with self._lock:
            start = self._taken
            end = start + size + -size % mmap.PAGESIZE
            if end > _SHARED:
                return None
            self._taken = end
        return self._view[start : start + size]

    def place(self, view: memoryview) -> slice | None:
        """Where in it this is, which the other end gives to `at`."""
        if view.obj is not self._memory or not view.nbytes:
            return None
        start = syscalls.address_of(view) - syscalls.address_of(self._memory)
        return slice(start, start + view.nbytes)

    def at(self, place: slice) -> memoryview:
        """What is there."""
        return self._view[place]


class Connection:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """For a poll."""
        return self._end.fileno()

    def send(self, value: object, body: Sequence[memoryview] = ()) -> None:
        """One message, and what is behind it."""
        told = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._end.sendall(_LENGTHS.pack(len(told), sum(view.nbytes for view in body)) + told)
        for view in body:
            self._end.sendall(view)

    def receive(self, into: memoryview | None = None) -> tuple[Any, memoryview]:
        """The next message, and what is behind it: in `into`, if that is given and fits.
        `EOFError`: the other end is gone.
        """
        length, behind = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        value = pickle.loads(self._exactly(length))  # noqa: S301  # the other end is this very program
        return value, self._exactly(
            behind, into if into is not None and into.nbytes == behind else None
        )

    def patience(self, seconds: float | None) -> None:
        """`TimeoutError` from a `send` or `receive` in which the other end does nothing for so
        long.
        """
        self._end.settimeout(seconds)

    def waiting(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(select.select([self._end], [], [], 0)[0])

    def close(self) -> None:
        """The other end is told, also if a copy of this end has gone to another process that we
        have forked.
        """
        with suppress(OSError):  # it is gone already
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


class Aside:
    """The process, as the one that has forked it off sees it."""

    def __init__(self, module: str) -> None:
        """Fork it off, in a process that has one thread as yet: ``module.serve(shared, control,
        connections)`` is its life.

        `OSError` where there is no room for it, with nothing left.
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
        """Its PID and a descriptor of it."""
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            pid = os.fork()
            if pid == 0:
                for here, _there in pairs:
                    here.close()
                _be(module, parent, self.shared, [Connection(there) for _here, there in pairs])
            try:
                return pid, os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End it, whatever it is at; `reap` it before the command ends."""
        self.control.close()

    def kill(self) -> None:
        """End it at once, and reap it; for one that has not been asked for anything."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()
        for connection in self.connections:
            connection.close()
        self.reap()

    def reap(self) -> None:
        """See that it has ended, after `close`; once more is no harm."""
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


def _unheard(_number: int, _frame: object) -> None:
    """A signal that the other process serves."""


def _be(module: str, parent: int, shared: Shared, connections: list[Connection]) -> NoReturn:
    """The life of the process."""
    try:
        for number in _OURS:
            # not SIG_IGN, which a program that it starts would inherit
            signal.signal(number, _unheard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # who reads what the command prints must not wait for this process
            os.dup2(null, stream)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            importlib.import_module(module).serve(shared, connections[0], connections[1:])
    except EOFError:  # it is not needed any more
        pass
    finally:
        os._exit(0)
