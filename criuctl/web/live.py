"""Notifications of open pages: the list of sessions, whenever it has changed.

The list is made from files that holders and operations leave, so reading it is cheap and no holder
is asked; it is read only while a page listens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import WSCloseCode, web

from ..errors import CriuctlError
from ..ops import sessions
from .access import PROTOCOL
from .views import Desk

_PERIOD = 0.7  # seconds between two looks
_HEARTBEAT = 20.0
_PATIENCE = 5.0  # seconds that a page may receive nothing


class Live:
    """The listening pages, and the task that looks for changes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listeners: set[web.WebSocketResponse] = set()
        self._looking: asyncio.Task[None] | None = None
        self._last = ""
        self._checkpoints: dict[str, str] = {}

    async def listen(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one page until it leaves."""
        socket = web.WebSocketResponse(
            protocols=(PROTOCOL,), heartbeat=_HEARTBEAT, timeout=1.0, max_msg_size=4096
        )
        await socket.prepare(request)
        self._listeners.add(socket)
        try:
            if self._last:
                await socket.send_str(self._last)
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            async for _ in socket:
                pass  # its messages are ignored
        finally:
            self._listeners.discard(socket)
        return socket

    async def close(self) -> None:
        """Close all pages: the server ends."""
        if self._looking is not None:
            self._looking.cancel()
        closing = (socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._listeners)
        await asyncio.gather(*closing, return_exceptions=True)

    async def _look(self) -> None:
        while self._listeners:
            try:
                message: dict[str, Any] = {
                    "sessions": await self._desk.off(sessions.sessions, self._desk.config)
                }
            # reported to the pages, which ask again while they are open
            except Exception as error:
                message = {
                    "error": error.to_dict()
                    if isinstance(error, CriuctlError)
                    else {"message": f"a bug in criuctl: {error!r}"}
                }
            text = json.dumps(message, default=str)
            if text != self._last:
                self._last = text
                self._notice(message.get("sessions", ()))
                await asyncio.gather(*(self._send(socket, text) for socket in self._listeners))
            await asyncio.sleep(_PERIOD)
        self._last = ""  # the next listener gets the current list

    async def _send(self, socket: web.WebSocketResponse, text: str) -> None:
        """Send to one page; one that receives nothing is dropped, and reconnects when it can."""
        try:
            await asyncio.wait_for(socket.send_str(text), _PATIENCE)
        except (ConnectionError, TimeoutError):
            self._listeners.discard(socket)
            await socket.close()

    def _notice(self, found: Any) -> None:
        """Notice sessions with another checkpoint than before: the store has changed."""
        now = {body["session"]: str(body["checkpoint"]) for body in found}
        if now != self._checkpoints:
            self._checkpoints = now
            self._desk.forget_listing()
