"""The commands that clients have run in a session, as records of its holder.

A record outlives the client that asked for it, a re-exec, a dump and a restore.  The newest hundred
that have ended are kept.  States:

- ``running``: it has not ended, or has not begun yet (`Command.begun`).
- ``done``: it has ended by itself, with an exit code.
- ``interrupted``: it was ended by an interrupt, or otherwise without an exit code.
- ``shell-died``: the shell in which it ran has ended, or has become another program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .operators import Refused

RUNNING, DONE, INTERRUPTED, SHELL_DIED = "running", "done", "interrupted", "shell-died"
SHELL, NEW = "shell", "new"  # kinds: it runs in the session's shell, or next to the terminal
_KEPT = 100
_LONGEST = 500  # characters of a command that are reported
_INTERRUPTED_CODE = 130  # as shells report SIGINT


@dataclass
class Command:
    """One command; offsets are those of the session's output, or of its own standard output."""

    id: str
    kind: str
    argv: list[str]
    by: dict[str, Any] = field(default_factory=dict)  # the operator that asked for it
    state: str = RUNNING
    exit_code: int | None = None
    begin: int | None = None  # offset of the first byte of its output; None: not begun yet
    end: int | None = None  # offset behind the last byte
    started: float = 0.0
    ended: float | None = None
    shell: str = ""  # the kind of shell that runs it
    incomplete: bool = False  # the shell waited for the rest of it, and was interrupted
    pid: int = 0  # of a new one, in the session's PID namespace
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of its streams, when last seen
    phase: str = ""  # the owner's; why it was discarded

    @property
    def begun(self) -> bool:
        """Whether the command runs, or has ended."""
        return self.begin is not None or self.state != RUNNING

    def report(self) -> dict[str, Any]:
        """Return the record as the protocol has it."""
        found = asdict(self) | {"argv": shortened(self.argv)}
        del found["phase"], found["sizes"]
        if self.state != DONE:
            found["exit_code"] = None
        return found


def shortened(argv: list[str]) -> list[str]:
    """Return the words of a command, or as much of their beginning as is reported."""
    left, words = _LONGEST, list[str]()
    for word in argv:
        if len(word) > left:
            return [*words, word[: max(0, left)] + "..."]
        words.append(word)
        left -= len(word) + 1
    return words


class Commands:
    """The records of one session; `on_change` is called when one has begun or ended."""

    def __init__(self) -> None:
        self._records: dict[str, Command] = {}
        self._last = 0
        self.discarded: dict[str, str] = {}  # those that have never begun, and why
        self.on_change: Callable[[Command], None] = lambda command: None

    def add(self, kind: str, argv: list[str], by: dict[str, Any]) -> Command:
        """Return a new record."""
        self._last += 1
        command = Command(f"c{self._last}", kind, argv, by, started=round(time.time(), 3))
        self._records[command.id] = command
        ended = [record.id for record in self._records.values() if record.state != RUNNING]
        for identifier in ended[: max(0, len(ended) - _KEPT)]:
            del self._records[identifier]
        return command

    def get(self, identifier: str) -> Command:
        """Return a record; `Refused` if there is none."""
        command = self._records.get(identifier)
        if command is None:
            raise Refused("not-found", f"this session has no command {identifier!r}")
        return command

    def find(self, identifier: str) -> Command | None:
        """Return a record, or None."""
        return self._records.get(identifier)

    def all(self) -> list[Command]:
        """Return all records, oldest first."""
        return list(self._records.values())

    def running(self, kind: str) -> list[Command]:
        """Return the commands of this kind that have not ended."""
        return [one for one in self.all() if one.kind == kind and one.state == RUNNING]

    def discard(self, command: Command) -> None:
        """Forget a command that has never begun."""
        self._records.pop(command.id, None)
        self.discarded[command.id] = command.phase
        self.on_change(command)

    def begin(self, command: Command, offset: int) -> None:
        """Note that a command has begun, with its output at this offset."""
        if command.begin is None:
            command.begin = offset
            self.on_change(command)

    def finish(self, command: Command, code: int | None, end: int, state: str = "") -> None:
        """Note that a command has ended, with this exit code if it is known."""
        if command.state != RUNNING:
            return
        if not state:
            state = INTERRUPTED if code in (None, _INTERRUPTED_CODE) else DONE
        command.state, command.ended = state, round(time.time(), 3)
        command.exit_code = code if state == DONE else None
        command.begin = end if command.begin is None else min(command.begin, end)
        command.end = end
        command.phase = ""
        self.on_change(command)

    # -- re-exec, checkpoints ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all records, for the next program of this holder, or for the next holder.

        A frame has to hold them: of a long command only the beginning is passed on.
        """
        records = [asdict(record) for record in self.all()]
        for record in records:
            record["argv"] = shortened(record["argv"])
        return {"last": self._last, "records": records}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `to_dict`, of this or another version, returned.

        A record of the same command replaces the present one: an older checkpoint may have been
        restored, in which a command still runs.
        """
        known = {one.name for one in fields(Command)}
        self._last = max(self._last, int(values.get("last", 0)))
        for record in values.get("records", ()):
            command = Command(**{key: value for key, value in record.items() if key in known})
            self._records[command.id] = command
