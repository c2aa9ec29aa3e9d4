"""The requests `wait` that have no answer yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .commands import RUNNING, Commands
from .connection import Connection
from .output_log import OutputLog
from .session_state import SessionState

_NOT_TAKEN = "the shell did not take the command: another key was pressed before, perhaps"


@dataclass
class Wait:
    """One of them."""

    connection: Connection
    request: int
    what: str
    offset: int = 0
    states: list[str] = field(default_factory=list)
    command: str = ""


class Waits:
    """The waits of all clients; `on_collected` is called when one is given the exit status."""

    def __init__(
        self,
        session: SessionState,
        log: OutputLog,
        on_collected: Callable[[], None],
        commands: Commands,
    ) -> None:
        self._session, self._log, self._on_collected = session, log, on_collected
        self._commands = commands
        self.waiting: list[Wait] = []

    def add(self, wait: Wait) -> None:
        """Keep it; `answer` answers it, at once perhaps."""
        self.waiting.append(wait)

    def count(self, connection: Connection) -> int:
        """Return how many waits one client has."""
        return sum(wait.connection is connection for wait in self.waiting)

    def remove(self, connection: Connection, request: int) -> bool:
        """Forget one wait; whether it was there."""
        for wait in self.waiting:
            if wait.connection is connection and wait.request == request:
                self.waiting.remove(wait)
                return True
        return False

    def lost(self, connection: Connection) -> None:
        """Forget the waits of a client that is gone."""
        self.waiting = [wait for wait in self.waiting if wait.connection is not connection]

    def answer(self) -> None:
        """Answer every wait whose condition holds now."""
        for wait in list(self.waiting):
            if wait.connection.dead:
                continue  # lost while an earlier one of its own was answered
            answer = self._answer(wait)
            if answer is not None:
                self.waiting.remove(wait)
                wait.connection.send({"id": wait.request, **answer})

    def _answer(self, wait: Wait) -> dict[str, Any] | None:
        session, end = self._session, self._log.end
        if wait.what == "exit" and session.over:
            self._on_collected()
            code, number = session.exit
            return {"ok": True, "exit_code": code, "exit_signal": number, "state": session.state}
        if wait.what == "output":
            if end > wait.offset:
                return {"ok": True, "end": end}
            if session.over:
                message = "the session has ended, nothing more will be printed"
                details = {"state": session.state}
                return {"error": {"code": "state", "message": message, "details": details}}
        if wait.what in ("begun", "command"):
            return self._of_command(wait)
        if wait.what == "state" and session.state in wait.states:
            return {"ok": True, "state": session.state}
        return None

    def _of_command(self, wait: Wait) -> dict[str, Any] | None:
        """Answer when a command has begun, or has ended."""
        command = self._commands.find(wait.command)
        if command is None:
            message = self._commands.discarded.pop(wait.command, "") or _NOT_TAKEN
            return {"error": {"code": "state", "message": message}}
        met = command.begun if wait.what == "begun" else command.state != RUNNING
        return {"ok": True, "command": command.report()} if met else None

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "waits": [
                [w.connection.sock.fileno(), w.request, w.what, w.offset, w.states, w.command]
                for w in self.waiting
            ]
        }

    def restore(self, state: dict[str, Any], connections: dict[int, Connection]) -> None:
        """Take over what `to_state` returned."""
        for fd, request, what, offset, states, *command in state["waits"]:
            if fd in connections:
                self.add(Wait(connections[fd], request, what, offset, states, *command))
