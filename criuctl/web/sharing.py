"""The limits of a link, for each request that bears one; the requests that make and end links."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ..config import Config
from ..errors import Forbidden, NotFound, UsageError
from ..host.registry import Registry
from ..ops.sessions import known_of
from ..session.names import check_name
from ..session.sessions import state_of
from .access import GRANT, Handler
from .links import ALLOWED, EVERYTHING, Grant, Links
from .views import DESK

LINKS = web.AppKey("links", Links)


@web.middleware
async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a link everything but its session's terminal and processes."""
    grant = request.get(GRANT, EVERYTHING)
    if grant.limited:
        resource = request.match_info.route.resource
        if request.method != "GET" or resource is None or resource.canonical not in ALLOWED:
            raise Forbidden("this link does not allow that")
        name = request.match_info.get("name")
        if name is not None:
            if name != grant.session:
                raise Forbidden("this link is for another session")
            desk = request.app[DESK]
            if await desk.off(identity, desk.config, name) != grant.session_id:
                raise Forbidden("the session of this link has ended; this is another one")
    return await handler(request)


def identity(config: Config, name: str) -> str:
    """Return the id of the session that has this name now; `NotFound`."""
    state, record = state_of(config, check_name(name)), Registry(config).get(name)
    if state is None and record is None:
        raise NotFound(f"no session {name!r} is known to this host")
    return str(known_of(state, record)["id"])


def seen_by(grant: Grant, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the bearer of `grant` may see of a message of `live`: its own session."""
    if not grant.limited:
        return dict(message)
    if "error" in message:
        return {"error": {"message": "the sessions of this host cannot be read"}}
    seen: dict[str, Any] = {}
    for key in ("sessions", "changed"):
        mine = [body for body in message.get(key, ()) if body["id"] == grant.session_id]
        if mine or (key == "sessions" and key in message):
            seen[key] = mine
    if grant.session in message.get("gone", ()):
        seen |= {"gone": [grant.session], "changed": seen.get("changed", [])}
    if grant.session in message.get("usage", {}):
        seen["usage"] = {grant.session: message["usage"][grant.session]}
    return seen


async def _list(request: web.Request) -> web.Response:
    return web.json_response([grant.to_dict() for grant in request.app[LINKS].all()])


async def _create(request: web.Request) -> web.Response:
    """Make a link of ``{session, role, seconds}``; the answer is the only one with its token."""
    desk, fields = request.app[DESK], await _fields(request)
    name, role, seconds = fields.get("session"), fields.get("role"), fields.get("seconds")
    if not isinstance(name, str) or not isinstance(seconds, int | float):
        raise UsageError("a link needs a session and seconds")
    if desk.read_only and role != "observe":
        raise Forbidden("this page may only look", hint="The server was started with --read-only.")
    identifier = await desk.off(identity, desk.config, name)
    token, grant = request.app[LINKS].create(name, identifier, str(role), float(seconds))
    return web.json_response(grant.to_dict() | {"token": token})


async def _revoke(request: web.Request) -> web.Response:
    await request.app[LINKS].revoke(request.match_info["id"])
    return web.json_response({})


async def _fields(request: web.Request) -> Mapping[str, Any]:
    try:
        fields = json.loads(await request.text())
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON") from None
    if not isinstance(fields, dict):
        raise UsageError("the request is not a JSON object")
    return fields


ROUTES = (
    web.get("/api/links", _list),
    web.post("/api/links", _create),
    web.delete("/api/links/{id}", _revoke),
)
