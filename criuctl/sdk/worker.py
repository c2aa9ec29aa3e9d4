"""The warm process in which trees are started, dumped, restored and moved.

Such an operation owns the signals of its process and the children that it starts (`proc.forked`),
and a program that uses this package may have threads, an event loop and signal handlers of its own.
So another process, `worker_process`, does the work. It is started once, when the first session is
opened by an administrator, imports what the operations need, and forks for each of them: an
operation costs no start of an interpreter, and several can be under way.

It gets this process's environment, with the operator that asks, current folder and umask with each
request. It ends when this
process does, however that ends: operations that are under way are then interrupted as by ``^C``,
and undone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..config import Config
from ..errors import CommandFailed
from ..ops.scheduling import batch
from ..proc import command
from ..proc.child import Child
from ..proc.forked import Ended
from ..proc.procfs import umask
from ..report import Reporter
from ..session.client import caller

_PROGRAM = "criuctl.sdk.worker_process"


class _Worker:
    """The process, and the socket over which it gets requests."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child: Child = command.spawn(
                [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": os.pathsep.join(_places())},
                cwd="/",
                new_session=True,
            )

    def ask(self, request: bytes) -> socket.socket:
        """Send a request; return the socket on which the answer comes."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            ours.sendall(request)
        except BaseException:
            ours.close()
            raise
        return ours

    def why(self) -> str:
        """Return the last line that it has printed."""
        said = self._child.stderr_tail().strip().splitlines()
        return said[-1] if said else "it said nothing"

    def close(self) -> None:
        """End it, and wait for that."""
        self._control.close()
        with suppress(CommandFailed):  # other code of this process has reaped it
            self._child.wait()
        self._child.close()


_lock = threading.Lock()
_worker: _Worker | None = None


def prepare() -> _Worker:
    """Start the process, if it does not run, without waiting for it."""
    global _worker
    with _lock:
        if _worker is None:
            _worker = _Worker()
        return _worker


def close() -> None:
    """End the process, if it runs; a later operation starts another one."""
    global _worker
    with _lock:
        ended, _worker = _worker, None
    if ended is not None:
        ended.close()


def perform(operation: str, config: Config, **arguments: Any) -> dict[str, Any]:
    """Perform an operation of `worker_process`; return its result, or raise its error.

    An exception that comes meanwhile (``^C``) interrupts the operation, and is raised when that has
    cleaned up.
    """
    actor = caller.current()
    request = {
        "operation": operation,
        "config": msgspec.to_builtins(config),
        "arguments": arguments,
        "environment": dict(os.environ) | ({} if actor is None else caller.variables(actor)),
        "cwd": _here(),
        "umask": umask(),
    }
    answered, used = _asked(json.dumps(request).encode() + b"\n")
    with answered, answered.makefile("rb") as file:
        try:
            said = file.readline()
        except BaseException:
            answered.shutdown(socket.SHUT_WR)  # interrupt it
            file.readline()
            raise
    if not said:
        raise CommandFailed(f"the process that works for this one has ended: {used.why()}")
    ended = Ended(operation, **json.loads(said))
    outcome = batch.outcome_of(ended, Reporter(), broken=CommandFailed)
    if outcome.error is not None:
        if ended.bug:
            outcome.error.add_note(ended.bug)
        raise outcome.error
    assert outcome.answer is not None
    return outcome.answer


def _asked(request: bytes) -> tuple[socket.socket, _Worker]:
    """Send a request; start another process, once, if it has ended since."""
    for again in (True, False):
        used = prepare()
        try:
            return used.ask(request), used
        except OSError as error:
            if not again:
                raise CommandFailed(
                    f"the process that works for this one has ended: {used.why()}"
                ) from error
            _forget(used)
    raise AssertionError


def _forget(used: _Worker) -> None:
    """Reap a process that has ended."""
    global _worker
    with _lock:
        if _worker is used:
            _worker = None
            used.close()


def _places() -> dict[str, None]:
    """Return where this process finds modules: the other one has to find the same ones."""
    own = str(Path(__file__).parents[2])
    return dict.fromkeys([own, *(os.path.abspath(path) for path in sys.path if path)])


def _here() -> str | None:
    """Return the current folder; None: it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
