"""Notifications of open pages: the sessions, whenever they have changed, and what they use.

The list is made from files that holders and operations leave, so reading it is cheap and no holder
is asked; it is read only while a page listens. A page gets the whole of it once
(``{"sessions": [...], "usage": {...}}``) and then only what is different: ``changed`` and ``gone``
sessions, and ``usage`` by name as ``[processors, bytes, processes]``, null for what has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import WSCloseCode, web

from ..errors import CriuctlError
from ..ops import sessions
from ..ops.usage import Meter, SessionUsage
from .access import GRANT, PROTOCOL
from .links import EVERYTHING, Grant
from .sharing import seen_by
from .views import Desk

_PERIOD = 0.7  # seconds between two looks, at least
_SHARE = 8  # times as long as a look took: with very many sessions there are fewer looks
_USAGE = 3  # every so many looks at the sessions there is one at what they use
_HEARTBEAT = 20.0
_PATIENCE = 5.0  # seconds that a page may receive nothing


Used = tuple[float, int, int]  # processors, bytes, processes


class Live:
    """The listening pages, and the task that looks for changes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listeners: dict[web.WebSocketResponse, Grant] = {}
        self._looking: asyncio.Task[None] | None = None
        self._known: dict[str, dict[str, Any]] | None = None  # None: not looked yet
        self._usage: dict[str, Used] = {}
        self._meter = Meter()
        self._checkpoints: dict[str, str] = {}
        self._error: dict[str, Any] | None = None

    async def listen(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one page until it leaves."""
        socket = web.WebSocketResponse(
            protocols=(PROTOCOL,), heartbeat=_HEARTBEAT, timeout=1.0, max_msg_size=4096
        )
        await socket.prepare(request)
        grant = request.get(GRANT, EVERYTHING)
        if grant.ended:
            await socket.close()
            return socket
        self._listeners[socket] = grant
        grant.open(socket)
        try:
            if self._error is not None or self._known is not None:
                await socket.send_str(_dumps(seen_by(grant, self._whole())))
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            async for _ in socket:
                pass  # its messages are ignored
        finally:
            self._listeners.pop(socket, None)
            grant.sockets.discard(socket)
        return socket

    async def close(self) -> None:
        """Close all pages: the server ends."""
        if self._looking is not None:
            self._looking.cancel()
        closing = (socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._listeners)
        await asyncio.gather(*closing, return_exceptions=True)

    def _whole(self) -> dict[str, Any]:
        if self._error is not None:
            return {"error": self._error}
        return {"sessions": list((self._known or {}).values()), "usage": self._usage}

    async def _look(self) -> None:
        looks = 0
        while self._listeners:
            began = time.monotonic()
            try:
                message = self._news(await self._desk.off(sessions.sessions, self._desk.config))
                if looks % _USAGE == 0:
                    message |= self._used(
                        await self._desk.off(self._meter.look, (self._known or {}).values())
                    )
            # reported to the pages, which ask again while they are open
            except Exception as error:
                said = (
                    error.to_dict()
                    if isinstance(error, CriuctlError)
                    else {"message": f"a bug in criuctl: {error!r}"}
                )
                message = {"error": said} if said != self._error else {}
                self._error, self._known = said, None
            looks += 1
            took = time.monotonic() - began
            if message:
                await self._tell(message)
            await asyncio.sleep(max(_PERIOD, _SHARE * took))
        self._known = self._error = None  # the next listener gets the current list

    def _news(self, found: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Take over the sessions as they are now, and return what the pages do not know yet."""
        now = {body["session"]: body for body in found}
        before, self._known, self._error = self._known, now, None
        if before is None:
            self._notice(now)
            self._usage = {}
            return {"sessions": list(now.values())}
        changed = [body for name, body in now.items() if before.get(name) != body]
        gone = [name for name in before if name not in now]
        if not changed and not gone:
            return {}
        self._notice(now)
        return {"changed": changed, "gone": gone}

    def _used(self, found: Mapping[str, SessionUsage]) -> dict[str, Any]:
        now: dict[str, Used] = {
            name: (round(one.cpu, 2), one.memory, one.processes) for name, one in found.items()
        }
        news: dict[str, Used | None] = {
            name: used for name, used in now.items() if self._usage.get(name) != used
        }
        news |= dict.fromkeys(name for name in self._usage if name not in now)
        self._usage = now
        return {"usage": news} if news else {}

    async def _tell(self, message: Mapping[str, Any]) -> None:
        text = _dumps(message)
        sending = []
        for socket, grant in self._listeners.items():
            seen = seen_by(grant, message) if grant.limited else message
            if seen:
                sending.append(self._send(socket, _dumps(seen) if grant.limited else text))
        await asyncio.gather(*sending)

    async def _send(self, socket: web.WebSocketResponse, text: str) -> None:
        """Send to one page; one that receives nothing is dropped, and reconnects when it can."""
        try:
            await asyncio.wait_for(socket.send_str(text), _PATIENCE)
        except (ConnectionError, TimeoutError):
            self._listeners.pop(socket, None)
            await socket.close()

    def _notice(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Notice sessions with another checkpoint than before: the store has changed."""
        now = {name: str(body["checkpoint"]) for name, body in found.items()}
        if now != self._checkpoints:
            self._checkpoints = now
            self._desk.forget_listing()


def _dumps(message: Mapping[str, Any]) -> str:
    return json.dumps(message, default=str)
