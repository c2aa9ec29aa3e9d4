"""One channel of the guest: between its ssh channel and the session's holder.

Both directions are taken apart into frames: of the guest's only those pass that `requests` allows,
and refusals are answered here, between the holder's. A guest that does not read holds up its own
channel only; the holder then skips output for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import CriuctlError, SessionGone
from ..proc.ownership import check_own
from ..session import names, protocol
from .records import Share
from .requests import Filter, Refusal

if TYPE_CHECKING:
    from ..config import Config
    from .server import Reader, Writer

_READ = 1 << 16
_WORD = "criuctl-share"  # begins the preface to both sides
_HIDDEN = frozenset({"moved"})  # events that would lead a guest to other hosts
_MOST_KNOWN = 32  # connections of this share that can be resumed
_TOLD = 20.0  # seconds for a guest to take its last words


class Channels:
    """The channels of one share."""

    def __init__(self, config: Config, share: Share) -> None:
        self._config, self._share = config, share
        # operator -> token, of this share's connections
        self._known: dict[str, str] = {}

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """Carry one channel until one side closes it."""
        writer.write(protocol.preface(_WORD))
        try:
            sock = await asyncio.to_thread(holder_socket, self._config, self._share.session)
        except CriuctlError as error:
            await self._refuse(reader, writer, error)
            return
        holder_reader, holder_writer = await asyncio.open_unix_connection(sock=sock)
        holder_writer.write(protocol.preface(_WORD))
        rules, greeted = Filter(self._share.operator, self._share.role), asyncio.Event()
        ways = [
            asyncio.create_task(self._requests(reader, writer, holder_writer, rules, greeted)),
            asyncio.create_task(self._answers(holder_reader, writer, rules, greeted)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            holder_writer.close()
            results = await asyncio.gather(*ways, return_exceptions=True)
        for result in results:
            if isinstance(result, protocol.ProtocolError):
                writer.write(_error(None, "protocol", str(result)))
                async with asyncio.timeout(_TOLD):
                    await writer.drain()

    async def _requests(
        self,
        reader: Reader,
        writer: Writer,
        holder: asyncio.StreamWriter,
        rules: Filter,
        greeted: asyncio.Event,
    ) -> None:
        decoder = protocol.Decoder()
        while data := await reader.read(_READ):
            decoder.feed(data)
            for kind, body in decoder.frames():
                if rules.greeting is not None:
                    await greeted.wait()  # nothing is typed into another session
                try:
                    holder.write(rules.frame(kind, body, self._resumed(kind, body)))
                    await holder.drain()
                except Refusal as refusal:
                    writer.write(protocol.json_frame(refusal.answer))
                    await writer.drain()

    async def _answers(
        self,
        holder: asyncio.StreamReader,
        writer: Writer,
        rules: Filter,
        greeted: asyncio.Event,
    ) -> None:
        decoder = protocol.Decoder()
        while data := await holder.read(_READ):
            decoder.feed(data)
            for kind, body in decoder.frames():
                if kind == protocol.JSON:
                    message = protocol.parse_json(body)
                    if message.get("event") in _HIDDEN:
                        continue
                    if not greeted.is_set() and "status" in message:
                        self._greeted(message)
                        greeted.set()
                writer.write((len(body) + 1).to_bytes(4, "big") + bytes([kind]) + body)
                await writer.drain()
                if not greeted.is_set():
                    return  # the holder has refused `hello`

    def _greeted(self, message: dict[str, Any]) -> None:
        """Look at the holder's answer to `hello`."""
        if message["status"]["id"] != self._share.session_id:
            raise protocol.ProtocolError("the session of this share has ended; this is another one")
        while len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[message["operator"]] = message["token"]

    def _resumed(self, kind: int, body: bytes) -> tuple[str, str] | None:
        """Return operator and token that a `hello` may resume: those of this share only."""
        if kind != protocol.JSON:
            return None
        operator = protocol.parse_json(body).get("operator")
        token = self._known.get(operator) if isinstance(operator, str) else None
        return (str(operator), token) if token is not None else None

    async def _refuse(self, reader: Reader, writer: Writer, error: CriuctlError) -> None:
        """Answer the first request with an error: there is no holder now."""
        decoder = protocol.Decoder()
        while data := await reader.read(_READ):
            decoder.feed(data)
            for kind, body in _complete(decoder):
                number = protocol.parse_json(body).get("id") if kind == protocol.JSON else None
                writer.write(_error(number, "not-found", error.message))
                await writer.drain()
                return


def _complete(decoder: protocol.Decoder) -> Iterator[protocol.Frame]:
    try:
        yield from decoder.frames()
    except protocol.ProtocolError:
        return


def _error(number: object, code: str, message: str) -> bytes:
    return protocol.json_frame({"id": number, "error": {"code": code, "message": message}})


def holder_socket(config: Config, session: str) -> socket.socket:
    """Return a connection to the holder of `session`; `SessionGone`, `UntrustedPath`."""
    path = names.run_folder(config.run_dir, session) / "socket"
    check_own(path.parent)
    try:
        return names.connect(path, 10.0)
    except OSError as error:
        raise SessionGone(
            f"session {session!r} has no holder now ({error.strerror or error})"
        ) from error
