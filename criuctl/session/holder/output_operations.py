"""The operations of every operator on output and events: attach, read, subscribe, wait.

They change nothing of the session, except that `attach` may ask for the lease in the same step, so that
a terminal has its size before anything is drawn.
"""

from __future__ import annotations

from functools import partial

from .. import protocol
from ..screen.modes import Modes
from .audit_log import AuditWriter
from .connection import Connection, Transfer
from .event_loop import Loop
from .events import Events
from .lifetime import Lifetime
from .master import Master
from .operators import Operator, Refused
from .output_log import OutputLog
from .replies import refuse
from .request_values import (
    LATER,
    Message,
    Operations,
    boolean,
    integer,
    one_of,
    window_size,
)
from .session_state import SessionState
from .waits import Wait, Waits
from .write_operations import WriteOperations

_MAX_WAITS = 64  # of one connection
_FAR = 1 << 62  # beyond any offset and any sequence


class OutputOperations:
    """What every role may do with output and events."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        log: OutputLog,
        modes: Modes,
        master: Master,
        events: Events,
        waits: Waits,
        audit: AuditWriter,
        lifetime: Lifetime,
        writing: WriteOperations,
    ) -> None:
        self._loop, self._session, self._log, self._modes = loop, session, log, modes
        self._master, self._events, self._waits, self._audit = master, events, waits, audit
        self._lifetime, self._writing = lifetime, writing
        self.operations: Operations = {
            "attach": ("observe", self._attach),
            "detach": ("observe", self._detach),
            "read": ("observe", self._read),
            "subscribe": ("observe", self._subscribe),
            "unsubscribe": ("observe", self._unsubscribe),
            "wait": ("observe", self._wait),
            "cancel": ("observe", self._cancel),
        }

    # -- output -----------------------------------------------------------------------------------

    def _position(self, message: Message, default: int | str) -> int:
        log, start = self._log, message.get("from", default)
        if start == "start":
            return log.base
        if start == "now":
            return log.end
        if not isinstance(start, int) or isinstance(start, bool) or not -_FAR < start < _FAR:
            raise Refused("bad-request", "'from' must be an offset, 'start', 'now' or -N")
        return max(log.end + start, log.base) if start < 0 else min(start, log.end)

    def _attach(self, connection: Connection, by: Operator, message: Message) -> Message:
        position, size = self._position(message, "now"), message.get("size")
        wanted = window_size(size) if isinstance(size, dict) else None
        if boolean(message, "write") and by.may("write"):
            self._writing.attach(by, wanted)
        if self._session.over:
            self._lifetime.collect()
        connection.subscribed = True
        connection.position = position
        shows = boolean(message, "answers") if "answers" in message else by.kind == "human"
        connection.answers = shows
        self._loop.soon(connection.pump)  # behind the answer
        log, master = self._log, self._master
        return {
            "offset": position,
            "base": log.base,
            "end": log.end,
            "modes": self._modes.to_dict(),
            "rows": master.rows,
            "cols": master.cols,
            "state": self._session.state,
            **self._writing.lease(),
        }

    def _detach(self, connection: Connection, by: Operator, message: Message) -> Message:
        position, connection.position = connection.position, None
        return {"offset": self._log.end if position is None else position}

    def _read(self, connection: Connection, by: Operator, message: Message) -> Message:
        log = self._log
        start = max(self._position(message, "start"), log.base)
        end = min(integer(message, "to", 0, _FAR, log.end), log.end)
        if message.get("max") is not None:
            end = min(end, start + integer(message, "max", 0, _FAR))
        if len(connection.transfers) >= _MAX_WAITS:
            raise Refused("busy", "too many reads at once")
        connection.transfers.append(Transfer(message["id"], start, start, end))
        connection.pump()
        return LATER

    # -- events -----------------------------------------------------------------------------------

    def _subscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        if message.get("since") is not None:
            missed = self._events.since(integer(message, "since", 0, _FAR))
            self._loop.soon(partial(_replay, connection, missed))
        connection.subscribed = True
        return {"sequence": self._events.sequence}

    def _unsubscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        connection.subscribed = False
        return {}

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self, connection: Connection, by: Operator, message: Message) -> Message:
        what = one_of(message, "for", ("exit", "output", "state"))
        wait = Wait(connection, message["id"], what)
        if what == "output":
            wait.offset = integer(message, "offset", 0, _FAR)
        elif what == "state":
            wait.states = _states(message)
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
        for chunk in self._master.drop(lambda chunk: (chunk.connection, chunk.request, chunk.answered) != typed):
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
