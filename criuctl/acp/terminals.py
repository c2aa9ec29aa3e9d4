"""The protocol's five terminal methods, answered by sessions.

A terminal's id is the name of its session.  So an agent that comes back after the editor, the agent
or this process have ended can go on with it; so can a person, with `criuctl attach`.  A terminal
that its agent releases is over: its command is ended, and the session forgotten.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeGuard, TypeVar

from acp import schema
from pydantic import BaseModel

from ..config import Config
from ..errors import NotFound
from ..ops import new_session, output, sessions
from ..ops.acting import Call, Client
from ..ops.forget import forget
from ..ops.kill import kill
from ..ops.logs import kept_output
from ..session.screen.plain_text import strip

P = ParamSpec("P")
T = TypeVar("T")

LABEL = "acp"  # of the sessions that are terminals; its value is the agent's session
_PREFIX = "acp-"
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_LIMIT = 1 << 20  # bytes of output that are kept, unless the agent says another number
_THREADS = 64
_OVER = ("exited", "lost")


class Terminals:
    """The terminals of one agent."""

    def __init__(self, config: Config, agent: str) -> None:
        self._config, self._client = config, Client(agent, "admin")
        self._limits: dict[str, int] = {}  # terminal -> bytes of output
        self._pool = ThreadPoolExecutor(_THREADS, "criuctl-acp")
        self._calls: set[Call] = set()
        self.methods: Mapping[
            str, tuple[type[BaseModel], Callable[[Any], Awaitable[BaseModel]]]
        ] = {
            "terminal/create": (schema.CreateTerminalRequest, self.create),
            "terminal/output": (schema.TerminalOutputRequest, self.output),
            "terminal/wait_for_exit": (schema.WaitForTerminalExitRequest, self.wait_for_exit),
            "terminal/kill": (schema.KillTerminalRequest, self.kill),
            "terminal/release": (schema.ReleaseTerminalRequest, self.release),
        }

    async def create(self, asked: schema.CreateTerminalRequest) -> BaseModel:
        """Start a command as a session."""
        name = f"{_PREFIX}{secrets.token_hex(5)}"
        env = {one.name: one.value for one in asked.env or ()}
        await self._off(
            new_session.run,
            self._config,
            command_of(asked.command, asked.args or ()),
            name=name,
            cwd=asked.cwd,
            env={**os.environ, **env},
            labels={LABEL: asked.session_id[:200]},
        )
        if asked.output_byte_limit is not None:
            self._limits[name] = asked.output_byte_limit
        return schema.CreateTerminalResponse(terminal_id=name)

    async def output(self, asked: schema.TerminalOutputRequest) -> BaseModel:
        """Return the end of the output, and how the command has ended if it has."""
        name = await self._off(self._known, asked.terminal_id)
        status, base, data = await self._off(kept_output, self._config, name)
        text, truncated = tail(data, self._limits.get(name, _LIMIT))
        ended = exit_of(status) if status["state"] in _OVER else None
        return schema.TerminalOutputResponse(
            output=text,
            truncated=truncated or base > 0,
            exit_status=None if ended is None else schema.TerminalExitStatus(**ended),
        )

    async def wait_for_exit(self, asked: schema.WaitForTerminalExitRequest) -> BaseModel:
        """Wait until the command has ended."""
        name = await self._off(self._known, asked.terminal_id)
        ended = await self._off(output.wait_exit, self._config, name, None)
        return schema.WaitForTerminalExitResponse(**exit_of(ended))

    async def kill(self, asked: schema.KillTerminalRequest) -> BaseModel:
        """End the command; its output stays."""
        await self._off(self._end, await self._off(self._known, asked.terminal_id))
        return schema.KillTerminalResponse()

    async def release(self, asked: schema.ReleaseTerminalRequest) -> BaseModel:
        """End the command, and forget the session."""
        name = await self._off(self._known, asked.terminal_id)
        await self._off(self._end, name)
        await self._off(forget, self._config, [name])
        self._limits.pop(name, None)
        return schema.ReleaseTerminalResponse()

    def close(self) -> None:
        """End what waits; the sessions run on."""
        for call in list(self._calls):
            call.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _known(self, terminal: str) -> str:
        """Return the session of a terminal; `NotFound` for a session that is none."""
        if not is_terminal(terminal):
            raise NotFound(f"there is no terminal {terminal[:64]!r}")
        if LABEL not in (sessions.describe(self._config, terminal).get("labels") or {}):
            raise NotFound(f"session {terminal!r} is no terminal")
        return terminal

    def _end(self, name: str) -> None:
        if sessions.describe(self._config, name)["state"] not in _OVER:
            kill(self._config, name, _GRACE)

    async def _off(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what blocks in a thread, as this agent."""
        call = Call(self._client)

        def work() -> T:
            with call:
                return function(*args, **kwargs)

        self._calls.add(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._calls.discard(call)


def is_terminal(name: object) -> TypeGuard[str]:
    """Return whether this may be the id of a terminal of this module."""
    return isinstance(name, str) and re.fullmatch(rf"{_PREFIX}[0-9a-f]{{10}}", name) is not None


def command_of(command: str, args: list[str] | tuple[str, ...]) -> list[str]:
    """Return what runs: the program with its arguments, or a line of shell.

    Agents send both: a command without arguments that names no program is a line.
    """
    if not args and shutil.which(command) is None:
        return ["/bin/sh", "-c", command]
    return [command, *args]


def tail(data: bytes, limit: int) -> tuple[str, bool]:
    """Return the end of output as text, of at most `limit` bytes, and whether some is missing."""
    plain = strip(data)[0]
    cut = plain[len(plain) - limit :] if len(plain) > limit else plain
    while cut is not plain and cut and cut[0] & 0xC0 == 0x80:  # inside of a character
        cut = cut[1:]
    return cut.decode(errors="replace"), len(cut) < len(plain)


def exit_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a session has ended, as the protocol says it: a code, or a signal's name."""
    number = status.get("exit_signal")
    if number:
        return {"exit_code": None, "signal": signal.Signals(number).name}
    return {"exit_code": status.get("exit_code"), "signal": None}
