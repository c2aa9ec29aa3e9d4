"""Dumps, restores and comparisons for clients: criuctl commands of their own that a call waits for.

A call waits for a while only.  An operation that takes longer goes on, and has an id with which a
later call waits for its result.  Neither a call that is cancelled nor a client that is gone ends
an operation.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..errors import CriuctlError, NotFound
from ..ops.acting import Client
from ..ops.own_commands import OwnCommands

DEGRADED = 11  # exit code: done, but something optional failed
_MOST_KEPT = 200  # operations whose results are kept
Work = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


class OperationFailed(CriuctlError):
    """The operation failed; its own message is in from_session."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", "")), hint=str(error.get("hint", "")))
        self._error = error

    def to_dict(self) -> dict[str, Any]:
        """Return the command's own error."""
        return self._error


class Operations:
    """The operations of one server."""

    def __init__(self, commands: OwnCommands) -> None:
        self._commands = commands
        self._tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def command(self, client: Client, *argv: str) -> Any:
        """Run a criuctl command for a client and return its JSON; `OperationFailed`."""
        body, code = await self._commands.run(argv, client)
        if code not in (0, DEGRADED):
            error = body.get("error") if isinstance(body, dict) else None
            raise OperationFailed(error or {"message": f"criuctl {argv[0]} ended with {code}"})
        return body

    async def start(self, work: Work, seconds: float) -> dict[str, Any]:
        """Begin an operation, and return its answer, or after `seconds` that it is running."""
        for identifier in [one for one, task in self._tasks.items() if task.done()][:-_MOST_KEPT]:
            del self._tasks[identifier]
        identifier = f"operation-{secrets.token_hex(8)}"
        task: asyncio.Task[dict[str, Any]] = asyncio.create_task(work())
        task.add_done_callback(_looked_at)
        self._tasks[identifier] = task
        return await self.wait(identifier, seconds)

    async def wait(self, identifier: str, seconds: float) -> dict[str, Any]:
        """Return an operation's answer, or after `seconds` that it is running; `NotFound`."""
        task = self._tasks.get(identifier)
        if task is None:
            raise NotFound(f"there is no operation {identifier[:40]!r}")
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return {"running": True, "operation": identifier, "cursor": identifier}
        return {"running": False, "operation": identifier, **task.result()}

    async def close(self, *, interrupt: bool) -> None:
        """Wait for those under way; `interrupt` them first."""
        await self._commands.close(interrupt=interrupt)


def _looked_at(task: asyncio.Task[dict[str, Any]]) -> None:
    """Take a failed operation's error, which its caller may not have waited for."""
    if not task.cancelled():
        task.exception()


def of_list(body: Any) -> Sequence[dict[str, Any]]:
    """Return a command's JSON list."""
    return body if isinstance(body, list) else []
