"""The coroutines of `AsyncSession` that work with the session's terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from .async_calls import AsyncCommand, AsyncLease, Calls
from .command import OnTimeout
from .results import CommandResult, Exit, Match, Screen, Sent
from .terminal import TYPE, check_limits


class AsyncTerminal(Calls):
    """`Terminal`, as coroutines."""

    @property
    def lease(self) -> AsyncLease:
        """The write lease."""
        return AsyncLease(self)

    # -- commands ---------------------------------------------------------------------------------

    @overload
    async def exec(
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
    ) -> AsyncCommand: ...

    @overload
    async def exec(
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

    async def exec(
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
    ) -> AsyncCommand | CommandResult:
        """Run a command; see `Session.exec`. Cancelled while it runs, it runs on."""
        check_limits(detach, timeout, silence, on_timeout, plain)
        handle = await self._in_turn(
            lambda s: s._start(command, new, cwd, env, user, stdin, take=take)
        )
        found = AsyncCommand(self, handle.id)
        if detach:
            return found
        return await found.wait(timeout, silence=silence, on_timeout=on_timeout, plain=plain)

    def command(self, id: str) -> AsyncCommand:
        """Return the handle of a command that was started before, by its id."""
        return AsyncCommand(self, id)

    # -- typing -----------------------------------------------------------------------------------

    async def send(
        self, text: str, *, enter: bool = False, take: bool = False, timeout: float = TYPE
    ) -> Sent:
        """Type a text; see `Session.send`."""
        return await self._in_turn(lambda s: s.send(text, enter=enter, take=take, timeout=timeout))

    async def keys(self, *keys: str, take: bool = False, timeout: float = TYPE) -> Sent:
        """Press keys; see `Session.keys`."""
        return await self._in_turn(lambda s: s.keys(*keys, take=take, timeout=timeout))

    async def paste(self, text: str, *, take: bool = False, timeout: float = TYPE) -> Sent:
        """Paste a text; see `Session.paste`."""
        return await self._in_turn(lambda s: s.paste(text, take=take, timeout=timeout))

    async def signal(
        self,
        signal: int | str,
        to: Literal["foreground", "session", "leader"] = "foreground",
        *,
        take: bool = False,
    ) -> int:
        """Send a signal; see `Session.signal`."""
        return await self._in_turn(lambda s: s.signal(signal, to, take=take))

    # -- looking ----------------------------------------------------------------------------------

    async def screen(self, *, ansi: bool = False) -> Screen:
        """Return what the terminal shows; see `Session.screen`."""
        return await self._apart(lambda s: s.screen(ansi=ansi))

    async def capture(
        self, since: int | None = None, *, scrollback: bool = False, ansi: bool = False
    ) -> Screen:
        """Return output, the scrollback, or the screen; see `Session.capture`."""
        return await self._apart(lambda s: s.capture(since, scrollback=scrollback, ansi=ansi))

    # -- waiting ----------------------------------------------------------------------------------

    async def wait_match(
        self, pattern: str, *, since: int | None = None, timeout: float | None = None
    ) -> Match:
        """Wait until a regular expression matches the output; see `Session.wait_match`."""
        return await self._apart(lambda s: s.wait_match(pattern, since=since, timeout=timeout))

    async def wait_prompt(self, *, since: int | None = None, timeout: float | None = None) -> int:
        """Wait until the session's shell is at its prompt; see `Session.wait_prompt`."""
        return await self._apart(lambda s: s.wait_prompt(since=since, timeout=timeout))

    async def wait_reading(self, *, timeout: float | None = None) -> Mapping[str, Any]:
        """Wait until a program in the foreground waits for input; see `Session.wait_reading`."""
        return await self._apart(lambda s: s.wait_reading(timeout=timeout))

    async def wait_idle(self, seconds: float, *, timeout: float | None = None) -> int:
        """Wait until nothing was printed for `seconds`; see `Session.wait_idle`."""
        return await self._apart(lambda s: s.wait_idle(seconds, timeout=timeout))

    async def wait_exit(self, *, timeout: float | None = None) -> Exit:
        """Wait until the session has ended; see `Session.wait_exit`."""
        return await self._apart(lambda s: s.wait_exit(timeout=timeout))
