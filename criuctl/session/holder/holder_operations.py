"""The operations of criuctl itself: checkpoints and restores, helpers, moves, upgrades, the end."""

from __future__ import annotations

from collections.abc import Callable

from .adoption import Adoption
from .audit_log import AuditWriter
from .checkpointing import Checkpointing
from .connection import Connection
from .events import Events
from .handover import Handover
from .helper_processes import HelperProcesses
from .lifetime import Lifetime
from .operators import Operator, Refused
from .request_values import LATER, Message, Operations, boolean, number, text
from .session_state import SessionState
from .status_report import StatusReport


class HolderOperations:
    """What acts on the holder itself."""

    def __init__(
        self,
        session: SessionState,
        events: Events,
        audit: AuditWriter,
        checkpointing: Checkpointing,
        adoption: Adoption,
        helpers: HelperProcesses,
        handover: Handover,
        lifetime: Lifetime,
        report: StatusReport,
        came_back: Callable[[Connection, Message], Message],
    ) -> None:
        self._session, self._events, self._audit = session, events, audit
        self._checkpointing, self._handover = checkpointing, handover
        self._lifetime, self._report = lifetime, report
        self._adoption, self._came_back = adoption, came_back
        self.operations: Operations = {
            "checkpoint-prepare": ("admin", lambda c, o, m: checkpointing.prepare(c, m)),
            "checkpoint-seized": ("admin", lambda c, o, m: checkpointing.seized(c)),
            "checkpoint-begin": ("admin", lambda c, o, m: checkpointing.begin(c, o)),
            "checkpoint-commit": (
                "admin",
                lambda c, o, m: checkpointing.commit(c, text(m, "checkpoint")),
            ),
            "checkpoint-thawed": ("admin", lambda c, o, m: checkpointing.thawed(c)),
            "checkpoint-done": ("admin", self._checkpoint_done),
            "checkpoint-abort": ("admin", lambda c, o, m: checkpointing.abort(c)),
            "adopt": ("admin", self._adopt),
            "settle": ("admin", lambda c, o, m: adoption.settle(c)),
            "spawn": ("admin", lambda c, o, m: helpers.spawn(c, m)),
            "moved": ("admin", self._moved),
            "reexec": ("admin", self._reexec),
            "shutdown": ("admin", self._shutdown),
        }

    def _adopt(self, connection: Connection, by: Operator, message: Message) -> Message:
        self._adoption.adopt(connection, by, message)
        return self._came_back(connection, message)

    def _checkpoint_done(self, connection: Connection, by: Operator, message: Message) -> None:
        checkpoint, ended = text(message, "checkpoint"), boolean(message, "ended")
        self._checkpointing.done(connection, checkpoint, ended)
        self._audit.record("checkpoint", by, checkpoint=checkpoint, ended=ended)

    def _moved(self, connection: Connection, by: Operator, message: Message) -> None:
        session = self._session
        session.needs("checkpointed")
        to, host = text(message, "to"), text(message, "host")
        given = int(number(message, "incarnation", 0, 1 << 62, 0))
        incarnation = given or session.identity.incarnation + 1
        session.moved = {"to": to, "host": host, "incarnation": incarnation}
        self._audit.record("moved", by, to=to, host=host)
        self._events.emit("moved", **session.moved)
        self._report.write()
        self._lifetime.linger_for_followers()

    def _reexec(self, connection: Connection, by: Operator, message: Message) -> Message:
        if self._handover.busy:
            text = "a checkpoint, a restore or a kill of this session is under way"
            raise Refused("busy", text)
        self._audit.record("reexec", by)
        self._handover.begin(connection, message)
        return LATER

    def _shutdown(self, connection: Connection, by: Operator, message: Message) -> None:
        state = self._session.state
        if state in ("running", "paused") and not boolean(message, "force"):
            text = f"the session is {state}; kill it first, or use force"
            raise Refused("state", text, state=state)
        self._audit.record("shutdown", by)
        self._events.emit("shutdown", by=by.who())
        self._lifetime.end()
