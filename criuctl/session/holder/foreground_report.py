"""What the terminal of a session waits for: the program in the foreground, as `status` reports it.

All of it is asked of the kernel at the moment of the request: nothing is guessed from the output.
A program waits for input (`reading_tty`) when a thread of its process group sleeps until the
terminal has input, and no input is on its way to it.

A shell is at its prompt (`at_prompt`) if all of this holds, and only then:

- the last mark of its hooks (`screen.shell_marks`) is that of a prompt;
- the foreground process is the very process and program that printed it: its environment when it
  was executed has the nonce, which the hooks have removed since;
- it waits for input, its leader itself;
- of an sh, which has no line editor and cannot mark the beginning of a command: the terminal edits
  and echoes lines, and no line has ended since the prompt.  Else it may be the builtin ``read``.
"""

from __future__ import annotations

from typing import Any

from ...proc import foreground
from ...proc.procfs import read_raw
from ..screen.shell_marks import PROMPT
from .master import Master
from .processes import Tree
from .session_state import SessionState

_NONCE = "CRIUCTL_SHELL"  # as in `launch.shell_hooks`
_MOST_PENDING = 1 << 20  # bytes of output that are read for an answer
_LONGEST_LINE = 64 << 10  # bytes that are typed behind a prompt, and echoed


class ForegroundReport:
    """Reports the foreground of one session's terminal."""

    def __init__(self, session: SessionState, tree: Tree, master: Master) -> None:
        self._session, self._tree, self._master = session, tree, master
        master.marks.verify = self.is_shell
        master.signal_keys.ready = self.ready

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
            "at_prompt": self._at_prompt(group[0]),
            "shell": self._shell(group[0]),
        }

    def at_prompt(self) -> bool:
        """Whether the session's shell is at its prompt now."""
        group = self._group()
        return bool(group) and self._at_prompt(group[0])

    def ready(self) -> bool:
        """Whether the program has handled all that the terminal was given, and waits for more."""
        group = self._group()
        return bool(group) and not self._master.unread_by_programs and self._waits(group)

    def is_shell(self, inner: int, pid: int = 0) -> bool:
        """Whether `pid` (0: the leader of the foreground) is the session's shell.

        `inner` is the shell's PID in its own PID namespace.
        """
        group = [pid] if pid else self._group()
        if not group or foreground.inner_pid(group[0]) != inner:
            return False
        mine = f"{_NONCE}={self._master.marks.nonce}".encode()
        try:
            return mine in read_raw(f"/proc/{group[0]}/environ").split(b"\0")
        except OSError:
            return False

    def _shell(self, leader: int) -> str | None:
        marks = self._master.marks
        return marks.shell if marks.nonce and self.is_shell(marks.pid, leader) else None

    def _at_prompt(self, leader: int) -> bool:
        master, marks = self._master, self._master.marks
        if not marks.nonce or self._session.state != "running" or master.unread:
            return False
        terminal = foreground.Terminal.of(master.slave)
        if not foreground.waits_for_input(leader, terminal):
            return False
        # What it printed before it began to wait, the beginning of a command perhaps, is in the
        # terminal's buffer by now.
        master.drain(_MOST_PENDING)
        if marks.state != PROMPT or not self.is_shell(marks.pid, leader):
            return False
        return marks.shell != "sh" or (master.line_mode and not self._line_has_ended())

    def _line_has_ended(self) -> bool:
        """Whether a line has ended since the prompt."""
        log, at = self._master.log, self._master.marks.at
        return log.end - at > _LONGEST_LINE or b"\n" in log.read(at, log.end)

    def _group(self) -> list[int]:
        if self._master.fd < 0 or self._session.state not in ("running", "paused"):
            return []
        return foreground.foreground(self._master.fd, self._members)

    def _members(self) -> list[int]:
        return [identity.pid for identity in self._tree.members()]

    def _reads(self, group: list[int]) -> bool:
        """Whether a process of the group waits for input, its leader in the first place."""
        return self._session.state == "running" and not self._master.unread and self._waits(group)

    def _waits(self, group: list[int]) -> bool:
        terminal = foreground.Terminal.of(self._master.slave)
        if foreground.waits_for_input(group[0], terminal):
            return True
        leader = foreground.group_of(group[0])
        others = [
            pid for pid in self._members() if pid != group[0] and foreground.group_of(pid) == leader
        ]
        return any(foreground.waits_for_input(pid, terminal) for pid in others)
