"""The operations of the wire protocol, each as PROTOCOL.md has it: checked, done, attributed, answered.

What is not an integer in range, not a known word or not allowed to this operator is refused before
anything is touched.  Nothing that a client sends can raise past `process`.
"""

from __future__ import annotations

import base64
import binascii
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import helpers, killing, protocol
from .connection import Connection, Transfer, Wait
from .lease import Operator, Refused
from .master import Chunk
from .processes import signal_foreground
from .values import boolean, integer, number, one_of, text

if TYPE_CHECKING:
    from .holder import Holder

Message = dict[str, Any]
_MAX_WAITS = 64  # of one connection
LATER = {"later": True}  # the answer comes some other time


class Requests:
    """Does what clients ask of one holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        # operation -> (least role, what does it)
        self._operations: dict[str, tuple[str, Callable[[Connection, Operator, Message], Message | None]]] = {
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
            "input": ("write", self._input),
            "resize": ("write", self._resize),
            "signal": ("write", self._signal),
            "pause": ("write", self._pause),
            "resume": ("write", self._resume),
            "halt": ("write", self._halt),
            "lease-request": ("write", self._lease_request),
            "lease-yield": ("write", self._lease_yield),
            "lease-take": ("write", self._lease_take),
            "lease-grant": ("write", self._lease_grant),
            "kill": ("admin", self._kill),
            "set-role": ("admin", self._set_role),
            "checkpoint-begin": ("admin", lambda c, o, m: holder.checkpointing.begin(c, o)),
            "checkpoint-commit": ("admin", lambda c, o, m: holder.checkpointing.commit(c, text(m, "checkpoint"))),
            "checkpoint-thawed": ("admin", lambda c, o, m: holder.checkpointing.thawed(c)),
            "checkpoint-done": ("admin", self._checkpoint_done),
            "checkpoint-abort": ("admin", lambda c, o, m: holder.checkpointing.abort(c)),
            "adopt": ("admin", holder.checkpointing.adopt),
            "spawn": ("admin", lambda c, o, m: helpers.spawn(holder, c, m)),
            "reexec": ("admin", self._reexec),
            "shutdown": ("admin", self._shutdown),
        }

    def process(self, connection: Connection) -> None:
        """Do what has come on this connection."""
        try:
            for kind, body in connection.decoder.frames():
                if connection.dead or connection.closing:
                    return
                if kind == protocol.JSON:
                    self._message(connection, protocol.parse_json(body))
                elif kind == protocol.INPUT:
                    request, data = protocol.parse_input(body)
                    self._answer(connection, request, partial(self._type, connection, data=data, request=request), "write")
                else:
                    raise protocol.ProtocolError(f"a frame of type {kind}")
                connection.drop_fds()
        except protocol.ProtocolError as error:
            connection.closing = True
            connection.send({"id": None, "error": {"code": "protocol", "message": str(error)}})

    def _message(self, connection: Connection, message: Message) -> None:
        request, op = message.get("id"), message.get("op")
        if not isinstance(request, int) or isinstance(request, bool) or not 0 < request < 1 << 32 or not isinstance(op, str):
            raise protocol.ProtocolError("a request needs an id from 1 to 4294967295 and an op")
        if op == "hello":
            self._answer(connection, request, lambda who: self._hello(connection, message), None)
            return
        role, action = self._operations.get(op, (None, None))
        if action is None or role is None:
            self._refuse(connection, request, Refused("unknown-operation", f"no operation {op[:64]!r}"))
            return
        self._answer(connection, request, lambda who: action(connection, who, message), role)

    def _answer(self, connection: Connection, request: int, action: Callable[[Any], Message | None], role: str | None) -> None:
        operator = connection.operator
        try:
            if role is not None:
                if operator is None:
                    raise Refused("hello-first", "say hello first")
                self._holder.authority.touch(operator, time.monotonic())
                if not operator.may(role):
                    raise Refused("forbidden", f"this needs the role {role!r}, {operator.name!r} has {operator.role!r}")
            answer = action(operator)
        except Refused as refused:
            self._refuse(connection, request, refused)
        except OSError as error:
            self._refuse(connection, request, Refused("failed", f"{error.strerror or error}"))
        except Exception as error:
            self._holder.loop.bug()
            self._refuse(connection, request, Refused("failed", f"a bug in the holder: {type(error).__name__}"))
        else:
            if request and answer is not LATER:
                connection.send({"id": request, "ok": True, **(answer or {})})

    def _refuse(self, connection: Connection, request: int, refused: Refused) -> None:
        error: Message = {"code": refused.code, "message": refused.message}
        if refused.hint:
            error["hint"] = refused.hint
        if refused.details:
            error["details"] = refused.details
        connection.send({"id": request, "error": error})

    def refuse_dropped(self, chunks: Iterable[Chunk]) -> None:
        """Tell those whose queued input will never be written."""
        for chunk in chunks:
            connection = self._holder.connections.get(chunk.connection)
            if connection is not None and not chunk.answered:
                self._refuse(connection, chunk.request, Refused("busy", "the input was dropped before the terminal took it"))

    def _record(self, what: str, by: Operator, **facts: Any) -> int:
        return self._holder.audit.write(what, {**by.who(), "pid": by.pid}, self._holder.identity.incarnation, **facts)

    # -- being there ------------------------------------------------------------------------------

    def _hello(self, connection: Connection, message: Message) -> Message:
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
        self._record(how, operator, role=operator.role)
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
        found, size = [], 0
        for entry in self._holder.audit.entries(since, limit):
            size += len(str(entry))
            if size > protocol.MAX_FRAME // 2:
                break
            found.append(entry)
        return {"entries": found}

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
        wish = _size(size) if isinstance(size, dict) else None
        if boolean(message, "write") and by.may("write"):
            try:
                self._claim(by, protocol.DEFAULT_TTL, "request")
            except Refused as refused:
                if refused.code != "lease-held":
                    raise
            else:
                if wish is not None:
                    self._set_size(by, wish)
        if holder.state in ("exited", "lost"):
            holder.collected = True
        connection.subscribed = True
        connection.position = position
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
                self._refuse(connection, request, Refused("cancelled", "cancelled"))
                return {}
        raise Refused("not-found", "no such request is waiting")

    # -- writing ----------------------------------------------------------------------------------

    def _claim(self, by: Operator, ttl: float, how: str) -> None:
        """Make `by` the holder of the lease unless somebody else is, or a human has halted the session."""
        if self._holder.halted and by.kind != "human":
            raise Refused("state", "the session is halted: until it is resumed only humans write", state=self._holder.state)
        if self._holder.authority.request(by, ttl, time.monotonic()):
            self._holder.lease_changed(how, by)

    def _input(self, connection: Connection, by: Operator, message: Message) -> Message | None:
        if "base64" in message:
            try:
                data = base64.b64decode(text(message, "base64", protocol.MAX_FRAME), validate=True)
            except binascii.Error:
                raise Refused("bad-request", "'base64' is not base64") from None
        else:
            data = text(message, "text", protocol.MAX_FRAME).encode("utf-8", "surrogateescape")
        return self._type(connection, by, data=data, request=message["id"])

    def _type(self, connection: Connection, by: Operator, *, data: bytes, request: int) -> Message | None:
        holder, master = self._holder, self._holder.master
        if holder.state not in ("running", "paused"):
            raise Refused("state", f"the session is {holder.state}, nobody reads what is typed", state=holder.state)
        if master.fd < 0:
            raise Refused("state", "the session has no terminal", state=holder.state)
        if master.queued + len(data) > protocol.MAX_HELD_INPUT:
            raise Refused("busy", "too much input waits for the terminal already")
        self._claim(by, holder.authority.ttl if holder.authority.holder == by.id else protocol.DEFAULT_TTL, "implicit")
        fd = connection.sock.fileno()
        chunk = Chunk(data, {**by.who(), "pid": by.pid}, by.kind, fd, request, answered=master.held)
        master.put(chunk)
        holder.input_offset = holder.log.end
        return {"held": True, "offset": holder.log.end} if chunk.answered else LATER

    def _resize(self, connection: Connection, by: Operator, message: Message) -> None:
        self._claim(by, protocol.DEFAULT_TTL, "implicit")
        self._set_size(by, _size(message))

    def _set_size(self, by: Operator, size: tuple[int, int, int, int]) -> None:
        if self._holder.master.resize(*size):
            self._record("resize", by, rows=size[0], cols=size[1])
            self._holder.emit("resize", rows=size[0], cols=size[1], by=by.who())

    # -- the lease --------------------------------------------------------------------------------

    def _lease(self) -> Message:
        return {"lease": self._holder.lease(time.monotonic())}

    def _lease_request(self, connection: Connection, by: Operator, message: Message) -> Message:
        ttl = number(message, "ttl", 1, protocol.MAX_TTL, protocol.DEFAULT_TTL)
        try:
            self._claim(by, ttl, "request")
            self._holder.watch_lease()
        except Refused as refused:
            if refused.code != "lease-held" or not boolean(message, "queue"):
                raise
            queue = self._holder.authority.queue
            if not any(waiting == by.id for waiting, _ttl in queue):
                queue.append((by.id, ttl))
            return {**self._lease(), "queued": True}
        return self._lease()

    def _lease_take(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        other = holder.authority.take(by, number(message, "ttl", 1, protocol.MAX_TTL, protocol.DEFAULT_TTL), time.monotonic())
        whom = other.who() if other is not None else None
        holder.lease_changed("take", by, **{"from": whom})
        return {**self._lease(), "from": whom}

    def _lease_grant(self, connection: Connection, by: Operator, message: Message) -> Message:
        heir = self._holder.authority.grant(by, text(message, "to", 32), time.monotonic())
        self._holder.lease_changed("grant", by, to=heir.who())
        return self._lease()

    def _lease_yield(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        if message.get("to") is not None:
            if holder.authority.holder != by.id:
                raise Refused("forbidden", "only the holder of the lease can yield it")
            return self._lease_grant(connection, by, message)
        if holder.authority.release(by):
            holder.lease_changed("yield", by)
            holder.lease_is_free()
        return {}

    def _set_role(self, connection: Connection, by: Operator, message: Message) -> None:
        kind, name = one_of(message, "kind", protocol.KINDS), text(message, "name", 64)
        role = None if message.get("role") is None else one_of(message, "role", protocol.ROLES)
        holder = self._holder
        self._record("set-role", by, of={"kind": kind, "name": name}, role=role)
        for operator in holder.authority.set_ceiling(kind, name, role):
            holder.emit("operator", **operator.who(), role=operator.role, how="role")
            if not operator.may("write") and holder.authority.release(operator):
                holder.lease_changed("take", by, **{"from": operator.who()})
                holder.lease_is_free()

    # -- the tree ---------------------------------------------------------------------------------

    def _needs(self, *states: str) -> None:
        holder = self._holder
        if holder.state not in states:
            raise Refused("state", f"the session is {holder.state}", state=holder.state)
        if holder.checkpointing.active:
            raise Refused("busy", "a checkpoint of this session is being made")

    def _signal(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        number = _signal_number(message.get("signal"))
        to = one_of(message, "to", ("foreground", "session", "leader"), "foreground")
        self._needs("running", "paused")
        self._claim(by, protocol.DEFAULT_TTL, "implicit")
        members = holder.tree.members()
        if to == "foreground":
            found = signal_foreground(holder.master.fd, number, members) if holder.master.fd >= 0 else None
            if found is None:
                raise Refused("not-found", "the terminal has no foreground group")
            count = found
        else:
            count = holder.tree.signal(number, members if to == "session" else members[:1])
        self._record("signal", by, signal=number, to=to, signalled=count)
        holder.emit("signal", signal=number, to=to, by=by.who())
        return {"signalled": count}

    def _pause(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        self._needs("running", "paused")
        method, count = holder.tree.freeze()
        self._record("pause", by, method=method, processes=count)
        if holder.state == "running":
            holder.paused_by = by.who()
            holder.emit("paused", by=by.who(), method=method)
            holder.set_state("paused")
        return {"method": method, "processes": count}

    def _resume(self, connection: Connection, by: Operator, message: Message) -> None:
        holder = self._holder
        self._needs("running", "paused")
        holder.tree.thaw()
        self._record("resume", by)
        holder.halted = False
        if holder.state == "paused":
            holder.paused_by = None
            holder.emit("resumed", by=by.who())
            holder.set_state("running")

    def _halt(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        answer = self._pause(connection, by, message)
        holder.halted = True
        dropped = holder.master.drop(lambda chunk: chunk.kind == "human")
        self.refuse_dropped(dropped)
        count = sum(len(chunk.data) - chunk.at for chunk in dropped)
        writer = holder.authority.operators.get(holder.authority.holder)
        if writer is not None and writer.kind != "human" and writer.id != by.id:
            holder.authority.release(writer)
            holder.lease_changed("halt", by, **{"from": writer.who()})
            holder.lease_is_free()
        self._record("halt", by, dropped=count)
        holder.emit("halted", by=by.who(), dropped=count)
        return {**answer, "dropped": count}

    def _kill(self, connection: Connection, by: Operator, message: Message) -> Message:
        grace = number(message, "grace", 0, 3600, protocol.DEFAULT_GRACE)
        self._needs("running", "paused", "checkpointed", "exited", "lost")
        self._record("kill", by, grace=grace)
        self._holder.emit("killed", by=by.who())
        killing.Kill(self._holder, grace, lambda killed: connection.send({"id": message["id"], "ok": True, "killed": killed}))
        return LATER

    # -- checkpoints, upgrade, the end ------------------------------------------------------------

    def _checkpoint_done(self, connection: Connection, by: Operator, message: Message) -> None:
        checkpoint, ended = text(message, "checkpoint"), boolean(message, "ended")
        self._holder.checkpointing.done(connection, checkpoint, ended)
        self._record("checkpoint", by, checkpoint=checkpoint, ended=ended)

    def _reexec(self, connection: Connection, by: Operator, message: Message) -> Message:
        from . import reexec

        if self._holder.checkpointing.active or self._holder.kills:
            raise Refused("busy", "a checkpoint or a kill of this session is under way")
        self._record("reexec", by)
        reexec.begin(self._holder, connection, message)
        return LATER

    def _shutdown(self, connection: Connection, by: Operator, message: Message) -> None:
        holder = self._holder
        if holder.state in ("running", "paused") and not boolean(message, "force"):
            raise Refused("state", f"the session is {holder.state}; kill it first, or use force", state=holder.state)
        self._record("shutdown", by)
        holder.emit("shutdown", by=by.who())
        holder.loop.running = False


def _replay(connection: Connection, frames: list[bytes]) -> None:
    for frame in frames:
        if not connection.dead:
            connection.event(frame, 0)


def _size(message: Message) -> tuple[int, int, int, int]:
    rows, cols = integer(message, "rows", 1, 65535), integer(message, "cols", 1, 65535)
    return rows, cols, integer(message, "xpixel", 0, 65535, 0), integer(message, "ypixel", 0, 65535, 0)


def _signal_number(value: Any) -> int:
    if isinstance(value, str):
        name = value.upper().removeprefix("SIG")
        value = getattr(signal, f"SIG{name}", None) if name.isalnum() else None
        value = int(value) if isinstance(value, signal.Signals) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < signal.NSIG:
        raise Refused("bad-request", "'signal' must be a signal's name or number")
    return value
