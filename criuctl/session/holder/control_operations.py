"""The operations on the tree and on the holder itself: signals, standing still, ending, checkpoints, upgrade."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from .. import protocol
from . import handover, helper_processes, kill
from .connection import Connection
from .operators import Operator, Refused
from .request_values import LATER, Message, Operations, boolean, integer, number, one_of, text
from .terminal_queries import TERMINAL

if TYPE_CHECKING:
    from .holder import Holder
    from .requests import Requests
    from .write_operations import Writing


class Steering:
    """What changes more than the terminal."""

    def __init__(self, holder: Holder, requests: Requests, writing: Writing) -> None:
        self._holder, self._requests, self._writing = holder, requests, writing
        checkpointing = holder.checkpointing
        self.operations: Operations = {
            "signal": ("write", self._signal),
            "pause": ("write", self._pause),
            "resume": ("write", self._resume),
            "halt": ("write", self._halt),
            "kill": ("admin", self._kill),
            "fence": ("admin", self._fence),
            "self-fence": ("admin", self._self_fence),
            "checkpoint-prepare": ("admin", lambda c, o, m: checkpointing.prepare(c, m)),
            "checkpoint-seized": ("admin", lambda c, o, m: checkpointing.seized(c)),
            "checkpoint-begin": ("admin", lambda c, o, m: checkpointing.begin(c, o)),
            "checkpoint-commit": ("admin", lambda c, o, m: checkpointing.commit(c, text(m, "checkpoint"))),
            "checkpoint-thawed": ("admin", lambda c, o, m: checkpointing.thawed(c)),
            "checkpoint-done": ("admin", self._checkpoint_done),
            "checkpoint-abort": ("admin", lambda c, o, m: checkpointing.abort(c)),
            "adopt": ("admin", checkpointing.adopt),
            "settle": ("admin", lambda c, o, m: checkpointing.settle(c)),
            "spawn": ("admin", lambda c, o, m: helper_processes.spawn(holder, c, m)),
            "moved": ("admin", self._moved),
            "reexec": ("admin", self._reexec),
            "shutdown": ("admin", self._shutdown),
        }

    # -- the tree ---------------------------------------------------------------------------------

    def _needs(self, *states: str) -> None:
        if self._holder.state not in states:
            raise Refused("state", f"the session is {self._holder.state}", state=self._holder.state)

    def _needs_tree(self, *other_states: str) -> None:
        """It is there (or the session is in one of these states), and no dump or restore has it in its hands."""
        self._needs("running", "paused", *other_states)
        if self._holder.checkpointing.seizing:
            raise Refused("busy", "a checkpoint of this session is being made, or restored")

    def _signal(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        number = _signal_number(message.get("signal"))
        to = one_of(message, "to", ("foreground", "session", "leader"), "foreground")
        self._needs_tree()
        self._writing.claim(by, protocol.DEFAULT_TTL, "implicit", soft=True)
        members = holder.tree.members()
        if to == "foreground":
            found = holder.tree.signal_foreground(holder.master.fd, number, members) if holder.master.fd >= 0 else None
            if found is None:
                raise Refused("not-found", "the terminal has no foreground group")
            count = found
        else:
            count = holder.tree.signal(number, members if to == "session" else members[:1])
        self._requests.record("signal", by, signal=number, to=to, signalled=count)
        holder.emit("signal", signal=number, to=to, by=by.who())
        return {"signalled": count}

    def _pause(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        self._needs_tree()
        method, count = holder.tree.freeze()
        if not method:
            raise Refused("state", "the session's program has just ended", state=holder.state)
        self._requests.record("pause", by, method=method, processes=count)
        if holder.deadman.holds:
            holder.paused_by = by.who()  # it stays so when the lease is renewed
        if holder.state == "running":
            holder.paused_by = by.who()
            holder.emit("paused", by=by.who(), method=method)
            holder.set_state("paused")
        return {"method": method, "processes": count}

    def _resume(self, connection: Connection, by: Operator, message: Message) -> None:
        holder = self._holder
        self._needs_tree()
        if holder.deadman.holds:
            holder.deadman.until = None
        holder.tree.thaw()
        self._requests.record("resume", by)
        holder.halted = False
        if holder.state == "paused":
            holder.paused_by = None
            holder.emit("resumed", by=by.who())
            holder.set_state("running")

    def _halt(self, connection: Connection, by: Operator, message: Message) -> Message:
        holder = self._holder
        answer = self._pause(connection, by, message)
        holder.halted = True
        dropped = holder.master.drop(lambda chunk: chunk.kind in ("human", TERMINAL))
        self._requests.refuse_dropped(dropped)
        count = sum(len(chunk.data) - chunk.at for chunk in dropped)
        writer = holder.authority.operators.get(holder.authority.holder)
        if writer is not None and writer.kind != "human" and writer.id != by.id:
            holder.authority.release(writer)
            holder.leasing.changed("halt", by, **{"from": writer.who()})
            holder.leasing.free()
        self._requests.record("halt", by, dropped=count)
        holder.emit("halted", by=by.who(), dropped=count)
        return {**answer, "dropped": count}

    def _kill(self, connection: Connection, by: Operator, message: Message) -> Message:
        grace = number(message, "grace", 0, protocol.MAX_GRACE, protocol.DEFAULT_GRACE)
        self._needs_tree("checkpointed", "exited", "lost")
        self._requests.record("kill", by, grace=grace)
        self._holder.deadman.until = None
        self._holder.checkpointing.arrived()
        self._holder.emit("killed", by=by.who())
        kill.Kill(self._holder, grace, lambda killed: connection.send({"id": message["id"], "ok": True, "killed": killed}))
        return LATER

    def _fence(self, connection: Connection, by: Operator, message: Message) -> Message:
        """Another host has the session: freeze this copy and tell everybody.  However it ends, it is lost here."""
        facts: Message = {"reason": text(message, "reason", 1024), "host": text(message, "host")}
        facts |= {"epoch": integer(message, "epoch", 0, 1 << 62)}
        answer = self._pause(connection, by, message)
        self._holder.identity.facts["fenced"] = facts
        self._requests.record("fence", by, **facts)
        self._holder.emit("fenced", by=by.who(), **facts)
        self._holder.write_state()
        return answer

    def _self_fence(self, connection: Connection, by: Operator, message: Message) -> Message:
        """Run for so many seconds more, and then stand still; 0: for ever."""
        self._needs("running", "paused")
        self._holder.deadman.extend(number(message, "seconds", 0, 1e9, 0))
        return {"state": self._holder.state}

    # -- checkpoints, upgrade, the end ------------------------------------------------------------

    def _checkpoint_done(self, connection: Connection, by: Operator, message: Message) -> None:
        checkpoint, ended = text(message, "checkpoint"), boolean(message, "ended")
        self._holder.checkpointing.done(connection, checkpoint, ended)
        self._requests.record("checkpoint", by, checkpoint=checkpoint, ended=ended)

    def _moved(self, connection: Connection, by: Operator, message: Message) -> None:
        holder = self._holder
        self._needs("checkpointed")
        to, host = text(message, "to"), text(message, "host")
        incarnation = int(number(message, "incarnation", 0, 1 << 62, 0)) or holder.identity.incarnation + 1
        holder.moved = {"to": to, "host": host, "incarnation": incarnation}
        self._requests.record("moved", by, to=to, host=host)
        holder.emit("moved", **holder.moved)
        holder.write_state()
        holder.loop.after(protocol.MOVED_LINGER, holder.end_moved)

    def _reexec(self, connection: Connection, by: Operator, message: Message) -> Message:
        if handover.busy(self._holder):
            raise Refused("busy", "a checkpoint, a restore or a kill of this session is under way")
        self._requests.record("reexec", by)
        handover.begin(self._holder, connection, message)
        return LATER

    def _shutdown(self, connection: Connection, by: Operator, message: Message) -> None:
        holder = self._holder
        if holder.state in ("running", "paused") and not boolean(message, "force"):
            raise Refused("state", f"the session is {holder.state}; kill it first, or use force", state=holder.state)
        self._requests.record("shutdown", by)
        holder.emit("shutdown", by=by.who())
        holder.loop.running = False


def _signal_number(value: Any) -> int:
    if isinstance(value, str):
        name = value.upper().removeprefix("SIG")
        value = getattr(signal, f"SIG{name}", None) if name.isalnum() else None
        value = int(value) if isinstance(value, signal.Signals) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < signal.NSIG:
        raise Refused("bad-request", "'signal' must be a signal's name or number")
    return value
