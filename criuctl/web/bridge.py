"""A terminal in the page: the data between its WebSocket and the holder of the session.

The holder decides everything, as for every other client: this connection is a separate operator,
with the role that the page was opened for, and the holder refuses what the role or the lease does
not allow; the page shows that. A reader does not change the size of the session's window; typing
takes the lease, and then the page's size applies, as with `criuctl attach`.

To the page: binary frames, 8 bytes of offset (big-endian) and the output after them; text frames,
JSON objects: the holder's events unchanged (``event``), and this module's own (``type``):
``hello``, ``screen`` (the terminal is to be reset to this size; the following output draws it),
``attached``, ``refused``, ``ended`` (the session is over, this was its last screen) and ``gone``.
From the page: binary frames are typed input; text frames ``{"op": "resize", "rows", "cols"}``,
``{"op": "yield"}``, and ``{"op": "shown", "bytes"}``: so many more bytes of output are on the
screen.

A slow page does not block others: while it has not shown what it was sent (a browser accepts and
keeps everything), nothing is read from the holder, which skips output if needed (a gap), and the
screen is drawn again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import WSMsgType, web

from ..errors import CriuctlError, DataError, Forbidden
from ..ops import sessions
from ..session.client.keyboard import is_report
from ..session.client.session import Answer, Event, Output, Session
from ..session.screen.drawing import redraw
from ..session.screen.replay import replay
from .access import GRANT, PROTOCOL
from .links import EVERYTHING, Grant
from .views import DESK, Desk

T = TypeVar("T")

_HEARTBEAT = 10.0  # seconds between two signs of life while this page holds the lease
_PING = 20.0
_PIECE = 16 << 10
# bytes on their way: less than a socket buffer, so that sending never blocks
_MAX_UNANSWERED = 64 << 10
_MAX_TYPED = 1 << 20  # bytes that wait here; a larger paste is refused
_MAX_MESSAGE = 1 << 20
_MAX_AHEAD = 1 << 20  # bytes of output that the page has not shown yet
_QUIET = 0.2  # seconds without output after a gap, until the screen is drawn again
_OVER = ("exited", "lost")
_NUMBERS = {"resize": ("rows", "cols"), "shown": ("bytes",)}  # the fields of the page's requests


async def terminal(request: web.Request) -> web.WebSocketResponse:
    """Serve one page that is attached to one session; with ``?take=1`` it takes the write lease at
    once. The bearer of a link has its role, and takes nothing from others.
    """
    desk, name = request.app[DESK], request.match_info["name"]
    return await bridged(request, desk, partial(sessions.connect, desk.config, name))


async def bridged(
    request: web.Request,
    desk: Desk,
    connect: Callable[..., Session],
    nonsense: tuple[type[Exception], ...] = (),
) -> web.WebSocketResponse:
    """Serve one page that is attached to the session that `connect` connects to; `desk` has the
    threads for that. Exceptions of the types `nonsense` mean an answer in a form that nothing
    expects, and end this terminal only.
    """
    grant = request.get(GRANT, EVERYTHING)
    observes = desk.read_only or grant.role == "observe"
    take = request.query.get("take") == "1" and not observes and not grant.limited
    socket = web.WebSocketResponse(
        protocols=(PROTOCOL,), heartbeat=_PING, timeout=1.0, max_msg_size=_MAX_MESSAGE
    )
    await socket.prepare(request)
    request.app[SOCKETS].add(socket)
    role = "observe" if observes else "admin" if take else "write"
    operator = f"link-{grant.id}" if grant.limited else ""
    try:
        grant.open(socket)
        bridge = Bridge(
            desk,
            socket,
            await desk.off(connect, role=role, operator=operator),
        )
        try:
            bridge.check(grant)
            await bridge.run(take=take)
        finally:
            await desk.off(bridge.leave)
    except CriuctlError as error:
        with contextlib.suppress(ConnectionError):
            await socket.send_json({"type": "gone", "error": error.to_dict()}, dumps=_dumps)
    except ConnectionError:
        pass  # the page was closed meanwhile
    except nonsense:
        said = DataError("the other host sent what no holder of criuctl sends").to_dict()
        with contextlib.suppress(ConnectionError):
            await socket.send_json({"type": "gone", "error": said})
    finally:
        request.app[SOCKETS].discard(socket)
        grant.sockets.discard(socket)
    await socket.close()
    return socket


Sockets = set[web.WebSocketResponse]
SOCKETS: web.AppKey[Sockets] = web.AppKey("sockets", set)


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)


class Bridge:
    """One terminal of one page."""

    def __init__(self, desk: Desk, socket: web.WebSocketResponse, session: Session) -> None:
        self._desk, self._socket, self._session = desk, socket, session
        self._turn = asyncio.Lock()  # serialises tasks on the session's connection
        # the same for threads: one may still use it when its task is gone
        self._calling = threading.Lock()
        self._lease: dict[str, Any] | None = None
        self._typed = bytearray()  # not sent yet
        # request -> bytes on their way to the session's terminal
        self._unanswered: dict[int, int] = {}
        self._position = 0
        self._redraw_at: float | None = None
        self._ahead = 0
        self._room = asyncio.Event()  # set while the page is not too far behind

    def check(self, grant: Grant) -> None:
        """Raise `Forbidden` if the holder that has answered is not that of the link's session."""
        if grant.limited and self._session.hello["status"]["id"] != grant.session_id:
            raise Forbidden("the session of this link has ended; this is another one")

    async def run(self, *, take: bool) -> None:
        """Run until the page leaves or the holder is gone."""
        session = self._session
        status = session.hello["status"]
        await self._tell(
            {"type": "hello", "operator": session.operator, "role": session.role, "status": status}
        )
        if take:
            await self._call(session.lease_take)
        await self._draw()
        if status["state"] in _OVER:
            # Attaching would count as having seen its exit status, which is for `wait`.
            await self._tell({"type": "ended", "status": sessions.shown(status)})
            return
        await self._attach()
        tasks = [
            asyncio.create_task(work)
            for work in (self._from_holder(), self._from_page(), self._beat())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def leave(self) -> None:
        """Disconnect from the holder when all requests are answered. May block."""
        with self._calling, contextlib.suppress(OSError):
            self._session.leave()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Send a request to the holder and wait for its answer, in a thread, with exclusive use of
        the connection.
        """

        def call() -> T:
            with self._calling:
                return function(*arguments)

        async with self._turn:
            return await self._desk.off(call)

    # -- the screen -------------------------------------------------------------------------------

    async def _draw(self) -> None:
        """Draw the session's current screen; later output begins at `_position`."""

        def draw() -> tuple[dict[str, Any], bytes, int]:
            status = self._session.status()
            if not status["rows"]:
                return status, b"", int(status["offset"])
            screen = replay(self._session, status)
            drawing = redraw(screen, status["rows"], status["cols"], history=True)
            return status, drawing, screen.end

        status, drawing, self._position = await self._call(draw)
        await self._tell({"type": "screen", "rows": status["rows"], "cols": status["cols"]})
        await self._output(self._position, drawing)

    async def _attach(self) -> None:
        answer = await self._call(self._session.attach, self._position)
        self._lease = answer["lease"]
        await self._tell({"type": "attached", "state": answer["state"], "lease": self._lease})

    async def _restore_screen(self) -> None:
        """Draw the screen again after a gap."""
        self._redraw_at = None
        await self._call(self._session.detach)
        left = []
        async with self._turn:
            while self._session.pending:
                left.append(self._session.receive(0))
        for message in left:
            if isinstance(message, Event | Answer):
                await self._forward(message)
        await self._draw()
        await self._attach()

    # -- from the holder to the page --------------------------------------------------------------

    async def _from_holder(self) -> None:
        while True:
            while self._ahead > _MAX_AHEAD:
                self._room.clear()
                await self._room.wait()
            if not self._session.pending and not await self._readable():
                await self._restore_screen()
                continue
            async with self._turn:
                message = self._session.receive(0)
            if message is not None:
                await self._forward(message)
            await asyncio.sleep(0)  # the other pages have their turn, whatever comes at once

    async def _readable(self) -> bool:
        """Wait for the holder; return False when it is time to draw the screen again."""
        loop, ready, fd = asyncio.get_running_loop(), asyncio.Event(), self._session.fileno()
        loop.add_reader(fd, ready.set)
        try:
            left = None if self._redraw_at is None else max(0.0, self._redraw_at - time.monotonic())
            await asyncio.wait_for(ready.wait(), left)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(fd)
        return True

    async def _forward(self, message: Output | Event | Answer) -> None:
        if isinstance(message, Output):
            self._position = message.end
            if self._redraw_at is not None:
                self._redraw_at = time.monotonic() + _QUIET
            await self._output(message.offset, message.data)
        elif isinstance(message, Event):
            if message.name == "lease":
                self._lease = message.body.get("lease")
            elif message.name == "gap":
                self._redraw_at = time.monotonic() + _QUIET
            await self._tell(message.body)
        else:
            typed = message.id == 0 or self._unanswered.pop(message.id, None) is not None
            if typed and message.error is not None:
                self._typed.clear()
                await self._tell({"type": "refused", "error": message.error.to_dict()})
            async with self._turn:
                self._send_typed()

    async def _output(self, offset: int, data: bytes) -> None:
        for at in range(0, len(data), _MAX_MESSAGE):
            self._ahead += min(_MAX_MESSAGE, len(data) - at)
            await self._socket.send_bytes(
                (offset + at).to_bytes(8, "big") + data[at : at + _MAX_MESSAGE]
            )

    async def _tell(self, message: dict[str, Any]) -> None:
        await self._socket.send_json(message, dumps=_dumps)

    # -- from the page to the holder --------------------------------------------------------------

    async def _from_page(self) -> None:
        async for message in self._socket:
            if message.type is WSMsgType.BINARY:
                await self._type(message.data)
            elif message.type is WSMsgType.TEXT:
                await self._obey(message.data)

    async def _type(self, data: bytes) -> None:
        if len(self._typed) + len(data) > _MAX_TYPED:
            await self._tell(
                {
                    "type": "refused",
                    "error": {"code": "busy", "message": "too much was typed at once", "hint": ""},
                }
            )
            return
        if is_report(data) and not self._mine:
            # not typed by a person: every attached terminal would answer the program's question
            return
        async with self._turn:
            self._typed += data
            self._send_typed()

    def _send_typed(self) -> None:
        while self._typed and sum(self._unanswered.values()) < _MAX_UNANSWERED:
            piece = bytes(self._typed[:_PIECE])
            del self._typed[: len(piece)]
            self._unanswered[self._session.submit_input(piece, answered=True)] = len(piece)

    async def _obey(self, text: str) -> None:
        try:
            request = json.loads(text)
            op = request["op"]
            numbers = {key: max(0, int(request[key])) for key in _NUMBERS.get(op, ())}
        except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
            await self._tell(
                {
                    "type": "refused",
                    "error": {"code": "bad-request", "message": "no such request", "hint": ""},
                }
            )
            return
        if op == "shown":
            self._ahead = max(0, self._ahead - numbers["bytes"])
            self._room.set()
            return
        async with self._turn:
            # The size of a page without the lease is irrelevant; the holder would refuse it.
            if op == "resize" and self._mine:
                self._session.submit("resize", rows=numbers["rows"], cols=numbers["cols"])
            elif op == "yield" and self._mine:
                self._session.submit("lease-yield")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            if self._mine:
                async with self._turn:
                    self._session.submit("heartbeat")

    @property
    def _mine(self) -> bool:
        return self._lease is not None and self._lease["operator"] == self._session.operator
