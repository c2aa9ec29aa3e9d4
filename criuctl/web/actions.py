"""The actions of the page: run, pause, resume, snapshot, fork, dump, kill, forget, restore.

A separate criuctl process does whatever freezes or makes a tree, as if it was typed: it keeps its
guarantees (no failure loses the tree) also when this server is killed. When the server ends, it
asks that process to stop, and waits for its clean-up.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from ..errors import Forbidden, NotFound, UsageError
from ..ops import pause
from ..ops.own_commands import OwnCommands
from ..session.names import check_name
from .views import Desk

_ID = re.compile(r"[0-9a-f]{32}")
_MOST = 64 << 10  # bytes of a request

Fields = Mapping[str, Any]


class Actions:
    """Runs actions, and knows those under way."""

    def __init__(self, desk: Desk, program: Sequence[str]) -> None:
        """Set up; `program` is this criuctl with the options that it was started with."""
        self._desk = desk
        self._commands = OwnCommands(program, desk.reporter)

    async def handle(self, request: web.Request) -> web.Response:
        """Handle ``POST /api/actions`` with ``{action, session}``, ``{action: run, session?,
        command}`` or ``{action: restore, checkpoint, as?}``.
        """
        if self._desk.read_only:
            raise Forbidden(
                "this page may only look", hint="The server was started with --read-only."
            )
        fields = await _fields(request)
        action, name = str(fields.get("action")), str(fields.get("session", ""))
        if action in ("pause", "resume"):
            return web.json_response(await self._desk.off(self._steer, action, name))
        if action not in _COMMANDS:
            raise UsageError("no such action")
        argv = _COMMANDS[action](fields)
        try:
            body, code = await self._commands.run(argv)
        finally:
            self._desk.forget_listing()
        if code not in (0, 11):
            return web.json_response(_failure(body), status=409)
        return web.json_response(body | {"exit_code": code})

    def _steer(self, action: str, name: str) -> dict[str, Any]:
        done = (pause.pause if action == "pause" else pause.resume)(self._desk.config, name)
        return {"session": name, "state": done.state}

    async def close(self) -> None:
        """Interrupt the actions under way, as ^C would, and wait until they have cleaned up."""
        await self._commands.close()


def _failure(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error alone, of a command for one session that reports one for each as well."""
    if "error" not in body and body.get("sessions"):
        return {"error": body["sessions"][0]["error"]}
    return body


# -- the command of each action; what the page sends is never an option of it


def _session(fields: Fields, key: str = "session") -> str:
    return check_name(str(fields.get(key, "")))


def _run(fields: Fields) -> list[str]:
    try:
        words = shlex.split(str(fields.get("command", "")))
    except ValueError as error:
        raise UsageError(f"the command cannot be read: {error}") from None
    if not words:
        raise UsageError("a session needs a command", hint="For a shell: bash.")
    name = ["--name", _session(fields)] if fields.get("session") else []
    return ["run", "--detach", *name, "--", *words]


def _restore(fields: Fields) -> list[str]:
    identifier = str(fields.get("checkpoint", ""))
    if _ID.fullmatch(identifier) is None:
        raise NotFound(f"{identifier[:40]!r} is no checkpoint's id")
    copy = ["--as", _session(fields, "as")] if fields.get("as") else []
    return ["restore", identifier, "--detach", *copy]


_COMMANDS: Mapping[str, Callable[[Fields], list[str]]] = {
    "run": _run,
    "snapshot": lambda fields: ["dump", _session(fields), "--leave-running"],
    "fork": lambda fields: ["fork", _session(fields)],
    "dump": lambda fields: ["dump", _session(fields)],
    "kill": lambda fields: ["kill", _session(fields)],
    "forget": lambda fields: ["forget", _session(fields)],
    "restore": _restore,
}


async def _fields(request: web.Request) -> Fields:
    if (request.content_length or 0) > _MOST:
        raise UsageError("the request is too large")
    try:
        fields = json.loads(await request.text())
        json.dumps(fields, ensure_ascii=False).encode()  # no half characters
    except (ValueError, RecursionError, LookupError):
        raise UsageError("the request is not JSON") from None
    if not isinstance(fields, dict):
        raise UsageError("the request is not a JSON object")
    if any("\0" in value for value in fields.values() if isinstance(value, str)):
        raise UsageError("a text of the request has a NUL")
    return fields
