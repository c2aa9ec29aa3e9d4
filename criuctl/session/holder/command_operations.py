"""The operations on commands: start one, look at them, end one."""

from __future__ import annotations

import base64
import os
from typing import Any

from .. import protocol
from .audit_log import AuditWriter
from .checkpointing import Checkpointing
from .command_files import STREAMS
from .commanding import Commanding
from .commands import NEW, SHELL, Command
from .connection import Connection
from .event_loop import Loop
from .events import Events
from .lease_timer import Leasing
from .operators import Operator, Refused
from .request_values import FAR, LATER, Message, Operations, fitting, integer, number, one_of, text
from .session_state import SessionState
from .waits import Wait, Waits

_MOST_WORDS = 4096
_MOST = 256 << 10  # bytes of output in one answer


class CommandOperations:
    """What operators do with commands."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        leasing: Leasing,
        events: Events,
        audit: AuditWriter,
        waits: Waits,
        checkpointing: Checkpointing,
        commanding: Commanding,
    ) -> None:
        self._loop, self._session, self._leasing = loop, session, leasing
        self._events, self._audit, self._waits = events, audit, waits
        self._checkpointing, self._commands = checkpointing, commanding.commands
        self._in_shell, self._new = commanding.in_shell, commanding.new
        commanding.commands.on_change = self._changed
        self.operations: Operations = {
            "command-start": ("write", self._start),
            "command": ("observe", self._command),
            "commands": ("observe", self._all),
            "command-kill": ("write", self._kill),
            "command-read": ("observe", self._read),
        }

    def _start(self, connection: Connection, by: Operator, message: Message) -> Message:
        kind = one_of(message, "kind", (SHELL, NEW), SHELL)
        words, options = _words(message), _options(message)
        fds = connection.take_fds()
        try:
            return self._begin(connection, by, message["id"], kind, words, options, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _begin(
        self,
        connection: Connection,
        by: Operator,
        request: int,
        kind: str,
        words: list[str],
        options: Message,
        fds: list[int],
    ) -> Message:
        self._session.needs("running")
        if self._checkpointing.seizing:
            raise Refused("busy", "a checkpoint of this session is being made, or restored")
        who = {**by.who(), "pid": by.pid}
        if kind == NEW:
            command = self._new.start(words, who, options, fds[0] if fds else None)
        else:
            self._leasing.claim(by, protocol.DEFAULT_TTL, "implicit", soft=True)
            command = self._in_shell.start(words, who)
        self._audit.record("command", by, command=command.id, kind=kind, argv=words)
        self._waits.add(Wait(connection, request, "begun", command=command.id))
        self._loop.soon(self._waits.answer)
        return LATER

    def _command(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"command": self._report(self._commands.get(text(message, "command", 32)))}

    def _report(self, command: Command) -> Message:
        streams = self._new.sizes(command) if command.kind == NEW else None
        return {**command.report(), "streams": streams}

    def _read(self, connection: Connection, by: Operator, message: Message) -> Message:
        command = self._commands.get(text(message, "command", 32))
        stream = one_of(message, "stream", STREAMS)
        start, most = integer(message, "from", 0, FAR, 0), integer(message, "max", 0, FAR, _MOST)
        if command.kind != NEW:
            raise Refused("bad-request", "the output of this command is the session's")
        report = self._report(command)  # before the bytes: they are all there if it has ended
        at, data = self._new.read(command, stream, start, min(most, _MOST))
        end = report["streams"][stream]["end"]
        return {
            "command": report,
            "from": at,
            "to": at + len(data),
            "end": end,
            "base64": base64.b64encode(data).decode(),
        }

    def _all(self, connection: Connection, by: Operator, message: Message) -> Message:
        newest = [command.report() for command in reversed(self._commands.all())]
        return {"commands": fitting(newest)[::-1]}

    def _kill(self, connection: Connection, by: Operator, message: Message) -> Message:
        command = self._commands.get(text(message, "command", 32))
        grace = None
        if message.get("grace", 0) is not None:
            grace = number(message, "grace", 0, protocol.MAX_GRACE, protocol.DEFAULT_GRACE)
        self._session.needs("running", "paused")
        self._audit.record("command-kill", by, command=command.id, grace=grace)
        (self._new if command.kind == NEW else self._in_shell).kill(command, grace)
        return {"command": command.report()}

    def _changed(self, command: Command) -> None:
        self._events.emit(
            "command", command=command.id, state=command.state, exit_code=command.exit_code
        )
        self._loop.soon(self._waits.answer)


def _words(message: Message) -> list[str]:
    words: Any = message.get("argv")
    if (
        not isinstance(words, list)
        or not 0 < len(words) <= _MOST_WORDS
        or not all(isinstance(word, str) and "\0" not in word for word in words)
    ):
        raise Refused("bad-request", "'argv' must be a list of texts")
    return words


def _options(message: Message) -> Message:
    """Return folder, variables and user of a new command; `Refused`."""
    env = message.get("env") or {}
    if not isinstance(env, dict) or not all(
        isinstance(value, str) and "\0" not in name + value and name and "=" not in name
        for name, value in env.items()
    ):
        raise Refused("bad-request", "'env' must map names to texts")
    options: Message = {"env": env}
    for key in ("cwd", "user"):
        if message.get(key) is not None:
            options[key] = text(message, key, 4096)
            if "\0" in options[key]:
                raise Refused("bad-request", f"{key!r} has a NUL")
    return options
