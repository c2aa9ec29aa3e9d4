"""Commands in the session's own shell, run as if they were typed at its prompt.

The shell has hooks (`launch.shell_hooks`).  A command goes through these phases:

- ``asked``: the shell was at its prompt, and the holder's key was typed.  If the hook does not
  answer in time, nothing else is typed and the command is refused.
- ``loaded``: the hook has answered, so it is the shell itself that reads, and the command was sent.
- ``begun``: the mark of its beginning has come; the next mark of an end has its exit code.

An sh has no key.  Its command is typed line by line behind the prompt, and begins when the terminal
has echoed the end of the last line; the next prompt has its exit code.

From the check of the prompt until the shell has the whole command no other input is written
(`Master.reserved`), so that nothing comes between.  One command runs at a time.  A command that the
shell waits for the rest of (an open quote) is interrupted.  A shell that ends, or executes another
program in its place, leaves no mark: while a command runs the shell is looked at twice a second.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import termios
from contextlib import suppress
from typing import Any

from ...proc.tree import ProcessIdentity
from ..screen.shell_marks import BEGIN, END, KEY, MORE, PROMPT, Mark
from .command_end import Ending, of_shell
from .commands import INTERRUPTED, RUNNING, SHELL, SHELL_DIED, Command, Commands
from .event_loop import Loop
from .foreground_report import ForegroundReport
from .master import COMMAND, Chunk, Master
from .operators import Refused
from .processes import Tree, in_group

ASKED, LOADED, BEGUN = "asked", "loaded", "begun"
_KEY = b"\x1e"  # as `launch.shells` bind it
_END_OF_COMMAND = b"\x1f"
_ANSWER = 3.0  # seconds for the shell to answer the key
_BEGINS = 5.0  # seconds after which a command that has not begun is looked at
_LOOK = 0.5  # seconds between two looks at whether the shell lives
_REST_LOOK = 0.1  # seconds between two interrupts of a shell that waits for the rest
_LONGEST_LINE = 4000  # bytes that a terminal takes as one line
_LONGEST = 256 << 10  # bytes of a command
_TIOCSIG = 0x40045436
_SAFE = frozenset(
    b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _-./:=,+@^~[]{}()<>|&;*?#"'
)


def escaped(text: bytes) -> bytes:
    """Return text for ``printf %b``, without a byte that a terminal could interpret."""
    return b"".join(bytes((byte,)) if byte in _SAFE else b"\\0%03o" % byte for byte in text)


class ShellCommands:
    """Runs commands in one session's shell."""

    def __init__(
        self,
        loop: Loop,
        tree: Tree,
        master: Master,
        foreground: ForegroundReport,
        commands: Commands,
    ) -> None:
        self._loop, self._tree, self._master = loop, tree, master
        self._foreground, self._commands = foreground, commands
        self._lines: list[bytes] = []  # of a command for sh that are not typed yet
        self._typed_at = 0  # where the output of the terminal's echo begins
        self._shell_pid = 0  # as the holder sees it
        self._watching = False
        self._payload = b""  # what the hook is sent when it answers
        # all processes when the current command was sent; None: not known since a restore
        self._before: frozenset[ProcessIdentity] | None = None
        self._ending: Ending | None = None  # of the current command
        self._prompted: tuple[int | None, int, str] | None = None  # how it ended, once all is gone

    @property
    def current(self) -> Command | None:
        """Return the command that runs, or is about to."""
        running = self._commands.running(SHELL)
        return running[0] if running else None

    # -- the beginning ----------------------------------------------------------------------------

    def start(self, words: list[str], by: dict[str, Any]) -> Command:
        """Run a command; `Refused` unless the shell is at its prompt."""
        text = words[0] if len(words) == 1 else shlex.join(words)
        data = text.strip("\n").encode("utf-8", "surrogateescape")
        if not data.strip() or b"\0" in data or len(data) > _LONGEST:
            raise Refused("bad-request", "the command is empty, too long, or has a NUL byte")
        self._check()
        report = self._foreground.report()
        assert report is not None
        shell = self._master.marks.shell
        lines = _typed_lines(data, self._master) if shell == "sh" else []
        command = self._commands.add(SHELL, words, by)
        command.shell, self._shell_pid = shell, report["pid"]
        self._before = frozenset(self._tree.members())
        self._master.reserve()
        if shell == "sh":
            command.phase, self._lines = LOADED, lines
            self._type_line(by)
        else:
            command.phase = ASKED
            self._payload = _payload(shell, self._master.marks.nonce, data)
            self._put(_KEY, by)
            self._loop.after(_ANSWER, lambda: self._unanswered(command))
        self._loop.after(_BEGINS, lambda: self._look_at_beginning(command))
        self._watch()
        return command

    def _check(self) -> None:
        """Refuse unless the shell is at its prompt and nothing else is typed."""
        current = self.current
        if current is not None:
            what = shlex.join(current.argv) if len(current.argv) > 1 else current.argv[0]
            text = f"the shell runs another command, {current.id} ({what[:80]})"
            raise Refused("busy", text, command=current.id)
        if self._foreground.at_prompt():
            if self._master.held or self._master.queue or self._master.reserved:
                raise Refused("busy", "other input waits for the terminal")
            return
        found = self._foreground.report()
        if found is None:
            raise Refused("state", "no program is in the terminal's foreground", foreground=None)
        name = shlex.join(found["argv"])[:80]
        if found["shell"]:
            text = f"the shell is not at its prompt ({name}, PID {found['pid']})"
        else:
            text = f"no shell is at its prompt: {name} is in the foreground (PID {found['pid']})"
        raise Refused("state", text, foreground=found)

    def _put(self, data: bytes, by: dict[str, Any]) -> None:
        self._master.put(Chunk(data, by, COMMAND))

    def _type_line(self, by: dict[str, Any]) -> None:
        self._typed_at = self._master.log.end
        self._put(self._lines.pop(0), by)

    def _unanswered(self, command: Command) -> None:
        """The shell has not answered the key: give up before anything else is typed."""
        if command.state == RUNNING and command.phase == ASKED:
            self._master.drop(lambda chunk: chunk.kind != COMMAND)
            self._master.release()
            command.phase = ""
            self._commands.discard(command)

    def _look_at_beginning(self, command: Command) -> None:
        """A command that was sent, and did not begin, was lost if the shell is at its prompt."""
        if command.state == RUNNING and command.phase == LOADED:
            if self._foreground.at_prompt():
                self._finish(command, None, self._master.log.end, INTERRUPTED)
            else:
                self._loop.after(_BEGINS, lambda: self._look_at_beginning(command))

    # -- what the shell reports -------------------------------------------------------------------

    def on_mark(self, mark: Mark) -> None:
        """Handle a mark of the shell."""
        command = self.current
        if mark.kind == KEY:
            self._answer_key(command)
        elif command is None or command.phase == ASKED or self._prompted is not None:
            return
        elif mark.kind == BEGIN:
            self._begin(command, mark.end)
        elif mark.kind == MORE:
            self._more(command)
        elif mark.kind == END:
            if command.begin is None:
                self._begin(command, self._echo_end(command, mark.start))
            # Its output ends here; it is done when the shell prompts, and does not end itself.
            command.end, command.exit_code = mark.start, mark.status
        elif mark.kind == PROMPT:
            end = mark.start if command.end is None else command.end
            state = INTERRUPTED if command.incomplete or command.end is None else ""
            self._finish(command, command.exit_code, end, state)

    def _answer_key(self, command: Command | None) -> None:
        if command is not None and command.phase == ASKED:
            command.phase = LOADED
            self._typed_at = self._master.log.end
            self._put(self._payload, command.by)
            self._loop.soon(self._master.release)
        else:
            nothing = b"00000000" if self._master.marks.shell == "fish" else _END_OF_COMMAND
            self._put(nothing, {})

    def _begin(self, command: Command, offset: int) -> None:
        if command.phase == LOADED:
            command.phase = BEGUN
            self._master.release()
            self._commands.begin(command, offset)

    def _more(self, command: Command) -> None:
        """The shell asks for the rest of a command."""
        if self._lines:
            self._loop.soon(lambda: self._type_line(command.by))
            return
        if not command.incomplete:
            command.incomplete = True
            self._loop.soon(lambda: self._interrupt_rest(command))

    def _interrupt_rest(self, command: Command) -> None:
        """Interrupt a shell that waits for the rest of a command, once it does.

        A signal that comes while its editor is being set up could be lost.
        """
        if command.state != RUNNING or self._master.marks.state != MORE:
            return
        report = self._foreground.report()
        if report is not None and report["reading_tty"]:
            self._interrupt()
        self._loop.after(_REST_LOOK, lambda: self._interrupt_rest(command))

    def output(self) -> None:
        """Output has come: it may be the echo of the last line that was typed to an sh."""
        command = self.current
        if command is None or command.shell != "sh" or command.phase != LOADED or self._lines:
            return
        end = self._echo_end(command, -1)
        if end >= 0:
            self._begin(command, end)

    def _echo_end(self, command: Command, default: int) -> int:
        """Return the offset behind the line with the command; `default` if it has not ended."""
        at, lines = self._typed_at, 1
        if command.shell != "sh":
            text = command.argv[0] if len(command.argv) == 1 else shlex.join(command.argv)
            lines += text.strip("\n").count("\n")
        log = self._master.log
        shown = log.read(at, min(log.end, at + 2 * _LONGEST))
        found = -1
        for _ in range(lines):
            found = shown.find(b"\n", found + 1)
            if found < 0:
                return default
        return max(at, log.base) + found + 1

    def _finish(self, command: Command, code: int | None, end: int, state: str = "") -> None:
        self._lines = []
        self._master.release()
        if self._ending is not None and self._ending.left():
            self._prompted = code, end, state
            return
        self._ending = self._prompted = None
        self._commands.finish(command, code, end, state)

    # -- the end of the shell ---------------------------------------------------------------------

    def session_over(self) -> None:
        """The session has ended, and the shell with it."""
        self._ending = None
        if (command := self.current) is not None:
            end = self._master.log.end if command.end is None else command.end
            self._finish(command, None, end, SHELL_DIED)

    def resume(self) -> None:
        """Go on with a command that was there before a re-exec or a restore."""
        command = self.current
        if command is None:
            return
        self._shell_pid, self._before, self._ending = 0, None, None
        if command.phase == ASKED:
            self._unanswered(command)
            return
        if self._prompted is None and command.end is not None and self._foreground.at_prompt():
            self._finish(command, command.exit_code, command.end)  # it was being killed
            return
        self._loop.after(_BEGINS, lambda: self._look_at_beginning(command))
        self._watch()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._loop.after(_LOOK, self._look)

    def _look(self) -> None:
        """End a command whose shell has ended, or has executed another program."""
        self._watching = False
        command = self.current
        if command is None:
            return
        if not self._master.held and self._master.fd >= 0 and not self._lives():
            self._master.drain(1 << 20)
            if command.state == RUNNING:
                self._finish(command, None, self._master.log.end, SHELL_DIED)
                return
        self._watch()

    def _lives(self) -> bool:
        inner = self._master.marks.pid
        if self._shell_pid and self._foreground.is_shell(inner, self._shell_pid):
            return True
        for identity in self._tree.members():  # after a restore it has another PID here
            if self._foreground.is_shell(inner, identity.pid):
                self._shell_pid = identity.pid
                return True
        return False

    # -- interrupting -----------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Interrupt what is in the foreground, as the key for it does."""
        if self._master.fd >= 0:
            fcntl.ioctl(self._master.fd, _TIOCSIG, int(signal.SIGINT))

    def kill(self, command: Command, grace: float | None) -> None:
        """Interrupt a command, and after `grace` seconds (None: never) kill what it still runs."""
        if command.phase == ASKED:
            self._unanswered(command)
        elif command.state == RUNNING:
            if grace is not None:
                self._ending = Ending(
                    self._loop,
                    self._tree,
                    self._started,
                    runs=lambda: command.state == RUNNING and self._prompted is None,
                    may_signal=self._may_kill,
                    over=lambda: self._ended(command),
                )
                self._ending.begin(grace)
            self._interrupt()

    def _started(self) -> list[ProcessIdentity]:
        """Return the processes that the current command has started."""
        members = self._tree.members()
        others = [one for one in members if one.pid != self._shell_pid]
        with suppress(OSError):
            if self._before is not None:
                return of_shell(members, self._shell_pid, self._before)
            return in_group(others, os.tcgetpgrp(self._master.fd))
        return []

    def _may_kill(self, hard: bool) -> bool:
        """Return whether the command may be signalled now; interrupt a loop of the shell itself if
        the grace period is over.
        """
        if self._master.fd < 0 or self._master.held:
            return False
        report = self._foreground.report() if hard and self._prompted is None else None
        if report is not None and report["pid"] == self._shell_pid:
            self._interrupt()
        return True

    def _ended(self, command: Command) -> None:
        """Report the end that waited for the rest of the command's processes."""
        self._ending, prompted = None, self._prompted
        if prompted is not None and command.state == RUNNING:
            self._finish(command, *prompted)


def _payload(shell: str, nonce: str, data: bytes) -> bytes:
    """Return what the hook reads: the mark's name and the command."""
    text = b"aid=" + nonce.encode() + b":" + escaped(data)
    return b"%08d" % len(text) + text if shell == "fish" else text + _END_OF_COMMAND


def _typed_lines(data: bytes, master: Master) -> list[bytes]:
    """Return a command as it is typed to an sh, line by line; `Refused` if a line is too long.

    Several lines are a group, so that the shell runs none of them before it has read the last.
    """
    characters = termios.tcgetattr(master.fd)[6]
    kill, quote = characters[termios.VKILL], characters[termios.VLNEXT]
    lines = data.split(b"\n")
    if len(lines) > 1:
        lines = [b"{ " + lines[0], *lines[1:], b"}"]
    if max(map(len, lines)) > _LONGEST_LINE:
        raise Refused("bad-request", f"a line is longer than {_LONGEST_LINE} bytes")
    typed = [
        b"".join(
            quote + bytes((byte,)) if byte < 0x20 or byte == 0x7F else bytes((byte,))
            for byte in line
        )
        + b"\n"
        for line in lines
    ]
    return [kill + typed[0], *typed[1:]]
