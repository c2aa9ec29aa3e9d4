"""The keeper of a template: a process that serves the pages of its copies, as long as they live.

It is forked by the criuctl that makes the copies, and outlives it. It has one thread and never
waits for one copy: every userfaultfd and every connection is handled when the kernel reports it.

A copy that could not get its pages must not go on with zeros in their place. So the keeper ends a
copy that it cannot serve; a guardian (`criuctl.proc.guardian`) ends all of them if the keeper is
killed; and both are as unlikely as possible to be chosen when the host runs out of memory.

Messages are described in `criuctl.host.templates`: ``owner`` keeps the keeper alive; ``restore``,
with the number of tasks and the socket that CRIU connects to, introduces a copy, then ``root`` and
``run``; ``fill`` has the memory of those copies completed that are, have or are in one of these
processes. All but ``restore`` are answered by ``done``.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ..cgroups import membership
from ..config import Config
from ..criu.lazy_socket import Received
from ..errors import CriuctlError, NoSuchProcess, RestoreFailed
from ..host.journal import events
from ..host.registry import Registry
from ..host.templates import MESSAGE, folder
from ..proc.folders import make_private
from ..proc.guardian import Guardian, end_tree
from ..proc.own_environment import forget_secrets
from ..proc.served_pages import ServedPages, Source, Span
from ..proc.tree import ProcessIdentity, read_tree
from ..session.names import socket_address

_LOOK = 5.0  # seconds between two looks for processes that have ended
_LOOK_AT_END = 0.02  # the same, once a root has ended, and for how long
_ENDING = 10.0
_MANY = 256  # descriptors after which to look at once
_AGAIN = 0.0005  # seconds until a page is tried again that could not be placed
_NICE = -15  # processes of the copies wait for their pages

Spans = Mapping[int, Sequence[Span]]


def start(config: Config, memory: int, spans: Spans) -> Path:
    """Start a keeper for the memory file; return its socket.

    `spans`: for each task of the images, the pages that it serves.
    """
    place = folder(config)
    make_private(place)
    path = place / f"{os.urandom(8).hex()}.socket"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listening:
        with socket_address(path) as address:
            listening.bind(address)
        try:
            listening.listen(64)
            child = os.fork()
        except BaseException:
            path.unlink()
            raise
        if child == 0:
            _become_keeper(config, listening, path, memory, spans)
        os.waitpid(child, 0)
    return path


def _become_keeper(
    config: Config, listening: socket.socket, path: Path, memory: int, spans: Spans
) -> NoReturn:
    """Leave the caller's session, terminal, unit and descriptors behind, and serve."""
    code = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        kept = {0, 1, 2, memory, listening.fileno()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with suppress(OSError):  # the listing's own descriptor
                    os.close(int(name))
        gc.disable()
        forget_secrets()
        with suppress(OSError):
            os.nice(_NICE)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("-1000")
        with suppress(OSError, CriuctlError):
            membership.leave_unit({os.getpid(): ""})
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        mapped = mmap.mmap(memory, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(memory)
        _Keeper(config, listening, path, Source(memoryview(mapped)), spans).run()
        code = 0
    finally:
        with suppress(OSError):
            path.unlink()
        os._exit(code)


class _Copy:
    """One copy: the connection of its restore until it runs, then its processes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection: socket.socket | None = connection
        self.root: ProcessIdentity | None = None
        self.runs = False
        self.received: Received | None = None
        self.spaces: list[ServedPages] = []
        self.asked_to_fill: list[socket.socket] = []
        self.pidfd = -1  # of its root
        self.ends_until = 0.0  # monotonic: until then its processes are about to end

    def concerns(self, pids: set[int]) -> bool:
        """Return whether one of these is a process of the copy, or above it."""
        if self.root is None or not self.root.alive():
            return False
        return self.root.pid in pids or not pids.isdisjoint(
            process.pid for process in read_tree(self.root.pid)
        )


class _Keeper:
    """The event loop, and the copies."""

    def __init__(
        self, config: Config, listening: socket.socket, path: Path, source: Source, spans: Spans
    ) -> None:
        self._config, self._listening, self._path = config, listening, path
        self._source, self._spans = source, spans
        self._copies: list[_Copy] = []
        self._poller = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._others: set[socket.socket] = set()  # connections that are no copy's
        self._expected = True  # the first connection has not come yet
        self._looked_at = 0  # address spaces after the last look
        self._guardian = Guardian(self._killed)
        self._watch(listening.fileno(), self._accept)
        self._watch(self._guardian.pidfd, self._guard_again)

    def run(self) -> None:
        """Serve until no copy and no connection is left."""
        while self._expected or self._copies or self._others:
            busy = any(copy.asked_to_fill for copy in self._copies)
            waits = any(space.waits for copy in self._copies for space in copy.spaces)
            ends = any(copy.ends_until > time.monotonic() for copy in self._copies)
            pause = 0.0 if busy else _AGAIN if waits else _LOOK_AT_END if ends else _LOOK
            ready = self._poller.poll(pause)
            for number, _event in ready:
                if (handle := self._ready.get(number)) is not None:
                    handle()
            spaces = sum(len(copy.spaces) for copy in self._copies)
            if (not ready and pause >= _LOOK_AT_END) or spaces > 2 * self._looked_at + _MANY:
                self._look()
            for copy in list(self._copies):
                self._go_on(copy)
        self._guardian.dismiss()

    def _watch(self, number: int, handle: Callable[[], None]) -> None:
        self._ready[number] = handle
        self._poller.register(number, select.EPOLLIN)

    def _forget(self, number: int) -> None:
        if self._ready.pop(number, None) is not None:
            with suppress(OSError):
                self._poller.unregister(number)

    def _guard_again(self) -> None:
        """Start another guardian: this one was killed."""
        self._forget(self._guardian.pidfd)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._guardian.pidfd, os.WEXITED)
        self._guardian.start()
        self._watch(self._guardian.pidfd, self._guard_again)

    # -- messages ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = self._listening.accept()[0]
        self._expected = False
        self._others.add(connection)
        self._watch(connection.fileno(), lambda: self._heard(connection))

    def _heard(self, connection: socket.socket) -> None:
        """Handle a message, or the end, of a connection."""
        fds: list[int] = []
        try:
            data, fds, _flags, _address = socket.recv_fds(connection, MESSAGE, 1)
            said = json.loads(data) if data else None
        except (OSError, ValueError):
            said = None
        copy = next((one for one in self._copies if one.connection is connection), None)
        try:
            if said is None:
                self._hung_up(connection, copy)
            elif "restore" in said and fds and copy is None:
                self._introduced(connection, socket.socket(fileno=fds.pop()), said["restore"])
            elif "root" in said and copy is not None:
                copy.root = ProcessIdentity(*said["root"])
                self._guardian.add(copy.root)
                _answer(connection)
            elif "run" in said and copy is not None:
                copy.runs = True
                self._await(copy)
                _answer(connection)
            elif "fill" in said:
                self._asked_to_fill(connection, set(said["fill"]))
            else:
                _answer(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _hung_up(self, connection: socket.socket, copy: _Copy | None) -> None:
        self._forget(connection.fileno())
        self._others.discard(connection)
        for one in self._copies:
            if connection in one.asked_to_fill:
                one.asked_to_fill.remove(connection)
        connection.close()
        if copy is not None:
            copy.connection = None
            if not copy.runs:
                self._drop(copy, end=True)

    def _introduced(self, connection: socket.socket, listening: socket.socket, tasks: int) -> None:
        """A restore has begun: wait for CRIU's tasks."""
        copy = _Copy(connection)
        self._others.discard(connection)
        self._copies.append(copy)

        def connected() -> None:
            theirs = listening.accept()[0]
            self._forget(listening.fileno())
            listening.close()
            copy.received = Received(theirs, tasks)
            self._watch(theirs.fileno(), lambda: self._tasks(copy, theirs))

        self._watch(listening.fileno(), connected)

    def _tasks(self, copy: _Copy, theirs: socket.socket) -> None:
        """Take the userfaultfds that CRIU has sent."""
        assert copy.received is not None
        try:
            for pid, fd in copy.received.tasks():
                self._add(copy, ServedPages(fd, self._spans.get(pid, ()), self._source))
            over = copy.received.over()
        except RestoreFailed:  # the restore itself reports it
            over = True
        if over:
            self._forget(theirs.fileno())
            theirs.close()

    def _await(self, copy: _Copy) -> None:
        """Notice the end of a copy's root; other processes of the copy may live on."""

        def ended() -> None:
            self._forget(copy.pidfd)
            copy.ends_until = time.monotonic() + _ENDING

        assert copy.root is not None
        try:
            copy.pidfd = copy.root.open_pidfd()
        except NoSuchProcess:
            copy.ends_until = time.monotonic() + _ENDING
        else:
            self._watch(copy.pidfd, ended)

    def _asked_to_fill(self, connection: socket.socket, pids: set[int]) -> None:
        found = [copy for copy in self._copies if copy.concerns(pids)]
        for copy in found:
            copy.asked_to_fill.append(connection)
        if not found:
            _answer(connection)

    # -- pages ------------------------------------------------------------------------------------

    def _add(self, copy: _Copy, space: ServedPages) -> None:
        copy.spaces.append(space)
        self._watch(space.fd, lambda: self._serve(copy, space))

    def _serve(self, copy: _Copy, space: ServedPages) -> None:
        try:
            for child in space.serve():
                self._add(copy, child)
        except OSError as error:  # no memory, for example
            self._lost(copy, error)

    def _go_on(self, copy: _Copy) -> None:
        """Do what is left to do for a copy."""
        try:
            for space in list(copy.spaces):
                if space.waits:
                    self._serve(copy, space)
                if copy.asked_to_fill and not space.done:
                    space.fill()
        except OSError as error:
            self._lost(copy, error)
        for space in [one for one in copy.spaces if one.done and copy.runs]:
            copy.spaces.remove(space)
            self._forget(space.fd)
            space.close()
        if copy.runs and not copy.spaces:
            self._drop(copy, end=False)

    def _look(self) -> None:
        """Notice processes that have ended."""
        for copy in self._copies:
            for space in copy.spaces:
                space.look()
        self._looked_at = sum(len(copy.spaces) for copy in self._copies)

    def _lost(self, copy: _Copy, error: OSError) -> None:
        """End a copy that cannot get its memory."""
        self._report([copy.root] if copy.root is not None else [], error.strerror or str(error))
        self._drop(copy, end=True)

    def _drop(self, copy: _Copy, *, end: bool) -> None:
        """Serve a copy no more; `end` it before, if it does not have all of its memory."""
        if copy not in self._copies:
            return
        self._copies.remove(copy)
        if copy.pidfd >= 0:
            self._forget(copy.pidfd)
            os.close(copy.pidfd)
        if copy.root is not None:
            if end:
                end_tree(copy.root)
            self._guardian.remove(copy.root)
        for space in copy.spaces:
            self._forget(space.fd)
            space.close()
        for connection in copy.asked_to_fill:
            _answer(connection)  # it is complete, or has ended
        if copy.connection is not None:  # other messages may come
            self._others.add(copy.connection)

    def _killed(self, trees: Sequence[ProcessIdentity]) -> None:
        """Clean up, in the guardian of a keeper that was killed."""
        self._path.unlink(missing_ok=True)
        self._report(trees, "the process that kept their template was killed")

    def _report(self, trees: Sequence[ProcessIdentity], why: str) -> None:
        """Record that these copies were ended."""
        registry = Registry(self._config)
        for tree in trees:
            facts: dict[str, Any] = {"pid": tree.pid, "exit_code": 137, "error": "template-lost"}
            if (record := registry.find(tree)) is not None:
                facts |= {"session": record.name, "session_id": record.id}
            events.record(self._config, "template", [facts | {"why": why}])


def _answer(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end is gone
        connection.sendall(b'{"done": true}')
