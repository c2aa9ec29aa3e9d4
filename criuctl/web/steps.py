"""The page's question for the durable steps of a session."""

from __future__ import annotations

from aiohttp import web

from .views import DESK

_SHOWN = 500  # steps of one session that a page gets, the newest
_COLUMNS = ("id", "kind", "state", "progress", "attempts", "began", "ended", "error")


async def steps(request: web.Request) -> web.Response:
    """Return the steps of a session in the order in which they began, without their results, as
    ``criuctl step list`` shows them.
    """
    from ..ops.steps import steps as steps_of

    desk = request.app[DESK]
    found = await desk.off(steps_of, desk.config, request.match_info["name"])
    shown = [{key: step[key] for key in _COLUMNS} for step in found[-_SHOWN:]]
    return web.json_response({"count": len(found), "steps": shown})
