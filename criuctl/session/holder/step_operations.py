"""The operations on steps of operators, and of criuctl's own dumps, restores and supervisors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...steps.states import StepRefused
from .connection import Connection
from .operators import Operator, Refused
from .request_values import FAR, LATER, Message, Operations, fitting, integer, number
from .step_replication import Replication
from .steps import Again, Peer, Steps

_PATIENCE = 60.0  # seconds that a dump may wait for steps at most

_Do = Callable[[Peer, Message], Message]


class StepOperations:
    """What operators may do with steps. The processes of the tree have a socket of their own."""

    def __init__(self, steps: Steps, replication: Replication) -> None:
        self._steps, self._replication = steps, replication
        self.operations: Operations = {
            "step-begin": ("write", self._durable(steps.begin)),
            "step-done": ("write", self._durable(steps.done)),
            "step-failed": ("write", self._durable(steps.failed)),
            "step-progress": ("write", self._plain(steps.progress)),
            "step-resolve": ("write", self._durable(steps.resolve)),
            "step-show": ("observe", self._plain(steps.show)),
            "step-list": ("observe", self._list),
            "step-quiet": ("admin", self._quiet),
            "step-merge": ("admin", self._plain(self._merge)),
            "step-replicate": ("admin", self._replicate),
            "step-replica-stop": ("admin", lambda c, o, m: replication.stop()),
        }

    def _plain(self, do: _Do) -> Callable[[Connection, Operator, Message], Message]:
        """Return an operation that is answered at once."""

        def operation(connection: Connection, by: Operator, message: Message) -> Message:
            who = {**by.who(), "pid": by.pid}
            try:
                return do(Peer(os.getuid(), connection.pid, False, who), message)
            except StepRefused as refused:
                raise _refused(refused) from None
            except Again:
                text = "a checkpoint of this session is being made"
                raise Refused("busy", text, hint="Ask again in a moment.", again=True) from None

        return operation

    def _durable(self, do: _Do) -> Callable[[Connection, Operator, Message], Message]:
        """Return an operation that is answered when its record is where it has to be."""
        plain = self._plain(do)

        def operation(connection: Connection, by: Operator, message: Message) -> Message:
            body, request = plain(connection, by, message), message["id"]
            needed = self._replication.needed(str(message.get("step")))
            if not needed:
                return body
            answer = {"id": request, "ok": True, **body}
            self._replication.wait(needed, lambda: connection.send(answer))
            return LATER

        return operation

    # -- looking ----------------------------------------------------------------------------------

    def _list(self, connection: Connection, by: Operator, message: Message) -> Message:
        since = integer(message, "since", 0, FAR, 0)
        found = self._steps.listed(since)
        shown = fitting(found)
        return {"steps": shown, "more": len(shown) < len(found)}

    # -- dumps, restores, supervisors -------------------------------------------------------------

    def _quiet(self, connection: Connection, by: Operator, message: Message) -> Message:
        seconds, request = number(message, "seconds", 0, _PATIENCE, 0), message["id"]

        def answer() -> None:
            body = {"in_flight": self._steps.running_once()}
            connection.send({"id": request, "ok": True, **body})

        try:
            self._steps.quiet(connection, seconds, answer)
        except StepRefused as refused:
            raise _refused(refused) from None
        return LATER

    def _merge(self, peer: Peer, message: Message) -> Message:
        given: Any = message.get("steps")
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise StepRefused("bad-request", "'steps' must be a list of objects")
        checkpoint, replicated = message.get("checkpoint"), message.get("replicated")
        if not isinstance(replicated, bool | None):
            raise StepRefused("bad-request", "'replicated' must be true or false")
        fresh = self._steps.merge(given, checkpoint=checkpoint is True, replicated=replicated)
        return {"merged": fresh}

    def _replicate(self, connection: Connection, by: Operator, message: Message) -> Message:
        stored = integer(message, "stored", 0, FAR, 0)
        return self._replication.replicate(connection, stored, message["id"])


def _refused(refused: StepRefused) -> Refused:
    return Refused(refused.code, refused.message, refused.hint, **refused.details)
