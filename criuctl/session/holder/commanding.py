"""All that a holder knows of the foreground, the shell and the commands of its session.

It makes the parts that belong together, and hands their state to the next program of the holder, to
the holder of a restored session, and back when an older checkpoint is restored here.
"""

from __future__ import annotations

from typing import Any

from .commands import Commands
from .environment import SessionEnvironment
from .event_loop import Loop
from .foreground_report import ForegroundReport
from .helper_processes import HelperProcesses
from .master import Master
from .new_commands import NewCommands
from .processes import Tree
from .session_state import SessionState
from .shell_commands import ShellCommands


class Commanding:
    """The foreground, the shell and the commands of one session."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        tree: Tree,
        master: Master,
        helpers: HelperProcesses,
        environment: SessionEnvironment,
    ) -> None:
        self._loop, self._marks = loop, master.marks
        self.commands = Commands()
        self.foreground = ForegroundReport(session, tree, master)
        self.in_shell = ShellCommands(loop, tree, master, self.foreground, self.commands)
        self.new = NewCommands(loop, tree, helpers, self.foreground, self.commands, environment)

    def session_over(self) -> None:
        """The session has ended: so have its commands."""
        self.in_shell.session_over()
        self.new.session_over()

    def state(self) -> dict[str, Any]:
        """Return what the next holder needs, of this session or of a restored one."""
        self.new.look_at_all()
        return {
            **self._marks.to_dict(),
            "commands": self.commands.to_dict(),
            "refused": self.new.refused,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._marks.restore(state)
        self.commands.restore(state.get("commands") or {})
        self.new.refused = list(state.get("refused") or ())
        self._loop.soon(self.in_shell.resume)

    def returned(self, state: dict[str, Any]) -> None:
        """A tree was restored that was dumped with this state; an older holder recorded none."""
        if state:
            self.restore(state)
        self.new.returned()
