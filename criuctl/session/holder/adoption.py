"""A holder's part in a restore: taking a tree back.

A restored tree is the session's from `adopt` on, but its restorer can take everything back until it
lets go of it (`settle`).  A tree that is killed before that was not restored, and the session is
where it was, in its checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from .audit_log import AuditWriter
from .clients import Clients
from .connection import Connection
from .event_loop import Loop, Timer
from .events import Events
from .lifetime import Lifetime
from .master import Master
from .operators import Operator, Refused
from .output_log import OutputLog
from .processes import Tree
from .replies import refuse_dropped
from .self_fence import SelfFence
from .session_state import SessionState

_UNCERTAIN_SECONDS = 10.0  # that a tree may live without its restorer, until it is the session's
_RESTORED_KEYS = ("host", "checkpoint", "created", "dropped", "text")


@dataclass
class _Arrival:
    """A restored tree that its restorer has not let go of, and what the session was without it."""

    connection: Connection | None  # None: lost
    checkpoint: str
    incarnation: int
    restored: dict[str, Any] | None
    moved: dict[str, Any] | None
    expected: bool  # the holder was made for this tree alone


@dataclass(frozen=True)
class _Paused:
    """How a restored tree stood still when it was dumped."""

    by: dict[str, Any] | None
    halted: bool
    stopped: list[ProcessIdentity]  # by the pause
    asleep: list[ProcessIdentity]  # before it


class Adoption:
    """The restore of one session that is not completed yet, if there is one.

    `take_tree` makes a root and the descriptor of a terminal's master (-1: none) the session's,
    `let_go` makes the session ``checkpointed`` again, `returned` takes over what is known of its
    shell and commands.
    """

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        tree: Tree,
        master: Master,
        log: OutputLog,
        clients: Clients,
        events: Events,
        audit: AuditWriter,
        lifetime: Lifetime,
        self_fence: SelfFence,
        take_tree: Callable[[ProcessIdentity, int], None],
        let_go: Callable[[str], None],
        returned: Callable[[dict[str, Any]], None],
    ) -> None:
        self._loop, self._session, self._tree, self._master = loop, session, tree, master
        self._log, self._clients, self._events, self._audit = log, clients, events, audit
        self._lifetime, self._self_fence = lifetime, self_fence
        self._take_tree, self._let_go = take_tree, let_go
        self._returned = returned
        self._arrival: _Arrival | None = None
        self._timer: Timer | None = None

    @property
    def pending(self) -> bool:
        """Whether a restore may still take its tree back."""
        return self._arrival is not None

    @property
    def uncertain(self) -> bool:
        """Whether its restorer is gone, and the tree may be killed yet."""
        return self._timer is not None

    @property
    def seizing(self) -> bool:
        """Whether CRIU has the tree in its hands, so that no operator may freeze or thaw it."""
        here = self._arrival is not None and self._arrival.connection is not None
        return here and self._session.state == "paused"

    # -- the restore ------------------------------------------------------------------------------

    def adopt(self, connection: Connection, by: Operator, message: dict[str, Any]) -> None:
        """Make a restored tree the session's."""
        session = self._session
        root = self._receive(connection, message)
        paused = _paused(message.get("paused"))
        if paused is not None or message.get("settles") is True:
            before = session.identity
            self._arrival = _Arrival(
                connection,
                session.checkpoint_id,
                before.incarnation,
                before.restored,
                session.moved,
                expected=self._lifetime.expecting,
            )
        session.moved = None
        self._lifetime.arrived()
        if paused is not None:
            self._tree.returns(paused.stopped, paused.asleep)
            session.paused_by, session.halted = paused.by, paused.halted
        shell = message.get("shell")
        self._returned(shell if isinstance(shell, dict) else {})
        held = self._master.queued
        if message.get("input") == "drop":
            refuse_dropped(self._clients.connections, self._master.drop(lambda chunk: False))
        facts = _facts(message.get("restored"))
        session.identity.incarnation = int(message["incarnation"])
        session.identity.restored = {**facts, "at": round(time.time(), 3)}
        who = {**by.who(), "pid": connection.pid}
        self._audit.write("adopt", who, tree=root.pid, **facts)
        self._events.emit("restored", **facts, offset=self._log.end, held_input=held)
        if paused is not None:
            how = "halted" if paused.halted else "paused"
            self._events.emit(how, by=paused.by, restored=True)
        session.set_state("running" if paused is None else "paused")
        # This is its home now: a tree that stood still as a cut-off home goes on as well.
        self._self_fence.extend(0)
        # What is typed into a tree that is taken back belongs to the next one.
        self._master.hold(self._arrival is not None)

    def _receive(self, connection: Connection, message: dict[str, Any]) -> ProcessIdentity:
        """Check the request, and take the tree with its terminal; return its root."""
        session, group = self._session, self._tree.group
        has_master = message.get("master", True)
        fds = connection.take_fds()
        try:
            if session.state != "checkpointed":
                text = f"the session is {session.state}, it has a tree or needs none"
                raise Refused("state", text, state=session.state)
            if has_master and len(fds) != 1:
                text = "adopt needs the terminal's master as the one descriptor"
                raise Refused("bad-request", text)
            root = _root(message)
            init = message.get("init")
            if isinstance(init, int):
                session.identity.facts |= {"init": init, "private": bool(init)}
            self._take_tree(root, fds.pop() if has_master else -1)
        finally:
            for fd in fds:
                os.close(fd)
        if group is not None:
            for identity in self._tree.members():
                group.add(identity.pid)
        return root

    def settle(self, connection: Connection) -> dict[str, Any]:
        """CRIU is about to let go of the tree; freeze one that is to stand still."""
        if self._arrival is None or connection is not self._arrival.connection:
            text = "this connection has not adopted a tree that it has to let go of"
            raise Refused("state", text, state=self._session.state)
        self._arrival = None
        paused = self._session.state == "paused"
        method, count = self._tree.freeze() if paused else (None, 0)
        self._master.hold(False)
        return {"method": method, "processes": count}

    # -- what else happens ------------------------------------------------------------------------

    def lost(self, connection: Connection) -> None:
        """Handle the loss of a client; if it is the restorer, the tree may still be killed."""
        if self._arrival is not None and connection is self._arrival.connection:
            self._arrival.connection = None
            if self._session.state == "paused":
                self._tree.freeze()
            self._timer = self._loop.after(_UNCERTAIN_SECONDS, self.complete)

    def complete(self) -> None:
        """Adopt the tree for good: it runs without its restorer, or an operator ends it."""
        if self._arrival is not None:
            self._end_arrival()
            self._master.hold(False)

    def turn_back(self) -> None:
        """Return to the former state: the restore has failed, and has killed its processes."""
        arrival, session = self._arrival, self._session
        assert arrival is not None
        self._end_arrival()
        identity = session.identity
        identity.incarnation, identity.restored = arrival.incarnation, arrival.restored
        session.moved, self._lifetime.forsaken = arrival.moved, arrival.expected
        self._let_go(arrival.checkpoint)
        if session.moved is not None:
            self._lifetime.linger_for_followers()
        self._lifetime.end_if_done()

    def _end_arrival(self) -> None:
        self._arrival = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _facts(restored: object) -> dict[str, Any]:
    """Return what is reported of a restore."""
    if not isinstance(restored, dict):
        return {}
    return {key: restored[key] for key in _RESTORED_KEYS if key in restored}


def _root(message: dict[str, Any]) -> ProcessIdentity:
    """Return the root of the restored tree; `Refused`."""
    pid, start_time = message.get("pid"), message.get("start_time")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(message.get("incarnation"), int):
        raise Refused("bad-request", "adopt needs pid and incarnation")
    try:
        root = ProcessIdentity.of(pid)
    except CriuctlError as error:
        raise Refused("not-found", str(error)) from None
    if start_time is not None and start_time != root.start_time:
        raise Refused("not-found", f"PID {pid} is another process by now")
    return root


def _paused(facts: object) -> _Paused | None:
    """Return how the tree stood still; None: it did not."""
    if not isinstance(facts, dict):
        return None
    by = facts.get("by")
    return _Paused(
        by if isinstance(by, dict) else None,
        facts.get("halted") is True,
        _living(facts.get("stopped")),
        _living(facts.get("asleep")),
    )


def _living(pids: object) -> list[ProcessIdentity]:
    """Return those of these processes that are there."""
    found = []
    for pid in pids if isinstance(pids, list) else ():
        if isinstance(pid, int):
            try:
                found.append(ProcessIdentity.of(pid))
            except CriuctlError:
                continue
    return found
