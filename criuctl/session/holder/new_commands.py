"""Commands that run next to the terminal: processes of the session's tree, with files for output.

The tree's init forks a child, in which `proc.commandchild` starts the command
(`proc.joined_process` is run as a helper of the holder).  So it is in the session's namespaces and
control group, and is dumped and restored with it.  It writes standard output and error and its exit
code into memory files of its own.  The holder holds these files open too: it serves clients from
them, also after the command's end, and needs nothing else to go on after a restore, when it opens
those of the restored process.

A file grows as long as the command prints; the holder frees all but the newest part of it
(`_KEPT`).  A command that runs costs a timer; its end is known from a pidfd.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import CriuctlError
from ...proc import foreground
from ...proc.procfs import read_raw
from ...proc.tree import ProcessIdentity
from .command_end import Ending, below
from .command_files import STREAMS, Files, open_files, without_hooks
from .commands import INTERRUPTED, NEW, RUNNING, Command, Commands
from .environment import SessionEnvironment
from .event_loop import READ, Loop, Timer
from .foreground_report import ForegroundReport
from .helper_processes import HelperProcesses
from .operators import Refused
from .processes import Tree, adopts

# Not imported: a holder that runs no such command stays small.
_PROC = Path(foreground.__file__).parent
_FILES = (1, 2, 3)  # descriptors of the command's process: both streams, and the exit code
_KEPT = 16 << 20  # bytes of a stream that are kept
_KEPT_ENDED = 1 << 20  # ... once so many commands have ended after it:
_NEWEST = 8
_LOOK = 0.1  # seconds between two looks at how much a command has printed


class NewCommands:
    """Runs commands next to one session's terminal."""

    def __init__(
        self,
        loop: Loop,
        tree: Tree,
        helpers: HelperProcesses,
        foreground: ForegroundReport,
        commands: Commands,
        environment: SessionEnvironment,
    ) -> None:
        self._loop, self._tree, self._helpers = loop, tree, helpers
        self._foreground, self._commands = foreground, commands
        self._environment = environment
        self._files: dict[str, Files] = {}
        self._endings: dict[str, Ending] = {}  # of the commands that are being killed
        self._timer: Timer | None = None
        self.is_dumped: Callable[[], bool] = lambda: False  # or about to be
        self.refused: list[str] = []  # what the kernel refuses to the session's programs

    # -- the beginning ----------------------------------------------------------------------------

    def start(
        self, words: list[str], by: dict[str, Any], options: dict[str, Any], stdin: int | None
    ) -> Command:
        """Start a command; `options` are ``cwd``, ``env`` and ``user``."""
        root = self._tree.root
        if root is None or not adopts(root.pid):
            raise Refused("state", "the session's first process is not an init that adopts")
        env, cwd = self._surroundings(root)
        env |= options.get("env") or {}
        cwd = env["PWD"] = str(options.get("cwd") or cwd)
        command = self._commands.add(NEW, words, by)
        refused = ",".join(self.refused) or "-"
        child = [sys.executable, "-I", "-S", "-E", str(_PROC / "commandchild.py")]
        argv = [*child, _name(command), cwd, str(options.get("user") or ""), refused, *words]
        ours, theirs = socket.socketpair()
        helper = [sys.executable, "-I", "-S", "-E", str(_PROC / "joined_process.py")]
        with theirs:
            order = json.dumps({"argv": argv, "env": env, "files": list(_FILES)}).encode()
            number = 3
            try:
                self._helpers.start(
                    [*helper, str(number), str(root.pid)],
                    {number: theirs.fileno()},
                    lambda status: self._started(command, ours),
                )
            except OSError:
                ours.close()
                self._commands.discard(command)
                raise
        ours.settimeout(5.0)  # the helper reads at once
        fds = [] if stdin is None else [stdin]
        sent = socket.send_fds(ours, [order], fds)
        ours.sendall(order[sent:])
        ours.shutdown(socket.SHUT_WR)
        return command

    def _surroundings(self, root: ProcessIdentity) -> tuple[dict[str, str], str]:
        """Return environment and folder of the program in the foreground, or of the first one."""
        found = self._foreground.report()
        pids = [found["pid"]] if found is not None else []
        pids += [one.pid for one in self._tree.members() if one.pid != root.pid][:1]
        for pid in (*pids, root.pid):
            try:
                data = read_raw(f"/proc/{pid}/environ")
                cwd = os.readlink(f"/proc/{pid}/cwd")
            except OSError:
                continue
            pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry)
            env = without_hooks({name: value for name, _, value in pairs})
            return self._environment.applied(env), cwd
        return {}, "/"

    def _started(self, command: Command, channel: socket.socket) -> None:
        """The helper has ended: take over the command's files."""
        with channel:
            channel.settimeout(1.0)
            try:
                data, fds, _flags, _address = socket.recv_fds(
                    channel, 1 << 16, len(_FILES), socket.MSG_CMSG_CLOEXEC
                )
                answer = json.loads(data)
            except (OSError, ValueError):
                answer, fds = {"error": "its helper ended without an answer"}, []
        if "error" in answer or len(fds) != len(_FILES):
            for fd in fds:
                os.close(fd)
            command.phase = f"the command cannot be started: {answer.get('error')}"
            self._commands.discard(command)
            return
        files = Files(fds[0], fds[1], fds[2])
        files.process = ProcessIdentity(int(answer["pid"]), int(answer["start_time"]))
        command.pid = foreground.inner_pid(files.process.pid)
        self._files[command.id] = files
        self._watch(command, files)
        self._commands.begin(command, 0)

    # -- the end ----------------------------------------------------------------------------------

    def _watch(self, command: Command, files: Files) -> None:
        assert files.process is not None
        try:
            files.pidfd = files.process.open_pidfd()
        except CriuctlError:
            self._loop.soon(lambda: self._ended(command))
            return
        self._loop.watch(files.pidfd, READ, lambda events: self._ended(command))
        self._tick()

    def _ended(self, command: Command) -> None:
        """The process that waited for the command has ended; not if a dump has ended it."""
        files = self._files[command.id]
        if files.pidfd >= 0:
            self._loop.unwatch(files.pidfd)
            os.close(files.pidfd)
            files.pidfd = -1
        self.look(command)
        ending = self._endings.get(command.id)
        if ending is not None and ending.left():
            return
        if command.state == RUNNING and not self.is_dumped():
            self._commands.finish(command, None, self._size(command, "stdout"), INTERRUPTED)
            self._shrink()

    def look(self, command: Command) -> None:
        """Finish the command if its exit code is there."""
        files = self._files.get(command.id)
        ending = self._endings.get(command.id)
        if files is None or command.state != RUNNING or (ending is not None and ending.left()):
            return
        with suppress(OSError, ValueError):
            code = int(os.pread(files.code, 16, 0))
            self._commands.finish(command, code, self._size(command, "stdout"))
            self._shrink()

    def look_at_all(self) -> None:
        """Finish the commands whose exit codes are there: a dump records what is known."""
        for command in self._commands.running(NEW):
            self.look(command)

    def session_over(self) -> None:
        """The session has ended, and its commands with it."""
        self._endings.clear()
        for command in self._commands.running(NEW):
            self.look(command)
            self._commands.finish(command, None, self._size(command, "stdout"), INTERRUPTED)

    def kill(self, command: Command, grace: float | None) -> None:
        """Ask a command to end, and after `grace` seconds kill it; None: interrupt it."""
        if command.state != RUNNING:
            return
        if grace is not None and command.id not in self._endings:
            ending = self._endings[command.id] = Ending(
                self._loop,
                self._tree,
                lambda: self._processes(command),
                runs=lambda: command.state == RUNNING and not self._has_code(command),
                may_signal=lambda _hard: not self.is_dumped(),
                over=lambda: self._all_ended(command),
            )
            ending.begin(grace)
        number = signal.SIGINT if grace is None else signal.SIGTERM
        self._tree.signal(number, self._processes(command))

    def _processes(self, command: Command) -> list[ProcessIdentity]:
        """Return the processes of a command, but not the one that waits for it."""
        files = self._files.get(command.id)
        if files is None or files.process is None:
            return []
        session = files.process.pid
        found = below(self._tree.members(), lambda one, _parent: os.getsid(one.pid) == session)
        return [one for one in found if one.pid != session]

    def _has_code(self, command: Command) -> bool:
        files = self._files.get(command.id)
        return files is None or os.fstat(files.code).st_size > 0

    def _all_ended(self, command: Command) -> None:
        """No process of a command that was killed is left."""
        self._endings.pop(command.id, None)
        self.look(command)
        files = self._files.get(command.id)
        if files is not None and files.pidfd < 0:
            self._ended(command)

    # -- output -----------------------------------------------------------------------------------

    def read(self, command: Command, stream: str, start: int, most: int) -> tuple[int, bytes]:
        """Return bytes of a stream and the offset of the first, which may be above `start`."""
        files = self._files.get(command.id)
        size = self._size(command, stream)
        if files is None:
            return size, b""  # they ended with an earlier holder
        start = min(max(start, files.base[stream]), size)
        return start, os.pread(files.of(stream), min(most, size - start), start)

    def sizes(self, command: Command) -> dict[str, dict[str, int]]:
        """Return for each stream which offsets are kept."""
        found = {}
        for stream in STREAMS:
            files, size = self._files.get(command.id), self._size(command, stream)
            base = files.base[stream] if files is not None else size
            found[stream] = {"base": min(base, size), "end": size}
        return found

    def _size(self, command: Command, stream: str) -> int:
        files = self._files.get(command.id)
        if files is None:
            return command.sizes.get(stream, 0)
        command.sizes[stream] = files.size(stream)
        return command.sizes[stream]

    def _tick(self) -> None:
        """Free what running commands have printed long ago."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        running = self._commands.running(NEW)
        for command in running:
            files = self._files.get(command.id)
            if files is None or files.process is None:
                continue
            self._free(command, _KEPT)
            if files.pidfd < 0 and not files.process.alive():
                self._ended(command)  # during a dump that did not end the tree
        if running:
            self._timer = self._loop.after(_LOOK, self._tick)

    def _shrink(self) -> None:
        """Keep less of commands that have ended before others; none of those without a record."""
        ended = [command for command in self._commands.all() if command.state != RUNNING]
        for command in ended[:-_NEWEST]:
            if command.id in self._files:
                self._free(command, _KEPT_ENDED)
        known = {command.id for command in self._commands.all()}
        for identifier in [one for one in self._files if one not in known]:
            self._close(self._files.pop(identifier))

    def _free(self, command: Command, kept: int) -> None:
        for stream in STREAMS:
            self._files[command.id].free(stream, kept)
            self._size(command, stream)

    def _close(self, files: Files) -> None:
        if files.pidfd >= 0:
            self._loop.unwatch(files.pidfd)
            os.close(files.pidfd)
        files.close()

    # -- re-exec, checkpoints ---------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """Return the descriptors that the next program of this holder takes over."""
        return [fd for one in self._files.values() for fd in (one.out, one.err, one.code)]

    def to_dict(self) -> dict[str, Any]:
        """Return what the next program of this holder needs."""
        return {
            identifier: {
                "fds": [files.out, files.err, files.code],
                "process": files.process._asdict() if files.process is not None else None,
                "base": files.base,
            }
            for identifier, files in self._files.items()
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `to_dict` returned."""
        for identifier, value in values.items():
            for fd in value["fds"]:
                os.set_inheritable(fd, False)
            process = value["process"]
            out, err, code = value["fds"]
            files = Files(out, err, code, base=value["base"])
            files.process = ProcessIdentity(**process) if process is not None else None
            self._files[identifier] = files
            command = self._commands.find(identifier)
            if command is not None and command.state == RUNNING and files.process is not None:
                self._watch(command, files)
        for command in self._commands.running(NEW):
            if command.id not in self._files:  # its helper had not ended
                self._commands.finish(command, None, 0, INTERRUPTED)

    def returned(self) -> None:
        """A tree was restored: open the files of the commands in it."""
        for command in self._commands.running(NEW):
            if command.id in self._files:
                self._close(self._files.pop(command.id))
            files = None
            for identity in self._tree.members():
                if foreground.inner_pid(identity.pid) == command.pid:
                    files = open_files(identity, _name(command))
            if files is None:
                end = command.sizes.get("stdout", 0)
                self._commands.finish(command, None, end, INTERRUPTED)
                continue
            self._files[command.id] = files
            self._watch(command, files)


def _name(command: Command) -> str:
    """Return the beginning of the names of a command's files."""
    return f"criuctl-{command.id}"
