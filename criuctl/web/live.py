"""What has changed, told to every page that is open: the list of sessions, whenever it is another
one.

The list is made of files that holders and operations leave, so asking costs little and nobody is
asked; it is only looked at while somebody listens.
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
_PATIENCE = 5.0  # seconds that a page may take nothing


class Live:
    """The pages that listen, and the one who looks for them."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listeners: set[web.WebSocketResponse] = set()
        self._looking: asyncio.Task[None] | None = None
        self._last = ""
        self._checkpoints: dict[str, str] = {}

    async def listen(self, request: web.Request) -> web.WebSocketResponse:
        """A page listens until it leaves."""
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
                pass  # it has nothing to say
        finally:
            self._listeners.discard(socket)
        return socket

    async def close(self) -> None:
        """The server ends."""
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
            # told to the pages, which ask again as long as they are open
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
        self._last = ""  # whoever listens next is told what is true then

    async def _send(self, socket: web.WebSocketResponse, text: str) -> None:
        """Tell one page; one that takes nothing is left, and comes again when it can."""
        try:
            await asyncio.wait_for(socket.send_str(text), _PATIENCE)
        except (ConnectionError, TimeoutError):
            self._listeners.discard(socket)
            await socket.close()

    def _notice(self, found: Any) -> None:
        """A session with another checkpoint than before: the store holds something new."""
        now = {body["session"]: str(body["checkpoint"]) for body in found}
        if now != self._checkpoints:
            self._checkpoints = now
            self._desk.forget_listing()
