"""Reading a Redis server's state of a connection without sending anything on that connection.

A command on the program's own connection may do harm that cannot be undone. In a transaction it is
queued and becomes part of the program's own EXEC. While a command blocks (BLPOP, XREAD) it is
answered later, when the program takes the answer for its own. A subscriber's messages mix with the
answer. Which of these states holds is not known yet. So criuctl makes a second connection to the
same server, in the net namespace of the program's socket, sends CLIENT LIST and finds the line of
the program's connection: by ``addr=``, the program's local address, or for a unix socket by
``fd=``, the server's descriptor of the other end, which the kernel reports. criuctl logs in first:
when that is answered, the server has processed everything that had reached its kernel before.

``ask: own`` in the rule is for servers where CLIENT LIST is forbidden (ACL) or does not show the
connection (an address translation or a proxy). It asserts that the program never leaves a
transaction, a blocking command or a subscription open. CLIENT INFO is then sent on the program's
connection. A second connection still checks that the peer speaks plain Redis, and nothing is sent
while a request of the program is unanswered.
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

from ...proc import connecting, namespace_sockets, sockdiag
from ...proc.sockets import outside_holders
from .base import CannotRebuild, PeerAway
from .redis_wire import ErrorReply, NotRedis, Resp, as_map
from .wire import Wire

#: Bytes by which a client's memory may differ because of string headers and rounding; a watched key
# takes 56 or more.
_NOISE = 24


class Row(Struct, frozen=True):
    """One client in the answer to CLIENT LIST or CLIENT INFO; the fields depend on the server's
    version.
    """

    fields: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a field; "" if the server does not report it."""
        return self.fields.get(name, "")

    def number(self, name: str, default: int = 0) -> int:
        """Return a field that is a number; raise `CannotRebuild` if it is not."""
        value = self.fields.get(name, "")
        if not value:
            return default
        if not re.fullmatch(r"-?\d{1,18}", value):
            raise CannotRebuild(
                f"the server reports {name}={value[:40]!r} for the connection, not a number"
            )
        return int(value)

    def has(self, name: str) -> bool:
        """Return whether the server reports this field."""
        return name in self.fields


class Sight(Struct, frozen=True):
    """The result: the program's line, that of an idle connection, and the server's facts."""

    row: Row
    server: dict[str, Any] = field(default_factory=dict)
    ours: Row | None = None  # an idle connection of criuctl's, to compare with
    targets: frozenset[int] = frozenset()  # client IDs to which invalidations are redirected


def parse(line: str) -> Row:
    """Return one line of CLIENT LIST as a row."""
    return Row(dict(pair.partition("=")[::2] for pair in line.strip().split(" ") if "=" in pair))


class Place(Struct, frozen=True):
    """The program's connection, and its other end."""

    sock: socket.socket
    name: str  # for messages
    peer: Any  # an address for connect(2); a path is in the server's view
    # of a unix socket: the server's PID and descriptor; None if no process has it
    end: tuple[int, int] | None = None

    @property
    def unix(self) -> bool:
        """Return whether it is a unix socket, whose clients have no address."""
        return self.sock.family == socket.AF_UNIX


def place_of(sock: socket.socket, name: str) -> Place:
    """Find the other end of `sock`; raise `CannotRebuild`."""
    try:
        peer: Any = sock.getpeername()
        if sock.family != socket.AF_UNIX:
            return Place(sock, name, peer)
        inode = sockdiag.unix_peer(sock)
    except OSError as error:
        raise CannotRebuild(
            f"the other end of the connection cannot be found: {error.strerror}"
        ) from error
    return Place(sock, name, peer, outside_holders([inode]).get(inode) if inode else None)


# -- second connections ---------------------------------------------------------------------------


@contextmanager
def second_connection(place: Place, deadline: float) -> Iterator[Resp]:
    """Yield a second connection to the server, from the same net namespace."""
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
        # the server has bound the socket, so the path is in the server's view
        path = connecting.inside_root(place.end[0], place.peer)
    except OSError as error:
        raise PeerAway(f"the socket {place.peer} cannot be found: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{path}"
    finally:
        os.close(path)


def _same_namespace(sock: socket.socket) -> socket.socket:
    try:
        return namespace_sockets.socket_in_same_namespace(sock)
    except OSError as error:
        raise CannotRebuild(
            f"the net namespace of the connection cannot be entered: {error.strerror}"
        ) from error


# -- the program's line ---------------------------------------------------------------------------


def _marks(place: Place) -> list[str]:
    """Return the texts that can identify the program's line; it contains one of them."""
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
            f"the server refuses CLIENT LIST (options ask_user, ask): {listing.text}",
            hint="Name a user who may run CLIENT LIST (ask_user and ask_secret in the rule), or, "
            "if the program never leaves a transaction, a blocking command or a subscription "
            "open, `ask: own`.",
        )
    if not isinstance(listing, str):
        raise CannotRebuild("the server's answer to CLIENT LIST is not text")
    lines = [
        line for line in _lines(listing, marks) if not unix or "U" in parse(line).text("flags")
    ]
    if len(lines) == 1:
        return lines[0]
    seen, mark = "several clients" if lines else "no client", marks[0].strip() if marks else "?"
    raise CannotRebuild(
        f"the server lists {seen} with the address of the connection, {mark} (option ask)",
        hint="Check for a proxy or an address translation. If the program never leaves a "
        "transaction, a blocking command or a subscription open, set `ask: own` in the rule.",
    )


def _lines(listing: str, marks: list[str]) -> Iterator[str]:
    """Yield the lines that contain one of `marks`, without splitting the whole listing, which may
    be long.
    """
    for mark in marks:
        at = listing.find(mark)
        while at >= 0:
            start, end = listing.rfind("\n", 0, at) + 1, listing.find("\n", at + 1)
            yield listing[start : end if end >= 0 else len(listing)]
            at = listing.find(mark, at + len(mark))


# -- reading the state ----------------------------------------------------------------------------


def look_over_second(
    place: Place, second: Resp, idle: Resp | None, server: dict[str, Any]
) -> Sight:
    """Read the program's line of CLIENT LIST over `second`; `idle` is one more connection of
    criuctl's, to compare with.
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
    """Check that the server answers in plain text, whatever the answer; one that expects TLS hangs
    up.
    """
    try:
        second.ask("PING")
    except PeerAway as error:
        raise CannotRebuild(
            f"no answer to plain text on a second connection (TLS?): {error.message}"
        ) from error


@contextmanager
def speaking(wire: Wire) -> Iterator[Resp]:
    """Yield the program's own connection for questions; shut it down if one is not answered in
    time.

    The program would take a late answer for the answer to its own next command.
    """
    try:
        yield Resp(wire)
    except (PeerAway, NotRedis) as error:
        with suppress(OSError):
            wire.sock.shutdown(socket.SHUT_RDWR)
        raise CannotRebuild(
            f"after a question on its own connection, {error.message}; the connection was closed"
        ) from error


def look_own(own: Resp, server: dict[str, Any]) -> Sight:
    """Send CLIENT INFO on the program's connection; only with ``ask: own``, see the module's
    text.
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
    """Return whether WATCH is in force; None if this server does not report it.

    Redis 7.4 reports it. 7.0 and 7.2 do not, but count the watched keys in ``tot-mem``; that is
    compared with an idle connection of criuctl's, which watches nothing.
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
    """Return a client's memory without its buffers: the struct itself, and its watched keys."""
    buffers = ("qbuf", "qbuf-free", "rbs", "omem", "argv-mem", "multi-mem")
    return row.number("tot-mem") - sum(row.number(name) for name in buffers)


def about_server(resp: Resp, protocol: int = 2) -> tuple[dict[str, Any], ErrorReply | None]:
    """Return version, mode and role from HELLO, or the error."""
    answer = resp.ask("HELLO", protocol)
    if isinstance(answer, ErrorReply):
        return {}, answer
    hello = as_map(answer)
    return {
        key: hello[key]
        for key in ("server", "version", "mode", "role")
        if isinstance(hello.get(key), str)
    }, None
