"""The operations of who looks: greeting, status, output, events, waiting.  Nothing here changes the session.

Except that `attach` may ask for the lease in the same step, so that a terminal is there with its size before anything is drawn.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from .. import protocol
from .connection import Connection, Transfer, Wait
from .operators import Operator, Refused
from .request_values import LATER, Message, Operations, boolean, fitting, integer, one_of, text, window_size

if TYPE_CHECKING:
    from .holder import Holder
    from .requests import Requests
    from .write_operations import Writing

_MAX_WAITS = 64  # of one connection


class Observing:
    """What every role may do."""

    def __init__(self, holder: Holder, requests: Requests, writing: Writing) -> None:
        self._holder, self._requests, self._writing = holder, requests, writing
        self.operations: Operations = {
            "status": ("observe", self._status),
            "attach": ("observe", self._attach),
            "detach": ("observe", self._detach),
            "read": ("observe", self._read),
            "subscribe": ("observe", self._subscribe),
            "unsubscribe": ("observe", self._unsubscribe),
            "wait": ("observe", self._wait),
            "cancel": ("observe", self._cancel),
            "audit": ("observe", self._audit),
            "heartbeat": ("observe", self._heartbeat),
            "bye": ("observe", self._bye),
        }

    # -- being there ------------------------------------------------------------------------------

    def hello(self, connection: Connection, message: Message) -> Message:
        """Somebody says who it is."""
        holder = self._holder
        if connection.operator is not None:
            raise Refused("bad-request", "hello was said")
        kind, role = one_of(message, "kind", protocol.KINDS), one_of(message, "role", protocol.ROLES)
        name, how, operator = text(message, "name", 64), "joined", None
        if message.get("operator") is not None:
            identifier, token = text(message, "operator", 32), text(message, "token", 64)
            for other in list(holder.connections.values()):
                known = holder.authority.operators.get(identifier)
                if other.operator is not None and other.operator is known and known.token == token:
                    other.close("came back on another connection")
            operator, how = holder.authority.comes_back(identifier, token, role), "resumed"
            if operator is None:
                raise Refused("not-found", f"there was no operator {identifier!r} with this token")
        if operator is None:
            operator = holder.authority.join(kind, name, role, connection.pid, round(time.time(), 3))
        operator.pid = connection.pid
        connection.operator = operator
        holder.authority.touch(operator, time.monotonic())
        self._requests.record(how, operator, role=operator.role)
        holder.emit("operator", **operator.who(), role=operator.role, how=how)
        return {
            "operator": operator.id,
            "token": operator.token,
            "role": operator.role,
            "version": connection.decoder.version,
            "features": list(protocol.FEATURES),
            "status": holder.status(),
        }

    def _status(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"status": self._holder.status()}

    def _heartbeat(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"lease": self._holder.lease(time.monotonic())}

    def _bye(self, connection: Connection, by: Operator, message: Message) -> Message:
        connection.closing = True
        return {}

    def _audit(self, connection: Connection, by: Operator, message: Message) -> Message:
        since, limit = integer(message, "since", 0, 1 << 62, 0), integer(message, "limit", 1, 1000, 1000)
        return {"entries": fitting(self._holder.audit.entries(since, limit))}

    # -- output and events ------------------------------------------------------------------------

    def _position(self, message: Message, default: int | str) -> int:
        log, start = self._holder.log, message.get("from", default)
        if start == "start":
            return log.base
        if start == "now":
            return log.end
        if not isinstance(start, int) or isinstance(start, bool) or not -(1 << 62) < start < 1 << 62:
            raise Refused("bad-request", "'from' must be an offset, 'start', 'now' or -N")
        return max(log.end + start, log.base) if start < 0 else min(start, log.end)

    def _attach(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        position, size = self._position(message, "now"), message.get("size")
        wish = window_size(size) if isinstance(size, dict) else None
        if boolean(message, "write") and by.may("write"):
            try:
                self._writing.claim(by, protocol.DEFAULT_TTL, "request", soft=True, polite=True)
            except Refused as refused:
                if refused.code != "lease-held":
                    raise
            else:
                if wish is not None:
                    self._writing.set_size(by, wish)
        if holder.state in ("exited", "lost"):
            holder.collected = True
        connection.subscribed = True
        connection.position = position
        connection.answers = boolean(message, "answers") if "answers" in message else by.kind == "human"
        holder.loop.soon(connection.pump)  # behind the answer
        master = holder.master
        place = {"offset": position, "base": holder.log.base, "end": holder.log.end, "modes": holder.modes.to_dict()}
        return {**place, "rows": master.rows, "cols": master.cols, "state": holder.state, "lease": holder.lease(time.monotonic())}

    def _detach(self, connection: Connection, by: Operator, message: Message) -> Message:
        position, connection.position = connection.position, None
        return {"offset": self._holder.log.end if position is None else position}

    def _read(self, connection: Connection, by: Operator, message: Message) -> Message:
        log = self._holder.log
        start = max(self._position(message, "start"), log.base)
        end = min(integer(message, "to", 0, 1 << 62, log.end), log.end)
        if message.get("max") is not None:
            end = min(end, start + integer(message, "max", 0, 1 << 62))
        if len(connection.transfers) >= _MAX_WAITS:
            raise Refused("busy", "too many reads at once")
        connection.transfers.append(Transfer(message["id"], start, start, end))
        connection.pump()
        return LATER

    def _subscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        if message.get("since") is not None:
            since = integer(message, "since", 0, 1 << 62)
            missed = [frame for sequence, frame in holder.events if sequence > since]
            holder.loop.soon(partial(_replay, connection, missed))
        connection.subscribed = True
        return {"sequence": holder.sequence}

    def _unsubscribe(self, connection: Connection, by: Operator, message: Message) -> Message:
        connection.subscribed = False
        return {}

    def _wait(self, connection: Connection, by: Operator, message: Message) -> Message:
        what = one_of(message, "for", ("exit", "output", "state"))
        wait = Wait(connection, message["id"], what)
        if what == "output":
            wait.offset = integer(message, "offset", 0, 1 << 62)
        elif what == "state":
            states = message.get("states")
            if not isinstance(states, list) or not states or not all(s in protocol.STATES for s in states):
                raise Refused("bad-request", f"'states' must be a list of {', '.join(protocol.STATES)}")
            wait.states = states
        if sum(other.connection is connection for other in self._holder.waits) >= _MAX_WAITS:
            raise Refused("busy", "too many waits at once")
        self._holder.waits.append(wait)
        self._holder.loop.soon(self._holder.answer_waits)
        return LATER

    def wait_answer(self, wait: Wait) -> Message | None:
        """The answer to a `wait`, None while it has to go on waiting."""
        holder = self._holder
        over = holder.state in ("exited", "lost")
        if wait.what == "exit" and over:
            holder.collected = True
            return {"ok": True, "exit_code": holder.exit[0], "exit_signal": holder.exit[1], "state": holder.state}
        if wait.what == "output":
            if holder.log.end > wait.offset:
                return {"ok": True, "end": holder.log.end}
            if over:
                message = "the session has ended, nothing more will be printed"
                return {"error": {"code": "state", "message": message, "details": {"state": holder.state}}}
        if wait.what == "state" and holder.state in wait.states:
            return {"ok": True, "state": holder.state}
        return None

    def _cancel(self, connection: Connection, by: Operator, message: Message) -> Message:
        request = integer(message, "request", 1, (1 << 32) - 1)
        for wait in list(self._holder.waits):
            if wait.connection is connection and wait.request == request:
                self._holder.waits.remove(wait)
                self._requests.refuse(connection, request, Refused("cancelled", "cancelled"))
                return {}
        typed = (connection.sock.fileno(), request, False)
        for chunk in self._holder.master.drop(lambda chunk: (chunk.connection, chunk.request, chunk.answered) != typed):
            self._requests.record("cancel", by, written=chunk.at, dropped=len(chunk.data) - chunk.at)
            self._requests.refuse(connection, request, Refused("cancelled", "not all is typed", written=chunk.at))
            return {}
        raise Refused("not-found", "no such request is waiting")


def _replay(connection: Connection, frames: list[bytes]) -> None:
    for frame in frames:
        if not connection.dead:
            connection.event(frame, 0)
