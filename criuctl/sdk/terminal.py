"""The part of a `Session` that works with its terminal: run commands, type, look, wait."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from ..errors import UsageError, WrongState
from ..ops import commands, output, typing
from ..ops.acting import acting
from ..session.client.commands import New
from .command import Command, OnTimeout
from .connected import Connected
from .lease import Lease
from .results import CommandResult, Exit, Match, Screen, Sent

TYPE = 30.0  # seconds for the terminal to take what is typed
_PROMPT = "wait_prompt() waits for the shell; new=True needs none."


def check_limits(
    detach: bool, timeout: float | None, silence: float | None, on_timeout: str, plain: bool
) -> None:
    """Raise `UsageError` for limits of a command that is not waited for."""
    if detach and (timeout is not None or silence is not None or on_timeout != "leave" or plain):
        raise UsageError(
            "timeout, silence, on_timeout and plain are not for detach=True",
            hint="Give them to Command.wait.",
        )


class Terminal(Connected):
    """A session's terminal, and the commands that run in the session."""

    @property
    def lease(self) -> Lease:
        """The write lease."""
        return Lease(self)

    # -- commands ---------------------------------------------------------------------------------

    @overload
    def exec(
        self,
        command: str | Sequence[str],
        *,
        detach: Literal[True],
        new: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        take: bool = False,
    ) -> Command: ...

    @overload
    def exec(
        self,
        command: str | Sequence[str],
        *,
        detach: Literal[False] = False,
        new: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        silence: float | None = None,
        on_timeout: OnTimeout = "leave",
        plain: bool = False,
        take: bool = False,
    ) -> CommandResult: ...

    def exec(
        self,
        command: str | Sequence[str],
        *,
        detach: bool = False,
        new: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        silence: float | None = None,
        on_timeout: OnTimeout = "leave",
        plain: bool = False,
        take: bool = False,
    ) -> Command | CommandResult:
        """Run a command in the session's shell, and return it when it has ended.

        A text is a line of shell, which the live shell evaluates: ``cd`` and variables persist.
        Words are a command and its arguments. With `new` it is a process of its own next to the
        terminal, with standard output and error apart, in `cwd`, with `env` added, as `user`, with
        `stdin` as its input. With `detach`, return a handle when it has begun.

        `timeout`, `silence`, `on_timeout` and `plain` are those of `Command.wait`. `WrongState` if
        the shell is not at its prompt, `LeaseHeld` if another operator types, unless `take` takes
        the lease. The command's own exit code raises nothing.
        """
        check_limits(detach, timeout, silence, on_timeout, plain)
        handle = self._start(command, new, cwd, env, user, stdin, take=take)
        if detach:
            return handle
        return handle.wait(timeout, silence=silence, on_timeout=on_timeout, plain=plain)

    def _start(
        self,
        command: str | Sequence[str],
        new: bool,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: str | bytes | None,
        *,
        take: bool,
    ) -> Command:
        """Start a command; for the live shell this needs the write lease."""
        words = [command] if isinstance(command, str) else list(command)
        if len(words) == 1 and not isinstance(command, str):
            words = [shlex.quote(words[0])]  # a single word is a line of shell
        if not new and (cwd or env or user or stdin is not None):
            raise UsageError("cwd, env, user and stdin need new=True: the live shell has its own")
        if new and take:
            raise UsageError("take needs the live shell: a new command types nothing")
        if new:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            with self._main() as connection:
                process = New(cwd, dict(env or {}), user, data)
                record = commands.begin(connection, self.name, words, process)
        else:
            with self._writing(take=take) as connection:
                try:
                    record = commands.begin(connection, self.name, words, None)
                except WrongState as error:
                    error.hint = _PROMPT
                    raise
        return Command(self, record["id"])

    def command(self, id: str) -> Command:
        """Return the handle of a command that was started before, by its id."""
        return Command(self, id)

    # -- typing -----------------------------------------------------------------------------------

    def send(
        self, text: str, *, enter: bool = False, take: bool = False, timeout: float = TYPE
    ) -> Sent:
        """Type a text as it is, and with `enter` the Enter key; return when the terminal has it.

        `TimedOut` after `timeout` seconds: what the terminal has not taken is dropped. `LeaseHeld`
        if another operator types, unless `take` takes the lease.
        """
        parts = [("text", text)] + [("enter", "")] * enter
        return self._type(parts, take, timeout)

    def keys(self, *keys: str, take: bool = False, timeout: float = TYPE) -> Sent:
        """Press keys: ``C-c``, ``Up``, ``M-x``, ``F5``, or one character; as `send`."""
        return self._type([("keys", " ".join(keys))], take, timeout)

    def paste(self, text: str, *, take: bool = False, timeout: float = TYPE) -> Sent:
        """Paste a text, bracketed if the program has asked for that; as `send`."""
        return self._type([("paste", text)], take, timeout)

    def _type(self, parts: Sequence[typing.Part], take: bool, timeout: float) -> Sent:
        typing.check(parts)
        with self._writing(take=take) as connection:
            body = typing.type_parts(connection, parts, timeout=timeout)
        return Sent(body["offset"], body["bytes"], body["held"])

    def signal(
        self,
        signal: int | str,
        to: Literal["foreground", "session", "leader"] = "foreground",
        *,
        take: bool = False,
    ) -> int:
        """Send a signal (``"INT"`` or a number); return the number of processes that got it."""
        with self._writing(take=take) as connection:
            return connection.signal(signal, to)

    # -- looking ----------------------------------------------------------------------------------

    def screen(self, *, ansi: bool = False) -> Screen:
        """Return what the terminal shows; with `ansi` with its colours. An ended session has it,
        too.
        """
        return self._capture(ansi=ansi)

    def capture(
        self, since: int | None = None, *, scrollback: bool = False, ansi: bool = False
    ) -> Screen:
        """Return the output from the offset `since` on as lines; or the `scrollback`, or the
        screen.
        """
        return self._capture(since=since, scrollback=scrollback, ansi=ansi)

    def _capture(self, **options: Any) -> Screen:
        with acting(self._operator):
            return Screen.of(output.capture(self._operator.config, self.name, **options))

    # -- waiting ----------------------------------------------------------------------------------

    def wait_match(
        self, pattern: str, *, since: int | None = None, timeout: float | None = None
    ) -> Match:
        """Wait until a regular expression matches the output, without its control sequences.

        It searches from the offset `since` on, by default from the last input on. `TimedOut` after
        `timeout` seconds, `SessionGone` if the session ends first.
        """
        with acting(self._operator):
            body = output.wait_match(self._operator.config, self.name, pattern, since, timeout)
        return Match(body["match"], body["groups"], body["offset"])

    def wait_prompt(self, *, since: int | None = None, timeout: float | None = None) -> int:
        """Wait until the session's shell is at its prompt; return the offset of the output.

        With `since`, only after output behind that offset. Errors as of `wait_match`.
        """
        with acting(self._operator):
            body = output.wait_prompt(self._operator.config, self.name, since, timeout)
        return int(body["offset"])

    def wait_reading(self, *, timeout: float | None = None) -> Mapping[str, Any]:
        """Wait until a program in the foreground waits for input; return it: pid, argv, cwd, echo.

        Errors as of `wait_match`.
        """
        with acting(self._operator):
            body = output.wait_reading(self._operator.config, self.name, timeout)
        found: Mapping[str, Any] = body["foreground"]
        return found

    def wait_idle(self, seconds: float, *, timeout: float | None = None) -> int:
        """Wait until nothing was printed for `seconds`, or the session has ended; return the offset
        of the output. `TimedOut` after `timeout` seconds.
        """
        with acting(self._operator):
            body = output.wait_idle(self._operator.config, self.name, seconds, timeout)
        return int(body["offset"])

    def wait_exit(self, *, timeout: float | None = None) -> Exit:
        """Wait until the session has ended; this collects its exit status.

        `TimedOut` after `timeout` seconds, `SessionGone` if it is lost.
        """
        with acting(self._operator):
            body = output.wait_exit(self._operator.config, self.name, timeout)
        return Exit(body["exit_code"], body["exit_signal"])
