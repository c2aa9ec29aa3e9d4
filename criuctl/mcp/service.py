"""The state of one server: its clients, the threads in which it blocks, its operations.

The tools are coroutines on one event loop.  What asks a holder, reads files or waits runs in a
thread; when the client cancels a call, or is gone, the thread's connections to holders break, so
that the wait ends with the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError

from ..config import Config
from ..errors import CriuctlError, of_the_host
from ..ops.acting import Call, Client
from ..ops.own_commands import OwnCommands
from ..quoting import printable
from .access import Access
from .bounds import DATA
from .operations import OperationFailed, Operations

P = ParamSpec("P")
T = TypeVar("T")

ANSWER = 40.0  # seconds until a call answers, whatever it waits for; clients give up at 60
_THREADS = 100  # calls that block at the same time
_MOST_CLIENTS = 1000
_OF_ERROR = ("code", "exit_code", "message", "hint")
_COMMAND_LINE = re.compile(r"(^|[\s`])(--[a-z]|criuctl [a-z])")
_SESSION_ID = "mcp-session-id"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")

Asked = Context[Any, Any]  # a request; its lifespan context is the server's `Service`


class Service:
    """What the tools of one server share."""

    def __init__(self, config: Config, role: str, commands: OwnCommands) -> None:
        self.role = role
        self.access = Access(config)
        self.operations = Operations(commands)
        self._limiter = CapacityLimiter(_THREADS)
        self._clients: dict[str, Client] = {}

    def client(self, asked: Asked) -> Client:
        """Return the client of a request: an operator of its own for each connection.

        Newer clients have no connection over HTTP; those of one program are one operator then.
        """
        known = asked.session.client_params
        name = _UNUSUAL.sub("-", known.client_info.name if known is not None else "")[:60]
        name = name.strip("-.") or "mcp"
        if name.startswith("criuctl"):  # as criuctl's own operators are named
            name = f"mcp-{name}"
        headers = asked.headers
        key = f"{name} {headers.get(_SESSION_ID, '') if headers is not None else ''}"
        while len(self._clients) >= _MOST_CLIENTS and key not in self._clients:
            del self._clients[next(iter(self._clients))]
        return self._clients.setdefault(key, Client(name, self.role))

    async def command(self, asked: Asked, *argv: str) -> Any:
        """Run a criuctl command for the client of the request; return its JSON."""
        return await self.operations.command(self.client(asked), *argv)

    async def off(
        self, asked: Asked, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `function` in a thread, for the client of the request."""
        call = Call(self.client(asked))

        def work() -> T:
            with call:
                return function(*args, **kwargs)

        try:
            return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        except anyio.get_cancelled_exc_class():
            call.cancel()
            raise


def service_of(asked: Asked) -> Service:
    """Return the state behind a request."""
    service: Service = asked.request_context.lifespan_context
    return service


def as_tool_error(error: CriuctlError) -> ToolError:
    """Return an expected error as a client gets it: the JSON of the command line.

    What may quote the session's programs, which is an error with details or of a dump or restore,
    is marked as data; its message is then the sentence of its class.
    """
    body = _shown(error.to_dict())
    if _COMMAND_LINE.search(body.get("hint", "")):
        body["hint"] = ""  # a client has no command line
    shown = {key: body.pop(key) for key in _OF_ERROR if key in body}
    if body or isinstance(error, OperationFailed):
        body["message"] = shown.get("message", "")
        shown |= {"message": (type(error).__doc__ or "").partition("\n")[0], DATA: body}
    return ToolError(json.dumps({"error": shown}, default=str))


def expected(error: BaseException) -> CriuctlError | None:
    """Return the error that this one is to a user; None: it is a bug."""
    if isinstance(error, CriuctlError):
        return error
    return of_the_host(error) if isinstance(error, OSError) else None


async def known(answer: Awaitable[T]) -> T:
    """Return what `answer` brings; an expected error becomes the tool's."""
    try:
        return await answer
    except Exception as error:
        foreseen = expected(error)
        if foreseen is None:
            raise
        raise as_tool_error(foreseen) from error


def _shown(value: Any) -> Any:
    """Return a JSON value with harmless texts."""
    if isinstance(value, dict):
        return {printable(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return printable(value) if isinstance(value, str) else value
