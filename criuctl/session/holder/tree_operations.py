"""The operations on the processes of a session: signals, standing still, ending, fencing."""

from __future__ import annotations

import signal
from typing import Any

from .. import protocol
from .audit_log import AuditWriter
from .checkpointing import Checkpointing
from .clients import Clients
from .connection import Connection
from .events import Events
from .kill import Kills
from .lease_timer import Leasing
from .master import Master
from .operators import Operator, Refused
from .processes import Tree
from .replies import refuse_dropped
from .request_values import LATER, Message, Operations, boolean, integer, number, one_of, text
from .self_fence import SelfFence
from .session_state import SessionState
from .status_report import StatusReport
from .terminal_queries import TERMINAL


class TreeOperations:
    """What acts on the tree of one session."""

    def __init__(
        self,
        session: SessionState,
        tree: Tree,
        master: Master,
        clients: Clients,
        leasing: Leasing,
        events: Events,
        audit: AuditWriter,
        kills: Kills,
        self_fence: SelfFence,
        checkpointing: Checkpointing,
        report: StatusReport,
    ) -> None:
        self._session, self._tree, self._master, self._clients = session, tree, master, clients
        self._leasing, self._events, self._audit, self._kills = leasing, events, audit, kills
        self._fencing, self._checkpointing, self._report = self_fence, checkpointing, report
        self.operations: Operations = {
            "signal": ("write", self._signal),
            "pause": ("write", self._pause),
            "resume": ("write", self._resume),
            "halt": ("write", self._halt),
            "kill": ("admin", self._kill),
            "fence": ("admin", self._fence),
            "self-fence": ("admin", self._self_fence),
        }

    def _needs_tree(self, *other_states: str) -> None:
        """Refuse unless there is a tree, or the session is in one of these states.

        Refuse too while a dump or a restore has the tree in its hands.
        """
        self._session.needs("running", "paused", *other_states)
        if self._checkpointing.seizing:
            raise Refused("busy", "a checkpoint of this session is being made, or restored")

    # -- signals ----------------------------------------------------------------------------------

    def _signal(self, connection: Connection, by: Operator, message: Message) -> Message:
        number = _signal_number(message.get("signal"))
        to = one_of(message, "to", ("foreground", "session", "leader"), "foreground")
        self._needs_tree()
        self._leasing.claim(by, protocol.DEFAULT_TTL, "implicit", soft=True)
        members = self._tree.members()
        if to == "foreground":
            fd = self._master.fd
            found = self._tree.signal_foreground(fd, number, members) if fd >= 0 else None
            if found is None:
                raise Refused("not-found", "the terminal has no foreground group")
            count = found
        else:
            count = self._tree.signal(number, members if to == "session" else members[:1])
        self._audit.record("signal", by, signal=number, to=to, signalled=count)
        self._events.emit("signal", signal=number, to=to, by=by.who())
        return {"signalled": count}

    # -- standing still ---------------------------------------------------------------------------

    def _pause(self, connection: Connection, by: Operator, message: Message) -> Message:
        session = self._session
        self._needs_tree()
        method, count = self._tree.freeze()
        if not method:
            text = "the session's program has just ended"
            raise Refused("state", text, state=session.state)
        self._audit.record("pause", by, method=method, processes=count)
        if self._fencing.holds:
            session.paused_by = by.who()  # it stays so when its home is confirmed again
        if session.state == "running":
            session.paused_by = by.who()
            self._events.emit("paused", by=by.who(), method=method)
            session.set_state("paused")
        return {"method": method, "processes": count}

    def _resume(self, connection: Connection, by: Operator, message: Message) -> None:
        session = self._session
        stay_out = boolean(message, "agents_stay_out")
        if stay_out and not by.may("admin"):
            raise Refused("forbidden", "only an admin may keep the agents out")
        if session.halted and by.kind == "agent":
            raise Refused("forbidden", "an agent cannot resume a session that was halted")
        self._needs_tree()
        if stay_out:
            for kind in ("agent", "service"):
                self._leasing.limit(kind, protocol.ANY, "observe", by)
        if self._fencing.holds:
            self._fencing.stop()
        self._tree.thaw()
        self._audit.record("resume", by)
        session.halted = False
        if session.state == "paused":
            session.paused_by = None
            self._events.emit("resumed", by=by.who())
            session.set_state("running")

    def _halt(self, connection: Connection, by: Operator, message: Message) -> Message:
        answer = self._pause(connection, by, message)
        self._session.halted = True
        dropped = self._master.drop(lambda chunk: chunk.kind in ("human", TERMINAL))
        refuse_dropped(self._clients.connections, dropped)
        count = sum(len(chunk.data) - chunk.at for chunk in dropped)
        authority = self._leasing.authority
        writer = authority.operators.get(authority.holder)
        if writer is not None and writer.kind != "human" and writer.id != by.id:
            self._leasing.withdraw("halt", by, writer)
        self._audit.record("halt", by, dropped=count)
        self._events.emit("halted", by=by.who(), dropped=count)
        return {**answer, "dropped": count}

    # -- the end ----------------------------------------------------------------------------------

    def _kill(self, connection: Connection, by: Operator, message: Message) -> Message:
        grace = number(message, "grace", 0, protocol.MAX_GRACE, protocol.DEFAULT_GRACE)
        self._needs_tree("checkpointed", "exited", "lost")
        self._audit.record("kill", by, grace=grace)
        self._fencing.stop()
        self._checkpointing.arrived()
        self._events.emit("killed", by=by.who())
        request = message["id"]
        self._kills.begin(
            grace,
            lambda killed: connection.send({"id": request, "ok": True, "killed": killed}),
        )
        return LATER

    def _fence(self, connection: Connection, by: Operator, message: Message) -> Message:
        """Freeze this copy: another host has the session.  However it ends, it is lost here."""
        facts: Message = {"reason": text(message, "reason", 1024), "host": text(message, "host")}
        facts |= {"epoch": integer(message, "epoch", 0, 1 << 62)}
        answer = self._pause(connection, by, message)
        self._session.identity.facts["fenced"] = facts
        self._audit.record("fence", by, **facts)
        self._events.emit("fenced", by=by.who(), **facts)
        self._report.write()
        return answer

    def _self_fence(self, connection: Connection, by: Operator, message: Message) -> Message:
        """Run for so many seconds more, and then stand still; 0: run for ever."""
        self._session.needs("running", "paused")
        self._fencing.extend(number(message, "seconds", 0, 1e9, 0))
        return {"state": self._session.state}


def _signal_number(value: Any) -> int:
    if isinstance(value, str):
        name = value.upper().removeprefix("SIG")
        value = getattr(signal, f"SIG{name}", None) if name.isalnum() else None
        value = int(value) if isinstance(value, signal.Signals) else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not 1 <= value < signal.NSIG:
        raise Refused("bad-request", "'signal' must be a signal's name or number")
    return int(value)
