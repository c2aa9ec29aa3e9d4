"""Functions of the session's programs that are called before a checkpoint, after a restore, and
after a fork (`criuctl.inside.before_checkpoint` and so on).

A process registers the events for which it has functions. To have them called, the holder sends it
SIGURG, which a process that has no handler for it ignores. The handler, in the process's main
thread, asks over the step socket which event there is (`next`), calls the functions, and reports
(`report`). So no descriptor is open meanwhile, and a process that waits in a system call is
interrupted, as by any signal. One that was just about to wait is not, and would notice the signal
only afterwards (in Python handlers run between two instructions): so the signal is sent again until
the process has asked.

before-checkpoint   asked for by the dump, before anything is frozen, which waits for the answers up
                    to a deadline (`call`). The answer of each process is yes, a veto with a reason,
                    or a failure: it raised, was not in time, is stopped.
after-restore       called when the tree runs: the restorer has left (`lost`). Nothing waits for it;
after-fork          a failure is an event. A process that is stopped calls it when it goes on.

A process that executes another program, or takes its handler away, is not called any more: the
kernel reports which file a process runs, and which signals it catches. Processes are known by PID
and start time, across a restore by their PID in the tree.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CriuctlError
from ...proc.namespaces import ns_pids
from ...proc.procfs import read_status
from ...proc.tree import ProcessIdentity
from ...steps.states import StepRefused
from .connection import Connection
from .event_loop import Loop, Timer
from .events import Events
from .processes import Tree
from .session_state import SessionState
from .steps import Message, Peer

BEFORE, RESTORED, FORKED = "before-checkpoint", "after-restore", "after-fork"
EVENTS = (BEFORE, RESTORED, FORKED)
SIGNAL = signal.SIGURG
_MAX_PROCESSES = 64
_MAX_REASON = 500  # characters
_LATE = 30.0  # seconds after which a function that is called after a restore is reported
_UNCERTAIN = 11.0  # seconds until a tree whose restorer was killed is the session's
_LOOK = 0.1  # seconds between two looks at whether CRIU has let go of a process
_AGAIN, _LONGEST_AGAIN = 0.5, 60.0  # seconds between two signals, at first and at most

Answer = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class _Registered:
    """One registered process."""

    inner: int  # its PID in the tree
    events: list[str]
    program: tuple[int, int]  # device and inode of the file that it runs


@dataclass(slots=True)
class _Call:
    """One event for some processes."""

    event: str
    token: str
    waiting: set[ProcessIdentity]
    asked: set[ProcessIdentity] = field(default_factory=set)  # those that know of it
    called: int = 0
    vetoes: list[Message] = field(default_factory=list)
    failures: list[Message] = field(default_factory=list)
    connection: Connection | None = None  # that waits for the answer
    answer: Answer | None = None
    timer: Timer | None = None


class Callbacks:
    """The registered processes of one session, and the calls that are under way."""

    def __init__(self, loop: Loop, session: SessionState, tree: Tree, events: Events) -> None:
        self._loop, self._session, self._tree, self._events = loop, session, tree, events
        self._registered: dict[ProcessIdentity, _Registered] = {}
        self._calls: list[_Call] = []
        # The restorer, the event for when it has left, and the root of its tree.
        self._coming: tuple[Connection, str, ProcessIdentity | None] | None = None

    # -- what a program asks ----------------------------------------------------------------------

    def register(self, peer: Peer, message: Message) -> Message:
        """Note for which events this process has functions; none: it is not registered any more."""
        events = message.get("events")
        if not isinstance(events, list) or any(event not in EVENTS for event in events):
            raise StepRefused("bad-request", f"'events' must be a list of {', '.join(EVENTS)}")
        try:
            identity, inner = ProcessIdentity.of(peer.pid), ns_pids(peer.pid)[-1]
        except CriuctlError as error:
            raise StepRefused("not-found", str(error)) from None
        self._registered = {one: known for one, known in self._registered.items() if one.alive()}
        self._registered.pop(identity, None)
        if len(self._registered) >= _MAX_PROCESSES:
            text = f"{_MAX_PROCESSES} processes of this session have functions to be called"
            raise StepRefused("busy", text)
        if events:
            program = _program(identity)
            self._registered[identity] = _Registered(inner, sorted(set(events)), program)
        return {"events": sorted(set(events))}

    def next(self, peer: Peer, message: Message) -> Message:
        """Return the event for which this process is to call its functions, or nothing."""
        identity = _identity(peer)
        for call in self._calls:
            if identity is not None and identity in call.waiting:
                call.asked.add(identity)
                return {"event": call.event, "call": call.token}
        return {}

    def report(self, peer: Peer, message: Message) -> Message:
        """Note that this process has called its functions: without objection, with a `veto`, or
        with an `error`.
        """
        identity, token = _identity(peer), message.get("call")
        for call in self._calls:
            if call.token == token and identity in call.waiting:
                break
        else:
            return {}  # it is late, or from the memory of a checkpoint
        call.waiting.discard(identity)
        call.called += 1
        for key, found in (("veto", call.vetoes), ("error", call.failures)):
            reason = message.get(key)
            if isinstance(reason, str) and reason:
                found.append({"pid": peer.pid, "reason": reason[:_MAX_REASON]})
        self._look(call)
        return {}

    # -- before a checkpoint ----------------------------------------------------------------------

    def call(self, connection: Connection, event: str, seconds: float, answer: Answer) -> None:
        """Have the functions for `event` called; `answer` gets ``called``, ``vetoes`` and
        ``failures`` after `seconds` at the latest.
        """
        call = self._begin(event)
        call.connection, call.answer = connection, answer
        if self._session.state != "running":
            self._end(call, f"the session is {self._session.state}")
            return
        why = f"it has not returned within {seconds:g} s"
        call.timer = self._loop.after(seconds, lambda: self._end(call, why))
        for identity in sorted(call.waiting):
            if identity.state() in ("T", "t"):
                self._fail(call, identity, "it is stopped")
        self._send(call, call.waiting)

    # -- the tree in dumps and restores -----------------------------------------------------------

    def in_tree(self) -> list[list[Any]]:
        """Return PID in the tree and events of each registered process, for the checkpoint."""
        return [
            [one.inner, one.events]
            for identity, one in self._registered.items()
            if identity.alive()
        ]

    def returned(
        self,
        given: object,
        processes: Mapping[int, ProcessIdentity],
        connection: Connection,
        *,
        fork: bool,
    ) -> None:
        """A restore has brought the tree, in which `given` were registered; `processes` has the
        process of each PID in the tree. Their functions are called when the restorer has left.
        """
        for call in list(self._calls):
            self._end(call, "a restore has begun")
        self._registered = {}
        for one in given[:_MAX_PROCESSES] if isinstance(given, list) else ():
            inner, events = one if isinstance(one, list) and len(one) == 2 else (0, [])
            if isinstance(inner, int) and inner in processes and isinstance(events, list):
                known = [event for event in EVENTS if event in events]
                identity = processes[inner]
                self._registered[identity] = _Registered(inner, known, _program(identity))
        event = FORKED if fork else RESTORED
        self._coming = (connection, event, self._tree.root) if self._registered else None

    def lost(self, connection: Connection, why: str) -> None:
        """Handle the loss of a client: of the dump that waits, or of the restorer."""
        for call in [call for call in self._calls if call.connection is connection]:
            call.answer = None
            self._end(call, "the dump has ended")
        if self._coming is not None and self._coming[0] is connection:
            (_, event, root), self._coming = self._coming, None
            seconds = 0.0 if why == "bye" else _UNCERTAIN
            self._loop.after(seconds, lambda: self._call_back(event, root))

    def _call_back(self, event: str, root: ProcessIdentity | None) -> None:
        """Have the functions called in a tree that was restored and runs."""
        if self._session.state not in ("running", "paused") or self._tree.root != root:
            return  # it was taken back, or has ended
        call = self._begin(event)
        call.timer = self._loop.after(_LATE, lambda: self._report_late(call))
        self._signal_released(call, set(call.waiting))

    def _signal_released(self, call: _Call, left: set[ProcessIdentity]) -> None:
        """Signal each process once CRIU has let go of it: before that a signal could confuse it."""
        free = {identity for identity in left if not _traced(identity)}
        self._send(call, free)
        if left - free:
            self._loop.after(_LOOK, lambda: self._signal_released(call, left - free))

    def _report_late(self, call: _Call) -> None:
        """Report functions that have not returned; their processes may still call them."""
        call.waiting = {identity for identity in call.waiting if identity.alive()}
        self._look(call)
        if call in self._calls and self._session.state == "running":
            reason = f"it has not returned within {_LATE:g} s"
            self._emit(call, [{"pid": one.pid, "reason": reason} for one in sorted(call.waiting)])

    # -- one call ---------------------------------------------------------------------------------

    def _begin(self, event: str) -> _Call:
        waiting = {
            identity
            for identity, one in self._registered.items()
            if event in one.events and one.program == _program(identity) and _catches(identity)
        }
        call = _Call(event, os.urandom(12).hex(), waiting)
        self._calls.append(call)
        self._loop.after(_AGAIN, lambda: self._signal_again(call, _AGAIN))
        return call

    def _signal_again(self, call: _Call, pause: float) -> None:
        """Signal the processes that have not asked yet."""
        silent = call.waiting - call.asked
        if call in self._calls and silent:
            self._send(call, {identity for identity in silent if not _traced(identity)})
            pause = min(pause * 2, _LONGEST_AGAIN)
            self._loop.after(pause, lambda: self._signal_again(call, pause))

    def _send(self, call: _Call, to: Iterable[ProcessIdentity]) -> None:
        """Send the signal; a process that is gone has no functions any more."""
        for identity in list(to):
            if self._tree.signal(SIGNAL, [identity]) == 0:
                call.waiting.discard(identity)
        self._look(call)

    def _look(self, call: _Call) -> None:
        if not call.waiting:
            self._end(call, "")

    def _fail(self, call: _Call, identity: ProcessIdentity, why: str) -> None:
        call.waiting.discard(identity)
        if identity.alive():
            call.failures.append({"pid": identity.pid, "reason": why})

    def _end(self, call: _Call, why: str) -> None:
        """End the call: processes that have not answered have failed, because of `why`."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        if call.timer is not None:
            call.timer.cancel()
        for identity in sorted(call.waiting):
            self._fail(call, identity, why)
        self._emit(call, call.failures)
        if call.answer is not None:
            call.answer({"called": call.called, "vetoes": call.vetoes, "failures": call.failures})

    def _emit(self, call: _Call, failures: list[Message]) -> None:
        if call.called or failures:
            facts = {"called": call.called, "vetoes": call.vetoes, "failures": failures}
            self._events.emit("callbacks", of=call.event, **facts)

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder; a dump gets its answer before."""
        for call in [call for call in self._calls if call.answer is not None]:
            self._end(call, "the session's holder is being replaced")
        known = [
            [list(identity), one.inner, one.events, list(one.program)]
            for identity, one in self._registered.items()
        ]
        calls = [[call.event, sorted(call.waiting)] for call in self._calls]
        return {"callbacks": {"registered": known, "calls": calls}}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        given = state.get("callbacks") or {}
        for identity, inner, events, (device, inode) in given.get("registered") or ():
            one = _Registered(inner, events, (device, inode))
            self._registered[ProcessIdentity(*identity)] = one
        for event, waiting in given.get("calls") or ():
            call = self._begin(event)
            call.waiting &= {ProcessIdentity(*one) for one in waiting}
            self._signal_released(call, set(call.waiting))


def _identity(peer: Peer) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.of(peer.pid)
    except CriuctlError:
        return None


def _program(identity: ProcessIdentity) -> tuple[int, int]:
    """Return device and inode of the file that a process runs, zeros if it is gone."""
    try:
        status = os.stat(f"/proc/{identity.pid}/exe")
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def _catches(identity: ProcessIdentity) -> bool:
    """Return whether the process lives and has a handler for the signal."""
    try:
        caught = int(read_status(identity.pid)["SigCgt"], 16)
    except (CriuctlError, KeyError, ValueError):
        return False
    return bool(caught >> (SIGNAL - 1) & 1) and identity.alive()


def _traced(identity: ProcessIdentity) -> bool:
    try:
        return int(read_status(identity.pid)["TracerPid"]) != 0
    except (CriuctlError, KeyError, ValueError):
        return False
