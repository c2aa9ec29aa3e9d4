"""The operations of every operator on events: subscribe, wait, and cancel what waits."""

from __future__ import annotations

from functools import partial

from .. import protocol
from .audit_log import AuditWriter
from .commands import Commands
from .connection import Connection
from .event_loop import Loop
from .events import Events
from .master import Master
from .operators import Operator, Refused
from .replies import refuse
from .request_values import FAR, LATER, Message, Operations, integer, one_of, text
from .waits import Wait, Waits

_MAX_WAITS = 64  # of one connection


class EventOperations:
    """What every role may do with events, and `cancel`, which also cancels input."""

    def __init__(
        self,
        loop: Loop,
        master: Master,
        events: Events,
        waits: Waits,
        audit: AuditWriter,
        commands: Commands,
    ) -> None:
        self._loop, self._master, self._events = loop, master, events
        self._commands = commands
        self._waits, self._audit = waits, audit
        self.operations: Operations = {
            "subscribe": ("observe", self._subscribe),
            "unsubscribe": ("observe", self._unsubscribe),
            "wait": ("observe", self._wait),
            "cancel": ("observe", self._cancel),
        }

    def _subscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        if message.get("since") is not None:
            missed = self._events.since(integer(message, "since", 0, FAR))
            self._loop.soon(partial(_replay, connection, missed))
        connection.subscribed = True
        return {"sequence": self._events.sequence}

    def _unsubscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        connection.subscribed = False
        return {}

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self, connection: Connection, by: Operator, message: Message) -> Message:
        what = one_of(message, "for", ("exit", "output", "state", "command"))
        wait = Wait(connection, message["id"], what)
        if what == "output":
            wait.offset = integer(message, "offset", 0, FAR)
        elif what == "state":
            wait.states = _states(message)
        elif what == "command":
            wait.command = self._commands.get(text(message, "command", 32)).id
        if self._waits.count(connection) >= _MAX_WAITS:
            raise Refused("busy", "too many waits at once")
        self._waits.add(wait)
        self._loop.soon(self._waits.answer)
        return LATER

    def _cancel(self, connection: Connection, by: Operator, message: Message) -> Message:
        request = integer(message, "request", 1, (1 << 32) - 1)
        if self._waits.remove(connection, request):
            refuse(connection, request, Refused("cancelled", "cancelled"))
            return {}
        typed = (connection.sock.fileno(), request, False)
        for chunk in self._master.drop(
            lambda chunk: (chunk.connection, chunk.request, chunk.answered) != typed
        ):
            dropped = len(chunk.data) - chunk.at
            self._audit.record("cancel", by, written=chunk.at, dropped=dropped)
            cancelled = Refused("cancelled", "not all is typed", written=chunk.at)
            refuse(connection, request, cancelled)
            return {}
        raise Refused("not-found", "no such request is waiting")


def _states(message: Message) -> list[str]:
    """Return the states that a `wait` waits for."""
    states = message.get("states")
    if not isinstance(states, list) or not states or not all(s in protocol.STATES for s in states):
        raise Refused("bad-request", f"'states' must be a list of {', '.join(protocol.STATES)}")
    return states


def _replay(connection: Connection, frames: list[bytes]) -> None:
    for frame in frames:
        if not connection.dead:
            connection.event(frame, 0)
