"""Finding out what a Redis server holds for a connection without saying a word on it.

A word on the program's own connection may do harm that cannot be undone.  In a transaction it is
queued and becomes part of the program's own EXEC; while a command blocks (BLPOP, XREAD) it is
answered when criuctl does not listen any more, and the program takes that answer for its own; a
subscriber's messages mix with the answer.  And which of these states holds is just what is not
known yet.  So a second connection to the same server, made by us in the net namespace of the
program's socket, asks CLIENT LIST and takes the line of the program's connection: by ``addr=``,
which is the program's local address, or for a unix socket by ``fd=``, which is the server's
descriptor of the other end (the kernel tells which).  Logging in comes first, and by the time that
has been answered, the server has run whatever had reached its kernel before.

``ask: own`` in the rule is for where that is forbidden (ACL) or blind (an address translation or a
proxy between): the user vouches that the program never leaves a transaction, a blocking command or
a subscription open, and CLIENT INFO goes over the program's connection.  That the peer speaks plain
Redis is still found out beside it, and a request of the program's that is not answered yet keeps us
from asking.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct, field

from ...proc import connecting, sockdiag
from ...proc.sockets import outside_holders
from .base import CannotRebuild, PeerAway
from .redis_wire import ErrorReply, NotRedis, Resp, as_map
from .wire import Wire

#: Bytes that the headers of strings and their rounding may make a client's memory differ by; a
# watched key takes 56 or more.
_NOISE = 24


class Row(Struct, frozen=True):
    """One client as CLIENT LIST and CLIENT INFO tell it; versions differ in which fields there
    are.
    """

    fields: Mapping[str, str]

    def text(self, name: str) -> str:
        """A field, "" if the server does not tell it."""
        return self.fields.get(name, "")

    def number(self, name: str, default: int = 0) -> int:
        """A field that is a number; `CannotRebuild` if it is none."""
        value = self.fields.get(name, "")
        if not value:
            return default
        if not re.fullmatch(r"-?\d{1,18}", value):
            raise CannotRebuild(
                f"the server tells {name}={value[:40]!r} of the connection, which is no number"
            )
        return int(value)

    def has(self, name: str) -> bool:
        """Whether the server tells this field."""
        return name in self.fields


class Sight(Struct, frozen=True):
    """What was seen: the program's line, ours, and the server's own words about itself."""

    row: Row
    server: dict[str, Any] = field(default_factory=dict)
    ours: Row | None = None  # an idle connection of the same server to compare with
    targets: frozenset[int] = frozenset()  # the ids that some client redirects its invalidations to


def parse(line: str) -> Row:
    """One line of CLIENT LIST."""
    return Row(dict(pair.partition("=")[::2] for pair in line.strip().split(" ") if "=" in pair))


class Place(Struct, frozen=True):
    """The program's connection, and where its other end is."""

    sock: socket.socket
    name: str  # for messages
    peer: Any  # what connect(2) takes; a path is the server's
    # of a unix socket: the server's PID and descriptor, None if no process has it
    end: tuple[int, int] | None = None

    @property
    def unix(self) -> bool:
        """Whether it is a unix socket, the clients of which have no address."""
        return self.sock.family == socket.AF_UNIX


def place_of(sock: socket.socket, name: str) -> Place:
    """Where the other end of `sock` is."""
    try:
        peer: Any = sock.getpeername()
        if sock.family != socket.AF_UNIX:
            return Place(sock, name, peer)
        inode = sockdiag.unix_peer(sock)
    except OSError as error:
        raise CannotRebuild(
            f"the other end of the connection cannot be told: {error.strerror}"
        ) from error
    return Place(sock, name, peer, outside_holders([inode]).get(inode) if inode else None)


# -- connections of our own -----------------------------------------------------------------------


@contextmanager
def beside(place: Place, deadline: float) -> Iterator[Resp]:
    """A second connection to the server, from the same net namespace."""
    with _same_namespace(place.sock) as second, _address(place) as address:
        second.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            second.connect(address)
        except OSError as error:
            reason = error.strerror or "no answer in time"
            raise PeerAway(
                f"a second connection to {place.name} cannot be made: {reason}"
            ) from error
        yield Resp(Wire(second, deadline, place.name))


@contextmanager
def _address(place: Place) -> Iterator[Any]:
    if not isinstance(place.peer, str):
        yield place.peer
        return
    if place.end is None:
        raise CannotRebuild(
            "the server has not accepted the connection yet, or its process cannot be seen from "
            "here"
        )
    try:
        # as the server knows it: it has made it
        path = connecting.inside_root(place.end[0], place.peer)
    except OSError as error:
        raise PeerAway(f"the socket {place.peer} cannot be found: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{path}"
    finally:
        os.close(path)


def _same_namespace(sock: socket.socket) -> socket.socket:
    try:
        return sockdiag.socket_beside(sock)
    except OSError as error:
        raise CannotRebuild(
            f"the net namespace of the connection cannot be entered: {error.strerror}"
        ) from error


# -- which line is ours ---------------------------------------------------------------------------


def _marks(place: Place) -> list[str]:
    """What the program's line contains, one of these."""
    if place.unix:
        return [f" fd={place.end[1]} "] if place.end else []
    host, port = place.sock.getsockname()[:2]
    host = str(host).partition("%")[0]
    plain = sockdiag.plain_host(host)
    names = {f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in (host, plain)}
    if ":" not in plain:
        # a server that listens on both families with one socket
        names.add(f"[::ffff:{plain}]:{port}")
    return [f" addr={name} " for name in sorted(names)]


def _only_line(listing: Any, marks: list[str], unix: bool) -> str:
    if isinstance(listing, ErrorReply):
        raise CannotRebuild(
            "the server does not let us look at its clients (options ask_user, ask): "
            f"{listing.text}",
            hint="Name a user who may run CLIENT LIST (ask_user and ask_secret in the rule), or, "
            "if the program never leaves a transaction, a blocking command or a subscription "
            "open, `ask: own`.",
        )
    if not isinstance(listing, str):
        raise CannotRebuild("the server answers CLIENT LIST with something else than text")
    lines = [
        line for line in _lines(listing, marks) if not unix or "U" in parse(line).text("flags")
    ]
    if len(lines) == 1:
        return lines[0]
    seen, mark = "several clients" if lines else "no client", marks[0].strip() if marks else "?"
    raise CannotRebuild(
        f"the server lists {seen} with the address of the connection, {mark} (option ask)",
        hint="Is there a proxy or an address translation between? If the program never leaves a "
        "transaction, a blocking command or a subscription open, say `ask: own` in the rule.",
    )


def _lines(listing: str, marks: list[str]) -> Iterator[str]:
    """The lines that contain one of `marks`; listings are long, and most lines are of others."""
    for mark in marks:
        at = listing.find(mark)
        while at >= 0:
            start, end = listing.rfind("\n", 0, at) + 1, listing.find("\n", at + 1)
            yield listing[start : end if end >= 0 else len(listing)]
            at = listing.find(mark, at + len(mark))


# -- looking --------------------------------------------------------------------------------------


def look_beside(place: Place, second: Resp, idle: Resp | None, server: dict[str, Any]) -> Sight:
    """The program's line of CLIENT LIST, asked over `second`; `idle` is one more connection of
    ours, to compare with.
    """
    number = idle.ask("CLIENT", "ID") if idle is not None else None
    listing = second.ask("CLIENT", "LIST")
    row = parse(_only_line(listing, _marks(place), place.unix))
    ours = (
        parse(next(_lines(f"\n{listing}", [f"\nid={number} "]), "").strip())
        if isinstance(number, int)
        else None
    )
    targets = frozenset(int(found) for found in re.findall(r" redir=(\d{1,18})\b", listing))
    return Sight(row, server, ours, targets)


def must_be_plain(second: Resp) -> None:
    """Any answer to a question in plain text will do; a server that wants TLS hangs up."""
    try:
        second.ask("PING")
    except PeerAway as error:
        raise CannotRebuild(
            f"a question in plain text, beside the session, got no answer (TLS?): {error.message}"
        ) from error


@contextmanager
def speaking(wire: Wire) -> Iterator[Resp]:
    """Questions on the program's own connection.  One that is not answered in time costs the
    connection:

    whatever came later would be taken for the answer to the program's next question.
    """
    try:
        yield Resp(wire)
    except (PeerAway, NotRedis) as error:
        with suppress(OSError):
            wire.sock.shutdown(socket.SHUT_RDWR)
        raise CannotRebuild(
            f"asked on its own connection, {error.message}; the connection was closed"
        ) from error


def look_own(own: Resp, server: dict[str, Any]) -> Sight:
    """CLIENT INFO over the program's connection; only where the user vouches for it (see the
    module's text).
    """
    answer = own.ask("CLIENT", "INFO")
    if answer == "QUEUED":
        raise CannotRebuild(
            "a transaction is open, and CLIENT INFO is part of it now, as `ask: own` allowed"
        )
    if isinstance(answer, ErrorReply) or not isinstance(answer, str):
        raise CannotRebuild(
            "CLIENT INFO was refused: "
            f"{answer.text if isinstance(answer, ErrorReply) else 'no text'}"
        )
    row = parse(answer)
    if not row.has("resp"):
        row = Row({**row.fields, "resp": "3" if own.kind == "=" else "2"})
    return Sight(row, server)


def watching(sight: Sight) -> bool | None:
    """Whether WATCH is in force; None if this server does not let us know.

    Redis 7.4 tells it.  7.0 and 7.2 do not, but count the watched keys in ``tot-mem``; an idle
    connection of ours, which watches nothing, is what it is compared with.
    """
    row, ours = sight.row, sight.ours
    if row.has("watch"):
        return row.number("watch") > 0
    if "d" in row.text("flags") or row.text("cmd") == "watch":
        return True
    if row.text("cmd") in ("exec", "discard", "unwatch", "reset"):
        return False
    if ours is None or not re.match(r"7\.[0-3]\.", str(sight.server.get("version", ""))):
        return None
    if abs(_own_memory(row) - _own_memory(ours)) <= _NOISE:
        return False
    # prefixes of CLIENT TRACKING are counted there too
    return None if "B" in row.text("flags") else True


def _own_memory(row: Row) -> int:
    """A client's memory without its buffers: the struct itself, and the keys that it watches."""
    buffers = ("qbuf", "qbuf-free", "rbs", "omem", "argv-mem", "multi-mem")
    return row.number("tot-mem") - sum(row.number(name) for name in buffers)


def about_server(resp: Resp, protocol: int = 2) -> tuple[dict[str, Any], ErrorReply | None]:
    """HELLO: version, mode and role, or the error that it was answered with."""
    answer = resp.ask("HELLO", protocol)
    if isinstance(answer, ErrorReply):
        return {}, answer
    told = as_map(answer)
    return {
        key: told[key]
        for key in ("server", "version", "mode", "role")
        if isinstance(told.get(key), str)
    }, None
