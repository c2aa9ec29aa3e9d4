"""What the calls of a session return.

Each is the JSON of the command with the same name as an object; what has no field of its own here
is in `facts`, under the keys that `criuctl help json-and-exit-codes` describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from msgspec import Struct, field

from ..errors import CriuctlError

DONE = "done"


class CommandResult(Struct, frozen=True):
    """A command that ran in a session, with what it has printed."""

    session: str
    command_id: str
    state: str  # done, running, interrupted, shell-died, timed-out
    exit_code: int | None  # None unless it is done
    offset: int  # of the first byte of its output
    end: int  # behind the last byte that was read
    missing: int  # bytes of its output that were not kept long enough to be read
    streams: Mapping[str, bytes]  # output; of a new command stdout and stderr
    error: CriuctlError | None = None  # what the command line would end with

    @property
    def output_bytes(self) -> bytes:
        """Its output; of a new command, its standard output."""
        return self.streams.get("output", self.streams.get("stdout", b""))

    @property
    def output(self) -> str:
        """`output_bytes` as text, undecodable bytes replaced."""
        return self.output_bytes.decode(errors="replace")

    @property
    def stdout(self) -> str:
        """The standard output of a new command as text; in the shell it is `output`."""
        return self.output

    @property
    def stderr(self) -> str:
        """The standard error of a new command as text; in the shell it is part of `output`."""
        return self.streams.get("stderr", b"").decode(errors="replace")

    @property
    def truncated(self) -> bool:
        """Whether a part of its output is `missing`."""
        return self.missing > 0

    @property
    def ok(self) -> bool:
        """Whether it is done with the exit code 0."""
        return self.state == DONE and self.exit_code == 0


class Checkpoint(Struct, frozen=True):
    """A checkpoint in a store; pass it to `Session.restore`."""

    id: str
    session: str
    number: int
    incarnation: int
    store: str
    created: str  # RFC 3339
    labels: Mapping[str, str]
    bytes: Mapping[str, int]  # memory, files, new, stored
    # Known of a checkpoint that this process has made:
    frozen_ms: float | None = None  # how long the program stood still
    total_ms: float | None = None
    warnings: tuple[str, ...] = ()
    degraded: bool = False  # stored, but something optional has failed: exit code 11
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """Its name for the command line: ``NAME@NUMBER``."""
        return f"{self.session}@{self.number}"

    @classmethod
    def of_dump(cls, body: Mapping[str, Any]) -> Self:
        """Return the checkpoint that a dump has made."""
        return cls(
            id=body["checkpoint"],
            session=body["session"],
            number=body["number"],
            incarnation=body["incarnation"],
            store=body["store"],
            created=body["created"],
            labels=body["labels"],
            bytes=body["bytes"],
            frozen_ms=body["frozen_ms"],
            total_ms=body["total_ms"],
            warnings=tuple(body["warnings"]),
            degraded=body["degraded"],
            facts=body,
        )

    @classmethod
    def of_list(cls, body: Mapping[str, Any], store: str) -> Self:
        """Return a checkpoint that a store lists."""
        return cls(
            id=body["id"],
            session=body["session"],
            number=body["number"],
            incarnation=body["incarnation"],
            store=store,
            created=body["created"],
            labels=body["labels"],
            bytes=body["bytes"],
            facts=body,
        )


class GroupCheckpoint(Struct, frozen=True):
    """A checkpoint of a group of sessions."""

    id: str
    group: str
    number: int
    created: str  # RFC 3339
    frozen_ms: float  # how long the member stood still that did so for the longest time
    members: tuple[Mapping[str, Any], ...]  # session, checkpoint, and others
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return it from the JSON of ``snapshot --group`` or ``list --group``."""
        return cls(
            body["checkpoint"],
            body["group"],
            body["number"],
            body["created"],
            body["frozen_ms"],
            tuple(body["members"]),
            tuple(body.get("warnings", ())),
        )


class SessionInfo(Struct, frozen=True):
    """A session as `ls` and `status` show it."""

    name: str
    id: str
    state: str  # running, paused, checkpointed, exited, lost
    pid: int | None
    incarnation: int  # 1, and one more after each restore
    exit_code: int | None
    command: Sequence[str]
    labels: Mapping[str, str]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return it from the JSON of the commands."""
        return cls(
            name=body["session"],
            id=body["id"],
            state=body["state"],
            pid=body["pid"],
            incarnation=body["incarnation"],
            exit_code=body["exit_code"],
            command=body["command"],
            labels=body["labels"],
            facts=body,
        )


class Screen(Struct, frozen=True):
    """Lines of a session's screen, or of its output as a terminal would show it."""

    lines: Sequence[str]
    offset: int  # where the next `capture` goes on
    row: int  # of the cursor, from 0
    column: int
    rows: int  # of the terminal
    columns: int
    facts: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return it from the JSON of `capture`."""
        cursor, size = body["cursor"], body["size"]
        return cls(
            lines=body["lines"],
            offset=body["offset"],
            row=cursor["row"],
            column=cursor["column"],
            rows=size["rows"],
            columns=size["cols"],
            facts=body,
        )


class Sent(Struct, frozen=True):
    """What was typed."""

    offset: int  # in the output: what the program answers is at or after it
    bytes: int
    held: bool  # a dump is under way, and the program gets it afterwards


class Match(Struct, frozen=True):
    """What `wait_match` has found."""

    text: str
    groups: Sequence[str | None]
    offset: int  # of the output, behind what was searched


class Exit(Struct, frozen=True):
    """How a session has ended."""

    exit_code: int | None  # as a shell's ``$?``; None if it is unknown
    exit_signal: int | None
