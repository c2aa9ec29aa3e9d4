"""The holder: one small process per session, outside its tree, that owns terminal, output log and socket.

It starts the tree (or waits for one that a restore gives it), reads the terminal into the log whether or not anybody
looks, serves any number of clients (`requests` has the operations), reaps, and keeps the exit status until
somebody collected it, and in its state file for longer.  One thread, nothing blocks but a freeze; it
imports little, because there is one for every session.

State: ``running`` · ``paused`` (frozen by an operator) · ``checkpointed`` (the tree is in a store, and may come back
here) · ``exited`` · ``lost`` (the tree ended in a way nobody saw).  Every change is an event and is in the state file.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ... import __version__
from ...proc.syscalls import set_child_subreaper
from ...proc.tree import ProcessIdentity
from .. import names, protocol
from ..screen.modes import Modes
from . import cgroup, status_report
from .audit_log import AuditLog
from .connection import Connection, Wait
from .event_loop import HANGUP, READ, WRITE, Loop
from .lease_timer import Leasing
from .master import Chunk, Master
from .operators import Authority
from .output_log import OutputLog
from .processes import Tree, exit_code, reap
from .root_watch import RootWatch
from .terminal_queries import TERMINAL, Queries
from .timeline import Timeline

_MAX_CONNECTIONS = 256
_REMEMBERED_EVENTS = 1000
_ACCEPT_PAUSE = 0.2  # seconds until a client is taken again after one could not be
_TOGETHER = 100.0  # seconds; systemd waits for 90 s before it kills
DEFAULT_LINGER = 3600.0  # seconds that a status nobody collected keeps the holder
EXPECTED = 60.0  # seconds for a restore to come to the holder that it has started


@dataclass
class Identity:
    """Who the session is; all of it survives re-exec and restore."""

    name: str
    id: str
    incarnation: int = 1
    command: list[str] = field(default_factory=list)
    created: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    restored: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Holder:
    """Everything that one holder process knows and does; made by `starting` or by `reexec`."""

    def __init__(
        self, identity: Identity, run_folder: Path, state_folder: Path, log: OutputLog, modes: Modes, audit: AuditLog
    ) -> None:
        from .checkpointing import Checkpointing
        from .requests import Requests
        from .self_fence import DeadMan

        self.identity, self.run_folder, self.state_folder = identity, run_folder, state_folder
        self.loop = Loop()
        self.log, self.modes = log, modes
        self.audit = audit
        self.timeline = Timeline(state_folder / "timeline", log.end, identity.id)
        self.authority = Authority()
        self.master = Master(self.loop, log, modes)
        self.master.on_output = self._on_output
        self.master.on_begun = self._on_input_begun
        self.master.on_written = self._on_input_written
        self.master.on_broken = self._on_terminal_gone
        # Two homes of one session may share a kernel (containers, a copy that is not ended yet): each has a group of its own.
        place = os.stat(run_folder)
        self.tree = Tree(cgroup.create(f"{identity.name}-{identity.id[:8]}-{place.st_dev:x}-{place.st_ino:x}"))
        self.state, self.since = "checkpointed", time.time()
        self.exit: tuple[int | None, int | None] = (None, None)  # code, signal
        self.collected = False
        self.asked = float("-inf")  # when SIGTERM came
        self.paused_by: dict[str, Any] | None = None
        self.halted = False  # by `halt`, until `resume`
        self.input_offset = 0  # where the output stood when something was typed last
        self.checkpoint_id = ""
        self.moved: dict[str, Any] | None = None  # to which host, once the session goes on there
        self.linger = DEFAULT_LINGER
        self.expecting = False  # made for a restore that has not brought its tree yet
        self.forsaken = False  # and never will
        self.sequence = 0
        self.events: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED_EVENTS)
        self.connections: dict[int, Connection] = {}
        self.waits: list[Wait] = []
        self.kills = 0  # under way
        self.helpers: dict[int, Callable[[int], None]] = {}  # PID -> what to call with its wait status
        self.listener: socket.socket | None = None
        self.leasing = Leasing(self)
        self.checkpointing = Checkpointing(self)
        self.deadman = DeadMan(self)
        self.requests = Requests(self)
        self.queries = Queries(self)
        self.root_watch = RootWatch(self)
        self.master.on_released = self.queries.go_on
        self._wake: tuple[int, int] = (-1, -1)

    # -- life -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Become fit to be a parent: reaper of orphans, told of ended children, untouched by a terminal's signals."""
        set_child_subreaper(True)
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.watch_term()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        self.loop.watch(self._wake[0], READ, self._on_child)

    def watch_term(self) -> None:
        """Be asked to end by SIGTERM."""

        def asked(_number: int, _frame: FrameType | None) -> None:
            self.asked = time.monotonic()  # at once: what ends at the same time is to know of it
            self.loop.soon(self._on_term)

        signal.signal(signal.SIGTERM, asked)

    def listen(self) -> None:
        """Take clients."""
        path = self.run_folder / "socket"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            with names.socket_address(path) as address:
                listener.bind(address)
        finally:
            os.umask(before)
        listener.listen(64)
        self.take_listener(listener)

    def take_listener(self, listener: socket.socket) -> None:
        """Take clients from a socket that listens already."""
        self.listener = listener
        self.loop.watch(listener.fileno(), READ, self._on_accept)

    def own(self, root: ProcessIdentity, master: int) -> None:
        """The tree of `root` is the session's, `master` (-1: it has none) its terminal."""
        self.tree.root = root
        self.root_watch.begin()
        if master >= 0:
            self.master.open(master)
            self.timeline.event("resize", self.log.end, {"rows": self.master.rows, "cols": self.master.cols})

    def move_in(self) -> None:
        """The session stands: its files take the places of what an earlier one, or its own last life, has left."""
        beginning = self.log.path.parent
        if beginning.name != names.BEGINNING:
            return
        if self.state_folder == beginning:
            self.state_folder = beginning.parent
            self.timeline.move(self.state_folder)
            self.audit.move(self.state_folder)
        self.log.move(self.state_folder)
        with suppress(OSError):  # something else is in it, which the next beginning clears away
            beginning.rmdir()

    def run(self) -> None:
        """Serve until told to end; afterwards only the state file, the output and the audit log are left."""
        gc.collect()
        gc.freeze()
        self.write_state()
        self._on_child(0)  # whoever ended before we could be told
        self.loop.run()
        for connection in list(self.connections.values()):
            connection.closing = True
            connection.pump()
            connection.close("the holder ends")
        (self.run_folder / "socket").unlink(missing_ok=True)
        # Who lives outside of it, a CRIU that rolls back, say, needs no group.
        if self.tree.group is not None and not self.tree.group.pids():
            self.tree.group.remove()
        self.master.close()
        self.log.close()
        if self.expecting and self.log.path.parent.name == names.BEGINNING:
            # Its tree has never come; before the name is free, under which another may begin.
            with suppress(OSError):
                names.clear(self.log.path.parent)
        self.write_state(ended=True)

    # -- what others are told ---------------------------------------------------------------------

    def emit(self, event: str, **facts: Any) -> None:
        """Tell every subscriber, and remember for those who come back."""
        self.sequence += 1
        head = {"event": event, "sequence": self.sequence, "time": round(time.time(), 6)}
        frame = protocol.json_frame({**head, "incarnation": self.identity.incarnation, "session": self.identity.id, **facts})
        self.events.append((self.sequence, frame))
        self.timeline.event(event, self.log.end, facts)
        for connection in list(self.connections.values()):
            if connection.subscribed and not connection.dead:
                connection.event(frame, self.log.end)

    def set_state(self, state: str) -> None:
        """Change the state, in the file too."""
        if state != self.state:
            self.state, self.since = state, time.time()
            self.write_state()
            self.answer_waits()

    def status(self) -> dict[str, Any]:
        """As in the protocol."""
        return status_report.status(self)

    def lease(self, now: float) -> dict[str, Any] | None:
        """The lease of somebody who is here."""
        holder = self.authority.operators.get(self.authority.holder)
        return self.authority.lease(now, time.time()) if holder is not None and holder.connected else None

    def write_state(self, ended: bool = False) -> None:
        """What `ls` and `status` know when there is no holder to ask."""
        status_report.write_state(self, ended)

    def answer_waits(self) -> None:
        """Answer every `wait` whose time has come."""
        for wait in list(self.waits):
            if wait.connection.dead:
                continue  # lost while an earlier one of its own was answered
            answer = self.requests.wait_answer(wait)
            if answer is not None:
                self.waits.remove(wait)
                wait.connection.send({"id": wait.request, **answer})

    # -- the terminal -----------------------------------------------------------------------------

    def _on_output(self) -> None:
        self.queries.came()
        for connection in list(self.connections.values()):
            if connection.position is not None and not connection.blocked and not connection.dead:
                connection.pump()
        self.timeline.output(self.log.end)  # whoever looks comes first
        if self.waits:
            self.answer_waits()

    def _on_input_begun(self, chunk: Chunk, hidden: bool) -> None:
        if chunk.kind == TERMINAL:
            return  # nobody typed it
        facts: dict[str, Any] = {"offset": chunk.offset, "bytes": len(chunk.data)}
        if hidden:
            facts["hidden"] = True
        else:
            facts["text"] = chunk.data[:4096].decode(errors="replace")
        self.audit.write("input", chunk.who, self.identity.incarnation, **facts)

    def _on_input_written(self, chunk: Chunk) -> None:
        if chunk.kind == TERMINAL:
            self.loop.soon(self.queries.go_on)
        connection = self.connections.get(chunk.connection)
        if chunk.request and not chunk.answered and connection is not None:
            connection.send({"id": chunk.request, "ok": True, "offset": chunk.offset, "sequence": self.audit.sequence})

    def _on_terminal_gone(self) -> None:
        self.master.close()

    # -- the tree ---------------------------------------------------------------------------------

    def _on_child(self, events: int) -> None:
        with suppress(BlockingIOError):
            while events and os.read(self._wake[0], 4096):
                pass
        reap(self.on_reaped)

    def _on_term(self) -> None:
        """Asked to end: not while there is a session to hold, which ends by its own will, by `kill`, or with the host."""
        waits = self.state == "checkpointed" and not any(_restores(c) for c in self.connections.values())
        if self.state in ("exited", "lost") or waits:
            self.loop.running = False

    @property
    def stopped(self) -> bool:
        """Whether holder and tree were told to end together just now: so a host that goes down ends all that runs on it."""
        return time.monotonic() - self.asked < _TOGETHER

    def on_reaped(self, pid: int, status: int) -> None:
        """A child of ours has ended, and been reaped."""
        if pid in self.helpers:  # first: it may have the PID of a root that is long gone
            self.tree.helpers.discard(pid)
            self.helpers.pop(pid)(status)
        elif self.tree.root is not None and pid in (self.tree.root.pid, self.init):
            code, number = exit_code(status)
            if number is None and "init" in self.identity.facts and 128 < code <= 128 + signal.SIGRTMAX:
                number = code - 128  # so the inits tell the signal that ended the command
            self.root_ended(code, number)

    @property
    def init(self) -> int:
        """PID of our child that ends with the root's exit status, where the root is not our child; else 0."""
        return int(self.identity.facts.get("init") or 0)

    def root_ended(self, code: int | None, number: int | None) -> None:
        """The tree's first process has ended: with an exit code, by a signal, or in a way that nobody knows."""
        self.root_watch.close()
        if self.state in ("exited", "lost") or self.checkpointing.takes_the_end(code, number):
            return
        self.finish("exited" if code is not None else "lost", code, number)

    def finish(self, state: str, code: int | None, number: int | None) -> None:
        """The session is over; if it goes on at another host, what was here is no more than lost."""
        self.master.close()
        if "fenced" in self.identity.facts:
            state, code, number = "lost", None, None
        self.exit, self.paused_by, self.halted = (code, number), None, False
        self.tree.thaw()
        if state == "exited":
            status_report.write_end(self)
        self.emit("exit", exit_code=code, exit_signal=number, offset=self.log.end)
        self.collected = self.collected or any(c.position is not None for c in self.connections.values())
        self.set_state(state)
        self.loop.after(self.linger, self.end_lingering)
        self.end_if_done()

    def end_if_done(self) -> None:
        """A session that is over, whose status is collected and whose clients have left, needs no holder."""
        over = self.state in ("exited", "lost") and (self.collected or self.stopped)
        done = over or self.moved is not None or self.forsaken
        if done and not self.connections:
            self.loop.running = False

    def expect(self) -> None:
        """It was made for a tree that is being restored: without that it is of no use."""
        self.expecting = True
        self.loop.after(EXPECTED, self._give_up)

    def _give_up(self) -> None:
        self.forsaken = self.expecting and not any(_restores(c) for c in self.connections.values())
        self.end_if_done()

    def end_moved(self) -> None:
        """Who has not followed the session to its new host will not."""
        if self.moved is not None:
            self.loop.running = False

    def end_lingering(self) -> None:
        """Nobody will collect the status any more."""
        self.collected = True
        self.end_if_done()

    # -- clients ----------------------------------------------------------------------------------

    def _on_accept(self, events: int) -> None:
        assert self.listener is not None
        try:
            sock, _ = self.listener.accept()
        except BlockingIOError:
            return  # gone again
        except OSError:  # no descriptors left: those who are here go on, and whoever waits is not looked at all the time
            self.loop.unwatch(self.listener.fileno())
            self.loop.after(_ACCEPT_PAUSE, partial(self.take_listener, self.listener))
            return
        pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()) or len(self.connections) >= _MAX_CONNECTIONS:
            sock.close()
            return
        connection = self.add_connection(sock, pid)
        connection.out += protocol.preface(f"criuctl-holder/{__version__}")
        connection.pump()

    def add_connection(self, sock: socket.socket, pid: int) -> Connection:
        """A client, new or from before a re-exec."""
        connection = Connection(sock, self.log, pid, self._on_lost, self._want)
        self.connections[sock.fileno()] = connection
        self._want(connection)
        return connection

    def _want(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        events = (READ if connection.reading else 0) | (WRITE if connection.blocked else 0)
        if events != connection.interest:
            connection.interest = events
            self.loop.watch(fd, events, lambda got: self._on_client(connection, got))

    def _on_client(self, connection: Connection, events: int) -> None:
        if events & HANGUP and not events & READ:
            connection.close("closed")  # its last requests are not read while it does not take our answers
        elif events & WRITE:
            connection.blocked = False
            connection.pump()
        if events & READ and not connection.dead and connection.receive():
            self.requests.process(connection)

    def _on_lost(self, connection: Connection, why: str) -> None:
        fd = connection.sock.fileno()
        self.loop.unwatch(fd)
        self.connections.pop(fd, None)
        self.waits = [wait for wait in self.waits if wait.connection is not connection]
        for chunk in self.master.queue:
            if chunk.connection == fd:
                chunk.connection = -1
        self.checkpointing.lost(connection)
        self.forsaken = self.forsaken or (self.expecting and _restores(connection))
        if connection.operator is not None:
            self.leasing.left(connection.operator, "left" if why == "bye" else "lost")
        self.end_if_done()


def _restores(connection: Connection) -> bool:
    """Whether this is the restore that brings the tree."""
    return connection.operator is not None and connection.operator.name == protocol.RESTORES
