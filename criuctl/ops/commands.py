"""Commands in a session: run one, wait for one, print what one has printed, end one.

Every operation returns the same facts about its command, with the output so far.  A command that
does not end in time is no error here: its state is ``timed-out``, and what it has printed is there.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import CriuctlError, SessionGone, TimedOut, UsageError, WrongState
from ..quoting import quoted
from ..session.client import commands, typed_commands
from ..session.client.commands import Cleaner, Followed, New
from ..session.screen.plain_text import strip
from .sessions import check_seconds, connect
from .typing import writer

if TYPE_CHECKING:
    from ..session.client.session import Session

Show = Callable[[str, bytes], None]  # the stream: output, or stdout and stderr of a new command
_SETTLE, _LOOK = 3.0, 0.05  # seconds for a shell to come to its prompt; between two looks
_BEGINS = 15.0  # seconds for a command to begin in the shell
_STARTS = 60.0  # ... and next to the terminal
_ACTIONS = ("leave", "interrupt", "kill")
_SHELLS = ("bash", "zsh", "fish", "sh", "dash")
_ENDS = 5.0  # seconds for a command that was interrupted, or killed, to end
_TYPED = 60.0  # seconds for a command that is typed, unless the caller says another time
_OLD = "the holder of session {!r} is of an older version, which runs no commands"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a command may take, in seconds, and what happens then."""

    timeout: float | None = None
    silence: float | None = None  # without output
    action: str = "leave"  # leave, interrupt or kill
    begin: float = _STARTS  # until a new command has begun

    def __post_init__(self) -> None:
        for seconds in (self.timeout, self.silence):
            check_seconds(seconds)
        if self.action not in _ACTIONS:
            raise UsageError(f"on a timeout: {self.action!r} is none of {', '.join(_ACTIONS)}")


class _Output:
    """Passes output on to `show`, with the name of its stream, or keeps it."""

    def __init__(self, show: Show | None, *, plain: bool = False) -> None:
        self._show, self._plain = show, plain
        self._kept: dict[str, bytearray] = {}
        self._carry: dict[str, bytes] = {}

    def take(self, data: bytes) -> None:
        """Take the next bytes of a command in the shell, whose streams are one."""
        self._pass_on("output", data)

    def take_of(self, stream: str, data: bytes) -> None:
        """Take the next bytes of a stream of a new command."""
        if self._plain:
            data, self._carry[stream] = strip(self._carry.get(stream, b"") + data)
        self._pass_on(stream, data)

    def _pass_on(self, stream: str, data: bytes) -> None:
        if self._show is not None:
            self._show(stream, data)
        else:
            self._kept.setdefault(stream, bytearray()).extend(data)

    def facts(self, *, new: bool = False) -> dict[str, Any]:
        """Return what was kept as text, or in base64 if it is none; nothing if it was shown."""
        if self._show is not None:
            return {}
        names = ("stdout", "stderr") if new else ("output",)
        found = encoded({name: bytes(self._kept.get(name, b"")) for name in names})
        return {"output": found["stdout"], **found} if new else found


def encoded(streams: Mapping[str, bytes]) -> dict[str, str]:
    """Return these bytes as texts, or all in base64 if one is none, and their ``encoding``."""
    try:
        return {**{name: data.decode() for name, data in streams.items()}, "encoding": "utf-8"}
    except UnicodeDecodeError:
        texts = {name: base64.b64encode(data).decode() for name, data in streams.items()}
        return {**texts, "encoding": "base64"}


def run_in_shell(
    config: Config,
    name: str,
    words: Sequence[str],
    show: Show | None,
    limits: Limits,
    *,
    detach: bool = False,
    take: bool = False,
    plain: bool = False,
) -> dict[str, Any]:
    """Run a command in the session's shell; its output goes to `show`, or into the answer.

    One word is a line of shell.  With `detach`, return when it has begun.  `WrongState` if the
    shell is not at its prompt.
    """
    with writer(config, name, take=take) as session:
        record = begin(session, name, words, None)
        if detach:
            return {"session": name, "command_id": record["id"], "offset": record["begin"]}
        return _followed(session, name, record, show, limits, plain=plain)


def run_new(
    config: Config,
    name: str,
    words: Sequence[str],
    show: Show | None,
    new: New,
    limits: Limits,
    *,
    detach: bool = False,
    plain: bool = False,
) -> dict[str, Any]:
    """Run a command next to the session's terminal; as `run_in_shell`, with two streams."""
    with connect(config, name, role="write") as session:
        record = begin(session, name, words, new, limits.begin)
        if detach:
            return {"session": name, "command_id": record["id"], "offset": record["begin"]}
        return _followed(session, name, record, show, limits, plain=plain)


def begin(
    session: Session, name: str, words: Sequence[str], new: New | None, seconds: float = _STARTS
) -> dict[str, Any]:
    """Start a command on a connection, in the shell if it is not to be `new`; return its record.

    For the shell, the connection holds the write lease. A new one has `seconds` to begin.
    """
    _check_version(session, name)
    if new is not None:
        return commands.start(session, list(words), seconds, new)
    return _start(session, list(words))


def _check_version(session: Session, name: str) -> None:
    if "commands" not in session.hello["features"]:
        raise WrongState(_OLD.format(name), hint="--force types the command into the terminal.")


def _start(session: Session, words: list[str]) -> dict[str, Any]:
    """Start a command; wait a little for a shell that comes to its prompt."""
    settled = time.monotonic() + _SETTLE
    while True:
        try:
            return commands.start(session, words, _BEGINS)
        except WrongState as error:
            if time.monotonic() >= settled or not _comes(error):
                error.hint = error.hint or (
                    "`criuctl wait NAME --prompt` waits for the shell; `criuctl exec --new` needs "
                    "none; --force types all the same, to a shell behind ssh."
                )
                raise
        time.sleep(_LOOK)


def _comes(error: CriuctlError) -> bool:
    """Whether the program in the foreground is a shell that may come to its prompt."""
    if "foreground" not in error.details:
        return False
    foreground = error.details["foreground"] or {}
    argv = foreground.get("argv") or [""]
    return bool(foreground.get("shell")) or os.path.basename(argv[0]) in ("", *_SHELLS)


def _end_late(
    session: Session, followed: Followed, output: _Output, action: str, *, plain: bool
) -> None:
    """Interrupt or kill a command that is late, and follow it to its end."""
    grace = None if action == "interrupt" else 0
    session.request("command-kill", command=followed.record["id"], grace=grace)
    if followed.record["kind"] == "new":
        more = commands.follow_new(
            session,
            followed.record,
            output.take_of,
            since=followed.end,
            errors_since=followed.errors_end,
            timeout=_ENDS,
        )
    else:
        more = commands.follow(
            session,
            followed.record,
            output.take,
            since=followed.end,
            timeout=_ENDS,
            cleaner=Cleaner(plain=plain),
        )
    followed.record, followed.end = more.record, more.end
    followed.missing += more.missing


def _result(name: str, followed: Followed, output: _Output) -> dict[str, Any]:
    state = followed.state
    body = {
        "session": name,
        "command_id": followed.record["id"],
        "state": state,
        "exit_code": followed.record["exit_code"] if state == "done" else None,
        **output.facts(new=followed.record["kind"] == "new"),
        "offset": followed.offset,
        "end": followed.end,
        "truncated": followed.missing > 0,
        "missing": followed.missing,
    }
    error = _error(name, followed)
    return body if error is None else body | {"error": error.to_dict()}


def _error(name: str, followed: Followed) -> CriuctlError | None:
    """Return the error that the result of `exec` is, if it is one."""
    if followed.late:
        command, state = followed.record["id"], followed.record["state"]
        if state == commands.RUNNING:
            how = f"it runs on as {command}"
        else:
            how = "it was ended" if state != "done" else "it has ended since"
        hint = (
            f"`criuctl output {quoted(name)} --command {quoted(command)}` prints what it has "
            "printed."
        )
        return TimedOut(f"{followed.late}; {how}", hint=hint)
    if followed.record.get("incomplete"):
        return UsageError(
            "the command is incomplete: the shell asked for the rest of it, and ran nothing",
            hint="Is a quote, a bracket or a here-document left open?",
        )
    if followed.state == commands.SHELL_DIED:
        return SessionGone(
            "the shell ended before the command did, or became another program",
            hint="Did the command end the shell?",
        )
    return None


def run_typed(
    config: Config,
    name: str,
    words: Sequence[str],
    show: Show | None,
    *,
    timeout: float | None = None,
    take: bool = False,
    plain: bool = False,
) -> dict[str, Any]:
    """Type a command, whatever reads the terminal; its output goes to `show`, or into the answer.

    It has no record in the holder: ``command_id`` is None.
    """
    output, cleaner = _Output(show), Cleaner(plain=plain)

    def pass_on(data: bytes) -> None:
        if ready := cleaner.feed(data):
            output.take(ready)

    with writer(config, name, take=take) as session:
        limit = _TYPED if timeout is None else timeout
        typed = typed_commands.execute(session, words, pass_on, timeout=limit)
    if rest := cleaner.feed(b"", last=True):
        output.take(rest)
    body = {
        "session": name,
        "command_id": None,
        "state": "timed-out" if typed.late else "done",
        "exit_code": typed.exit_code,
        **output.facts(),
        "offset": typed.begin,
        "end": typed.end,
        "truncated": typed.missing > 0,
        "missing": typed.missing,
    }
    return body | {"error": TimedOut(typed.late).to_dict()} if typed.late else body


def wait(
    config: Config,
    name: str,
    command_id: str,
    timeout: float | None,
    *,
    since: int | None = None,
    plain: bool = False,
) -> dict[str, Any]:
    """Wait until a command has ended; its output, from `since` on, is in the answer."""
    return follow(config, name, command_id, None, Limits(timeout), since=since, plain=plain)


def output(
    config: Config,
    name: str,
    command_id: str,
    show: Show | None,
    *,
    since: int | None = None,
    plain: bool = False,
) -> dict[str, Any]:
    """Return a command with the output that it has printed so far, from `since` on."""
    body = follow(config, name, command_id, show, Limits(0), since=since, plain=plain)
    if body["state"] == commands.TIMED_OUT:
        body["state"] = commands.RUNNING
    body.pop("error", None)
    return body


def follow(
    config: Config,
    name: str,
    command_id: str,
    show: Show | None,
    limits: Limits,
    *,
    since: int | None = None,
    plain: bool = False,
) -> dict[str, Any]:
    """Follow a command, by a connection of its own, until it has ended or is late; its output from
    `since` on goes to `show`, or into the answer.
    """
    role = "observe" if limits.action == "leave" else "write"
    with connect(config, name, role=role) as session:
        _check_version(session, name)
        record = commands.record_of(session, command_id)
        return _followed(session, name, record, show, limits, since=since, plain=plain)


def _followed(
    session: Session,
    name: str,
    record: dict[str, Any],
    show: Show | None,
    limits: Limits,
    *,
    since: int | None = None,
    plain: bool,
) -> dict[str, Any]:
    """Follow a command until it has ended, or is late and has been treated as that."""
    output = _Output(show, plain=plain)
    if record["kind"] == "new":
        followed = commands.follow_new(
            session,
            record,
            output.take_of,
            since=since,
            timeout=limits.timeout,
            silence=limits.silence,
        )
    else:
        followed = commands.follow(
            session,
            record,
            output.take,
            since=since,
            timeout=limits.timeout,
            silence=limits.silence,
            cleaner=Cleaner(record["shell"] if since is None else "", plain=plain),
        )
    if followed.late and limits.action != "leave":
        _end_late(session, followed, output, limits.action, plain=plain)
    return _result(name, followed, output)


def interrupt(config: Config, name: str, command_id: str) -> dict[str, Any]:
    """Interrupt a command, and return it when it has ended, or after a few seconds."""
    with connect(config, name, role="write") as session:
        _check_version(session, name)
        commands.record_of(session, command_id)
        session.request("command-kill", command=command_id, grace=None)
    return wait(config, name, command_id, _ENDS)


def kill(
    config: Config,
    name: str,
    command_id: str,
    grace: float,
    *,
    show: Show | None = None,
) -> dict[str, Any]:
    """End a command: interrupt it, kill it after `grace` seconds; return it when it has ended."""
    check_seconds(grace)
    with connect(config, name, role="write") as session:
        _check_version(session, name)
        commands.record_of(session, command_id)
        session.request("command-kill", command=command_id, grace=grace)
    return follow(config, name, command_id, show, Limits(grace + _ENDS))
