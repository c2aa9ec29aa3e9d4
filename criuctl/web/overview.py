"""The page's questions about this host as a whole: its last events, and what its store holds.

A store is counted by listing all of it, so one count serves all pages for a minute.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web
from msgspec import Struct

from ..config import Config
from ..errors import PlatformError
from ..host.journal.event_log import EventLog
from .views import DESK, Desk

_FRESH = 60.0  # seconds for which a count of the store is used
_LOOKED_AT = 400  # events, the newest of all, among which a session's are looked for
_SHOWN = 30


class StoreCount(Struct):
    """The last count of the store."""

    task: asyncio.Task[dict[str, Any]] | None = None
    counted: float = 0.0

    async def look(self, desk: Desk) -> dict[str, Any]:
        """Return ``checkpoints``, ``sessions``, ``bytes`` and ``encrypted``."""
        stale = time.monotonic() - self.counted > _FRESH
        if self.task is None or (self.task.done() and (stale or self.task.exception())):
            self.task = asyncio.create_task(desk.off(_counted, desk.config))
            self.counted = time.monotonic()
        return await asyncio.shield(self.task)


COUNT = web.AppKey("store-count", StoreCount)


def _counted(config: Config) -> dict[str, Any]:
    from ..ops.stores import store_info

    body = store_info(config).to_dict()
    return {
        "checkpoints": body["checkpoints"],
        "sessions": body["sessions"],
        "bytes": body["bytes"]["stored"],
        "encrypted": body["encrypted"],
    }


async def store(request: web.Request) -> web.Response:
    """Return how much the store holds."""
    return web.json_response(await request.app[COUNT].look(request.app[DESK]))


async def events(request: web.Request) -> web.Response:
    """Return the last events of this host, or with ``?session=NAME`` those of one session, newest
    first.
    """
    desk, session = request.app[DESK], request.query.get("session")
    found = await desk.off(_events, desk.config, session)
    return web.json_response(found, dumps=lambda value: json.dumps(value, default=str))


def _events(config: Config, session: str | None) -> list[dict[str, Any]]:
    log = EventLog(config.state_dir)
    try:
        newest = list(log.read(max(0, log.newest() - _LOOKED_AT)))
    except OSError as error:
        raise PlatformError(
            f"the event log {log.path} cannot be read: {error.strerror}",
            hint="Run criuctl as root.",
        ) from error
    wanted = [
        event
        for event in reversed(newest)
        if session is None
        or session == event.get("session")
        or session in event.get("sessions", ())
    ]
    return wanted[:_SHOWN]


ROUTES = (web.get("/api/store", store), web.get("/api/events", events))
