"""PostgreSQL's frontend/backend protocol, version 3: messages, and queries that change nothing in
the session.

It is implemented here because it has to run on a given descriptor, which libpq cannot do. Messages
are read one by one, exactly (`Wire` keeps no buffer), so that later bytes stay in the queue for the
program.

`Conversation.ask` uses the extended protocol with a named statement that it closes again: a simple
query would destroy the session's unnamed statement, which the program may still execute.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Sequence

from msgspec import Struct

from .base import CannotRebuild, PeerAway
from .wire import LARGEST, Wire

PROTOCOL_3 = 196608
SSL_REQUEST = struct.pack("!II", 8, 80877103)
GSSENC_REQUEST = struct.pack("!II", 8, 80877104)
_HEADER = struct.Struct("!cI")
_KINDS = frozenset(b"123ACDEGHIKNRSTVWZcdnstv")  # what a server may send
#: SQLSTATEs (or their class) with which a server says "not now".
_NOT_NOW = ("57P", "53", "08", "55006")

Row = tuple[bytes | None, ...]


class ServerError(Exception):
    """The server answered with an ErrorResponse; `state` is its SQLSTATE."""

    def __init__(self, body: bytes) -> None:
        fields = {part[:1]: part[1:].decode(errors="replace") for part in body.split(b"\0") if part}
        self.state = fields.get(b"C", "")
        self.severity = fields.get(b"V", fields.get(b"S", ""))
        self.text = fields.get(b"M", "no message")
        super().__init__(f"{self.text} (SQLSTATE {self.state})")

    def mapped(self, doing: str) -> CannotRebuild | PeerAway:
        """Return the error of `base`: `PeerAway` if another try may help, else `CannotRebuild`."""
        if self.state.startswith(_NOT_NOW):
            return PeerAway(f"{doing}: {self}")
        return CannotRebuild(f"{doing}: {self}")


class Notification(Struct, frozen=True):
    """A notification that arrived during the conversation."""

    channel: str
    payload: str
    pid: int


def frame(kind: bytes, body: bytes = b"") -> bytes:
    """Return a message in its wire format."""
    return kind + struct.pack("!I", len(body) + 4) + body


SYNC = frame(b"S")
TERMINATE = frame(b"X")


def startup(parameters: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a StartupMessage."""
    body = (
        struct.pack("!I", PROTOCOL_3)
        + b"".join(name + b"\0" + value + b"\0" for name, value in parameters)
        + b"\0"
    )
    return struct.pack("!I", len(body) + 4) + body


def parse(name: bytes, statement: bytes, types: Sequence[int] = ()) -> bytes:
    """Return a Parse message."""
    oids = struct.pack(f"!H{len(types)}I", len(types), *types)
    return frame(b"P", name + b"\0" + statement + b"\0" + oids)


def bind(portal: bytes, statement: bytes, values: Sequence[bytes] = ()) -> bytes:
    """Return a Bind message; parameters and results are text."""
    parts = b"".join(struct.pack("!I", len(value)) + value for value in values)
    return frame(
        b"B",
        portal
        + b"\0"
        + statement
        + b"\0"
        + struct.pack("!HH", 0, len(values))
        + parts
        + struct.pack("!H", 0),
    )


def execute(portal: bytes) -> bytes:
    """Return an Execute message for all rows."""
    return frame(b"E", portal + b"\0" + struct.pack("!I", 0))


def close_statement(name: bytes) -> bytes:
    """Return a Close message for a prepared statement; a missing one is no error."""
    return frame(b"C", b"S" + name + b"\0")


class Conversation:
    """Queries and answers on a connection that is, or is about to be, ready for a query."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.parameters: dict[str, str] = {}  # from ParameterStatus messages
        self.notifications: list[Notification] = []
        self.notices: list[str] = []
        self.owed = False  # whether the ReadyForQuery for the last batch is still to come
        self.backend = 0  # PID of the server's process, from BackendKeyData

    def read(self) -> tuple[bytes, bytes]:
        """Return the next message that is not asynchronous; raise `ServerError` for an
        ErrorResponse.
        """
        while True:
            kind, length = _HEADER.unpack(self.wire.receive(_HEADER.size))
            if kind[0] not in _KINDS or not 4 <= length <= LARGEST:
                raise CannotRebuild(
                    f"{self.wire.peer} does not speak PostgreSQL's protocol (version 3)"
                )
            body = self.wire.receive(length - 4)
            if kind == b"S":
                name, value = _texts(body, 2)
                self.parameters[name] = value
            elif kind == b"A":
                channel, payload = _texts(body[4:], 2)
                self.notifications.append(
                    Notification(channel, payload, int.from_bytes(body[:4], "big"))
                )
            elif kind == b"N":
                self.notices.append(str(ServerError(body)))
            elif kind == b"E":
                raise ServerError(body)
            else:
                return kind, body

    def begin(self, batch: bytes) -> None:
        """Send a batch that ends with Sync; `until_ready` must follow."""
        self.owed = True
        self.wire.send(batch)

    def until_ready(self) -> tuple[list[tuple[bytes, bytes]], ServerError | None]:
        """Return all messages up to ReadyForQuery, and the first error among them; raise
        `CannotRebuild` if a transaction is open.
        """
        messages: list[tuple[bytes, bytes]] = []
        failed: ServerError | None = None
        while True:
            try:
                kind, body = self.read()
            except ServerError as error:
                if error.severity in ("FATAL", "PANIC"):
                    raise  # the connection ends, no message follows
                failed = failed or error
                continue
            if kind == b"Z":
                self.owed = False
                if body != b"I" and failed is None:
                    raise CannotRebuild(
                        f"{self.wire.peer}: a transaction is open where none should be"
                    )
                return messages, failed
            if kind in b"GHW":
                raise CannotRebuild(f"{self.wire.peer}: the session is in a COPY")
            messages.append((kind, body))

    def ask(self, statements: Sequence[bytes]) -> list[list[Row]]:
        """Return the rows of each statement, in one round trip, and leave nothing behind in the
        session; raise `ServerError`.
        """
        names = [f"_criuctl_{secrets.token_hex(8)}".encode() for _ in statements]
        out = b""
        for name, statement in zip(names, statements, strict=True):
            out += parse(name, statement) + bind(name, name) + execute(name)
        closing = b"".join(close_statement(name) for name in names) + SYNC
        self.begin(out + closing)
        messages, failed = self.until_ready()
        if failed is not None:
            # The server skipped the rest, our Close included.
            self.begin(closing)
            self.until_ready()
            raise failed
        results: list[list[Row]] = [[] for _ in statements]
        at = 0
        for kind, body in messages:
            if kind == b"D":
                if at >= len(results):
                    raise CannotRebuild(f"{self.wire.peer} sent more answers than requested")
                results[at].append(_row(body))
            elif kind in b"CI":
                at += 1
        if at != len(statements):
            raise CannotRebuild(f"{self.wire.peer} answered {at} of {len(statements)} questions")
        return results

    def carry_out(self, batch: bytes, what: str) -> list[tuple[bytes, bytes]]:
        """Send messages and a Sync, and return the answers; raise `CannotRebuild` or `PeerAway`,
        naming `what`.
        """
        self.begin(batch + SYNC)
        messages, failed = self.until_ready()
        if failed is not None:
            raise failed.mapped(what) from None
        return messages


def rows(messages: Iterable[tuple[bytes, bytes]]) -> list[Row]:
    """Return the DataRows among messages."""
    return [_row(body) for kind, body in messages if kind == b"D"]


def _row(body: bytes) -> Row:
    try:
        (count,) = struct.unpack_from("!H", body)
        values: list[bytes | None] = []
        at = 2
        for _ in range(count):
            (length,) = struct.unpack_from("!i", body, at)
            at += 4
            if length < 0:
                values.append(None)
                continue
            if at + length > len(body):
                raise CannotRebuild("the server sent a row that is cut short")
            values.append(body[at : at + length])
            at += length
        return tuple(values)
    except struct.error:
        raise CannotRebuild("the server sent a row that is cut short") from None


def _texts(body: bytes, count: int) -> list[str]:
    parts = body.split(b"\0")
    if len(parts) <= count - 1:
        raise CannotRebuild("the server sent a message that is cut short")
    return [part.decode(errors="replace") for part in parts[:count]]
