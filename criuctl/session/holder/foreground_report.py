"""What the terminal of a session waits for: the program in the foreground, as `status` reports it.

All of it is asked of the kernel at the moment of the request: nothing is guessed from the output.
A program waits for input (`reading_tty`) when a thread of its process group sleeps until the
terminal has input, and no input is on its way to it.
"""

from __future__ import annotations

from typing import Any

from ...proc import foreground
from .master import Master
from .processes import Tree
from .session_state import SessionState


class ForegroundReport:
    """Reports the foreground of one session's terminal."""

    def __init__(self, session: SessionState, tree: Tree, master: Master) -> None:
        self._session, self._tree, self._master = session, tree, master

    def report(self) -> dict[str, Any] | None:
        """Return the value of ``foreground`` in the status; None: there is no such program."""
        group = self._group()
        found = foreground.program(group[0]) if group else None
        if found is None:
            return None
        return {
            "pid": found.pid,
            "argv": found.argv,
            "cwd": found.cwd,
            "reading_tty": self._reads(group),
            "echo": self._master.echoes,
        }

    def _group(self) -> list[int]:
        if self._master.fd < 0 or self._session.state not in ("running", "paused"):
            return []
        return foreground.foreground(self._master.fd, self._members)

    def _members(self) -> list[int]:
        return [identity.pid for identity in self._tree.members()]

    def _reads(self, group: list[int]) -> bool:
        """Whether a process of the group waits for input, its leader in the first place."""
        if self._session.state != "running" or self._master.unread:
            return False
        terminal = foreground.Terminal.of(self._master.slave)
        if foreground.waits_for_input(group[0], terminal):
            return True
        leader = foreground.group_of(group[0])
        others = [
            pid for pid in self._members() if pid != group[0] and foreground.group_of(pid) == leader
        ]
        return any(foreground.waits_for_input(pid, terminal) for pid in others)
