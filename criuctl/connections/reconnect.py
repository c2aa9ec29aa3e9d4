"""The reconnect engine: many connections at a time are connected again, each within its
deadline.

The tree is held meanwhile, so a try changes nothing that it could see: the socket is borrowed for
the try, connected, given to its application protocol, and let go. Between tries nothing is borrowed
and no thread waits: a connection whose peer is away goes back into a queue that is ordered by time
(exponential backoff with jitter), so that a hundred dead peers do not delay a living one.
Connections that cannot be made in time, or not at all, are hung up here as well.

A unix stream can be connected only once in its life. So before the first of those to one server,
its protocol is rehearsed on a separate socket until that does not end in `PeerAway`: a server that
accepts connections but reports that it is still starting up does not cost the program its socket.

No thread outlives `Engine.run`, however it ends: threads under way are woken (`dialling.connect`
watches a descriptor, all others find their socket shut down). A thread that hangs nevertheless is a
daemon thread on a dead socket.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.connection_record import ConnectionRecord, endpoint
from ..errors import CriuctlError
from ..proc import connecting, namespace_sockets
from ..proc.credentials import Credentials, acting_as
from .protocols.base import ApplicationProtocol, CannotRebuild, PeerAway, Settings

_WORKERS = 256  # tries at a time; each holds a descriptor or two
# seconds for one try, so that a silent peer is tried again
_TRY = 10.0
# seconds of them for connecting, so that hosts that are off do not occupy all workers
_DIAL = 4.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_GRACE = 2.0  # seconds that a try may take to notice that time is over
_NAMES_KEPT = 5.0  # seconds for which the addresses of a name are reused

_SHORTAGE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})  # shortages on this host
_AWAY = _SHORTAGE | {
    getattr(errno, name)
    for name in (
        *(
            "ECONNREFUSED",
            "ECONNRESET",
            "ECONNABORTED",
            "ETIMEDOUT",
            "EHOSTUNREACH",
            "EHOSTDOWN",
            "ENETUNREACH",
            "ENETDOWN",
        ),
        *("ENETRESET", "EADDRNOTAVAIL", "EAGAIN", "EINTR", "ENOENT", "ENOBUFS", "EPIPE"),
    )
}


class Job(Struct, frozen=True):
    """One connection to connect again."""

    record: ConnectionRecord
    protocol: ApplicationProtocol | None  # None: only connect
    settings: Settings
    seconds: float  # until it must be connected
    # the program's socket, restored unconnected; the caller closes it
    borrow: Callable[[], socket.socket]
    pid: int = 0  # a process that holds it, as criuctl sees it: paths are resolved in its view
    # of the restored process: the connection gets no more rights than these
    user: Credentials | None = None


class Result(Struct, frozen=True):
    """The outcome; a connection that is not `connected` is hung up."""

    connected: bool
    reason: str = ""
    attempts: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)  # of the application protocol
    hint: str = ""  # a remedy, if one is known


class _State(Struct):
    """The progress of a job."""

    job: Job
    number: int
    deadline: float
    attempts: int = 0
    last: str = "it was not tried"
    hint: str = ""
    borrowed: socket.socket | None = None  # while a try is under way
    result: Result | None = None

    def failed(self, reason: str, hint: str = "") -> None:
        """Record why the current try failed; a try that was cut off by the deadline has a less
        useful reason than the one before.
        """
        if self.attempts == 1 or time.monotonic() < self.deadline:
            self.last, self.hint = reason, hint


class Engine:
    """Connects all `jobs` again at the same time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.began = time.monotonic()
        self.states = [
            _State(job, number, self.began + job.seconds) for number, job in enumerate(jobs)
        ]
        self._changed = threading.Condition()
        self._due = [(self.began, number) for number in range(len(self.states))]  # a heap
        self._open = len(self.states)  # without a result
        self._stopped = False
        self._names: dict[tuple[str, int, int], tuple[float, list[connecting.Address]]] = {}
        self._random = random.SystemRandom()
        self._rehearsed: set[str] = set()
        self._rehearsal = threading.Lock()

    def run(self) -> list[Result]:
        """Return the results, in the order of the jobs. A signal ends it early, by its
        exception.
        """
        if not self.states:
            return []
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
        count = min(len(self.states), _WORKERS)
        workers: list[threading.Thread] = []
        try:
            for number in range(count):
                worker = threading.Thread(
                    target=self._work, name=f"criuctl-reconnect-{number}", daemon=True
                )
                try:
                    worker.start()
                except RuntimeError:  # no more threads can be made: fewer are enough
                    if workers:
                        break
                    raise
                workers.append(worker)
            latest = max(state.deadline for state in self.states) + _GRACE
            with self._changed:
                self._changed.wait_for(lambda: not self._open, max(0.0, latest - time.monotonic()))
        finally:
            self._stop(workers)
        return [state.result or self._forsaken(state) for state in self.states]

    def _stop(self, workers: Sequence[threading.Thread]) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            os.eventfd_write(self._cancel, 1)
            for state in self.states:
                if state.borrowed is not None and state.result is None:
                    with contextlib.suppress(OSError):
                        state.borrowed.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _GRACE
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
        if not any(worker.is_alive() for worker in workers):
            os.close(self._cancel)

    def _forsaken(self, state: _State) -> Result:
        """Abandon a try that did not end: its socket is dead."""
        with contextlib.suppress(OSError), state.job.borrow() as sock:
            connecting.hang_up(sock)
        return self._result(state, "its application protocol did not come to an end")

    # -- workers ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (state := self._next()) is not None:
            pause = self._try(state)
            with self._changed:
                state.borrowed = None
                if pause is not None and not self._stopped:
                    heapq.heappush(self._due, (time.monotonic() + pause, state.number))
                else:
                    self._open -= 1
                self._changed.notify_all()

    def _next(self) -> _State | None:
        with self._changed:
            while not self._stopped and self._open:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return self.states[heapq.heappop(self._due)[1]]
                self._changed.wait(wait)
        return None

    def _try(self, state: _State) -> float | None:
        """Make one attempt; return the seconds until the next one, or None when there is a
        result.
        """
        state.attempts += 1
        job = state.job
        try:
            with job.borrow() as sock:
                with self._changed:
                    state.borrowed = sock
                try:
                    connecting.disconnect(sock)
                    self._rehearse(state, sock, min(state.deadline, time.monotonic() + _TRY))
                    facts = self._connect(job, sock, min(state.deadline, time.monotonic() + _TRY))
                    with self._changed:
                        self._go_on()
                        state.result = self._result(state, "", facts)
                    return None
                except (PeerAway, OSError) as error:
                    state.failed(_reason(error), getattr(error, "hint", ""))
                    pause = (
                        self._pause(state)
                        if isinstance(error, PeerAway) or error.errno in _AWAY
                        else None
                    )
                    if pause is not None and not _spent(sock):
                        connecting.disconnect(sock)
                        return pause
                except CannotRebuild as error:
                    state.failed(error.message, error.hint)
                except connecting.Cancelled:
                    return None
                # a protocol's bug fails its own connection, not the restore
                except Exception as error:
                    state.last = f"{type(error).__name__}: {error}"
                connecting.hang_up(sock)
                with self._changed:
                    state.borrowed = None
        except OSError as error:
            state.last = f"its socket cannot be reached: {_reason(error)}"
            if error.errno in _SHORTAGE and (pause := self._pause(state)) is not None:
                return pause
        except CriuctlError as error:
            state.last = error.message
        state.result = self._result(state, state.last)
        return None

    def _go_on(self) -> None:
        """Raise `Cancelled` once the run is over: a late thread must not touch a program
        that runs.
        """
        if self._stopped:
            raise connecting.Cancelled

    def _result(self, state: _State, reason: str, facts: dict[str, Any] | None = None) -> Result:
        seconds = round(time.monotonic() - self.began, 3)
        return Result(
            not reason, reason, state.attempts, seconds, facts or {}, state.hint if reason else ""
        )

    def _pause(self, state: _State) -> float | None:
        left = state.deadline - time.monotonic()
        pause = min(
            _LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(state.attempts - 1, 10)
        ) * self._random.uniform(0.75, 1.25)
        return min(pause, max(0.0, left - 0.05)) if left > 0.1 else None

    def _connect(self, job: Job, sock: socket.socket, deadline: float) -> dict[str, Any]:
        """Connect and set up; raise for every failure."""
        if not getattr(job.protocol, "connects", False):
            self._dial(job, sock, deadline)
        if job.protocol is None:
            return {}
        facts = job.protocol.reconnect(
            sock, job.record, replace(job.settings, process=job.pid), deadline
        )
        return facts if isinstance(facts, dict) else {}

    def _rehearse(self, state: _State, sock: socket.socket, deadline: float) -> None:
        """Check on a separate socket that the server is ready; raise for errors that are worth
        another try.
        """
        job = state.job
        if sock.family != socket.AF_UNIX or sock.type == socket.SOCK_DGRAM or job.protocol is None:
            return
        if getattr(job.protocol, "connects", False) or (
            job.protocol.name == "tcp" and not job.settings.options
        ):
            return
        if not self._rehearsal.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerAway(f"{job.record.peer} does not answer")
        try:
            if job.record.peer in self._rehearsed:
                return
            # an abstract name is a different server in another net namespace
            with namespace_sockets.socket_in_same_namespace(sock) as own:
                with self._changed:
                    state.borrowed = own
                self._dial(job, own, deadline)
                # the program's own socket will find that out
                with contextlib.suppress(CannotRebuild):
                    job.protocol.reconnect(
                        own, job.record, replace(job.settings, process=job.pid), deadline
                    )
                _leave(own)
            self._rehearsed.add(job.record.peer)
        finally:
            with self._changed:
                state.borrowed = sock
            self._rehearsal.release()

    def _dial(self, job: Job, sock: socket.socket, deadline: float) -> None:
        record = job.record
        if sock.family == socket.AF_UNIX:
            name = connecting.spelled(record.peer)
            self._go_on()
            # The listener sees the credentials of the connecting process (SO_PEERCRED), and the
            # kernel checks its permission.
            if name is not None:
                with acting_as(job.user):
                    connecting.connect(sock, name, deadline, self._cancel)
                return
            target = connecting.inside_root(job.pid, record.peer, job.user)
            try:
                with acting_as(job.user):
                    connecting.connect(sock, f"/proc/self/fd/{target}", deadline, self._cancel)
            finally:
                os.close(target)
            return
        host, port = endpoint(record.peer)
        addresses = self._addresses(record.host or host, port, sock.family)
        for number, address in enumerate(addresses, 1):
            try:
                # The last address may take all the time that is left, the others an equal share of
                # it.
                self._go_on()
                share = (deadline - time.monotonic()) / (len(addresses) - number + 1)
                connecting.connect(
                    sock, address, time.monotonic() + min(share, _DIAL), self._cancel
                )
                return
            except OSError:
                if number == len(addresses):
                    raise
                connecting.disconnect(sock)

    def _addresses(self, host: str, port: int, family: int) -> list[connecting.Address]:
        """Return the peer's addresses, newly resolved, but not separately for every connection."""
        key = (host, port, family)
        known = self._names.get(key)
        if known is None or time.monotonic() - known[0] > _NAMES_KEPT:
            try:
                known = time.monotonic(), connecting.hosts_of(host, port, family, 0)
            except socket.gaierror as error:
                raise PeerAway(f"the name {host} is not known: {error.strerror}") from error
            self._names[key] = known
        return known[1]


def _spent(sock: socket.socket) -> bool:
    """Return whether it is a unix stream whose one connect is used up."""
    if sock.family != socket.AF_UNIX or sock.type == socket.SOCK_DGRAM:
        return False
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _leave(own: socket.socket) -> None:
    """Close this connection and wait until the server has closed it too: its resources there are
    free again for the program.
    """
    own.shutdown(socket.SHUT_WR)
    poller = select.poll()
    poller.register(own, select.POLLIN)
    until = time.monotonic() + 1
    while poller.poll(max(0.0, until - time.monotonic()) * 1000) and own.recv(
        1 << 16, socket.MSG_DONTWAIT
    ):
        pass


def _reason(error: PeerAway | OSError) -> str:
    return error.message if isinstance(error, PeerAway) else (error.strerror or str(error))
