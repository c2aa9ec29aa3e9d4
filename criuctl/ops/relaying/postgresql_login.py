"""The two places in PostgreSQL's login in which a relay has to take part.

A program asks for encryption before it sends its start-up message; here the answer is "no". And a
server that is spoken to in TLS offers SCRAM with channel binding (SCRAM-SHA-256-PLUS), which binds
a login to the TLS connection that the client sees. This client sees none, and libpq ends a login in
which that is offered in plain text, so the offer is taken out. The server's certificate was
verified by the relay, which is what channel binding is a second proof of.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

SSL_REQUEST = struct.pack("!II", 8, 80877103)
GSSENC_REQUEST = struct.pack("!II", 8, 80877104)
_LONGEST = 10_000  # bytes of a start-up message, as a PostgreSQL server allows
_REQUESTS = 4  # for encryption, before the start-up message
_SASL = 10
_BOUND = b"-PLUS"


class Refused(Exception):
    """The program's side does not speak the protocol."""


async def start_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the program's start-up message, or its cancel request; nothing if it has hung up.

    Requests for encryption before it are answered.
    """
    try:
        for _ in range(_REQUESTS):
            head = await reader.readexactly(8)
            if head not in (SSL_REQUEST, GSSENC_REQUEST):
                length = int.from_bytes(head[:4])
                if not len(head) <= length <= _LONGEST:
                    break
                return head + await reader.readexactly(length - len(head))
            writer.write(b"N")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    raise Refused("the program does not speak PostgreSQL's protocol in plain text")


async def first_answers(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the server's first messages up to its request for authentication, without the
    offer of channel binding; nothing is held back from what follows.
    """
    kind = b""
    while kind not in (b"R", b"E"):
        try:
            head = await reader.readexactly(5)
        except asyncio.IncompleteReadError as error:  # as after a cancel request
            yield error.partial
            return
        kind, length = head[:1], int.from_bytes(head[1:]) - 4
        if not 0 <= length <= _LONGEST:
            yield head
            return
        body = await reader.readexactly(length)
        yield unbound(kind + body)


def unbound(message: bytes) -> bytes:
    """Return a message of `kind + body` with its length, without mechanisms for channel binding."""
    kind, body = message[:1], message[1:]
    if kind == b"R" and body[:4] == struct.pack("!I", _SASL):
        offered = [name for name in body[4:].split(b"\0") if name and not name.endswith(_BOUND)]
        body = body[:4] + b"".join(name + b"\0" for name in offered) + b"\0"
    return kind + struct.pack("!I", len(body) + 4) + body


def error_response(message: str) -> bytes:
    """Return the message of a connection that failed (08006), which ends the login."""
    fields = ("SFATAL", "VFATAL", "C08006", f"M{message}")
    body = b"".join(field.encode(errors="replace") + b"\0" for field in fields) + b"\0"
    return b"E" + struct.pack("!I", len(body) + 4) + body
