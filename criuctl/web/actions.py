"""The actions of the page: pause, resume, snapshot, dump, restore.

A separate criuctl process does whatever freezes or makes a tree, as if it was typed: it keeps its
guarantees (no failure loses the tree) also when this server is killed. When the server ends, it
asks that process to stop, and waits for its clean-up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ..errors import Forbidden, NotFound, UsageError
from ..ops import pause
from ..ops.own_commands import OwnCommands
from ..session.names import check_name
from .views import Desk

_ID = re.compile(r"[0-9a-f]{32}")
_MOST = 64 << 10  # bytes of a request


class Actions:
    """Runs actions, and knows those under way."""

    def __init__(self, desk: Desk, program: Sequence[str]) -> None:
        """Set up; `program` is this criuctl with the options that it was started with."""
        self._desk = desk
        self._commands = OwnCommands(program, desk.reporter)

    async def handle(self, request: web.Request) -> web.Response:
        """Handle ``POST /api/actions`` with ``{action, session}`` or ``{action: restore,
        checkpoint}``.
        """
        if self._desk.read_only:
            raise Forbidden(
                "this page may only look", hint="The server was started with --read-only."
            )
        fields = await _fields(request)
        action, name = fields.get("action"), str(fields.get("session", ""))
        if action in ("pause", "resume"):
            return web.json_response(await self._desk.off(self._steer, str(action), name))
        if action == "snapshot":
            argv = ["dump", check_name(name), "--leave-running"]
        elif action == "dump":
            argv = ["dump", check_name(name)]
        elif action == "restore":
            identifier = str(fields.get("checkpoint", ""))
            if _ID.fullmatch(identifier) is None:
                raise NotFound(f"{identifier[:40]!r} is no checkpoint's id")
            argv = ["restore", identifier, "--detach"]
        else:
            raise UsageError("no such action")
        try:
            body, code = await self._commands.run(argv)
        finally:
            self._desk.forget_listing()
        if code not in (0, 11):
            return web.json_response(body, status=409)
        return web.json_response(body | {"exit_code": code})

    def _steer(self, action: str, name: str) -> dict[str, Any]:
        done = (pause.pause if action == "pause" else pause.resume)(self._desk.config, name)
        return {"session": name, "state": done.state}

    async def close(self) -> None:
        """Interrupt the actions under way, as ^C would, and wait until they have cleaned up."""
        await self._commands.close()


async def _fields(request: web.Request) -> Mapping[str, Any]:
    if (request.content_length or 0) > _MOST:
        raise UsageError("the request is too large")
    try:
        fields = json.loads(await request.text())
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON") from None
    if not isinstance(fields, dict):
        raise UsageError("the request is not a JSON object")
    return fields
