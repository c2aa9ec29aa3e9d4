"""The application protocol of a connection for which no rule names one.

`by_appearance` uses the record: the well-known port or path, or the program behind the peer.
`probe` asks an unrecognised peer over a new connection of criuctl's, never over the program's. It
is used before the freeze, only where the answer matters, and every peer is asked once.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..checkpoint.connection_record import ConnectionRecord
from ..errors import CriuctlError
from ..proc.threads import in_parallel

Dial = tuple[Callable[[], socket.socket], tuple[str, int] | str]
"""How to reach a peer: makes a socket in the right namespace; the address to connect it to."""

POSTGRESQL_PORT, REDIS_PORT = 5432, 6379
PROBE_SECONDS = 1.0  # for all questions to one peer
_MOST_PROBES = 16  # at the same time
_JOURNAL_PATH = re.compile(r"/run/systemd/journal(\.[^/]+)?/stdout")
_POSTGRESQL_PATH = re.compile(r".*/\.s\.PGSQL\.\d+")
_COMMAND = re.compile(r"\d+ \((.*)\)", re.DOTALL)
_PROGRAMS = {
    "postgres": "postgresql",
    "pgbouncer": "postgresql",
    "redis-server": "redis",
    "valkey-server": "redis",
    "keydb-server": "redis",
}
_SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"
_REDIS_PING = b"*1\r\n$4\r\nPING\r\n"
_REDIS_ANSWERS = (b"+PONG", b"-NOAUTH", b"-DENIED", b"-NOPERM", b"-LOADING", b"-MASTERDOWN")


def by_appearance(record: ConnectionRecord) -> str:
    """Return ``postgresql``, ``redis``, ``journal``, or "" when the record does not show it."""
    if record.type != "stream":
        return ""
    found = _COMMAND.fullmatch(record.peer_process)
    if found and found[1] in _PROGRAMS:
        return _PROGRAMS[found[1]]
    if record.family == "unix":
        if _POSTGRESQL_PATH.fullmatch(record.peer):
            return "postgresql"
        if _JOURNAL_PATH.fullmatch(record.peer):
            return "journal"
        return "redis" if "redis" in record.peer.rpartition("/")[2] else ""
    port = record.peer.rpartition(":")[2]
    return {str(POSTGRESQL_PORT): "postgresql", str(REDIS_PORT): "redis"}.get(port, "")


def probe(peers: Mapping[str, Dial], seconds: float = PROBE_SECONDS) -> dict[str, str]:
    """Return peer -> its application protocol, "" for an unknown one; many peers are asked
    at once.
    """
    if not peers:
        return {}
    found = in_parallel(
        lambda dial: _ask(dial, seconds), peers.values(), _MOST_PROBES, "criuctl-probe"
    )
    return dict(zip(peers, found, strict=True))


def _ask(dial: Dial, seconds: float) -> str:
    """Ask one peer. PostgreSQL answers its question with one byte at once; Redis takes that for
    half a line, so Redis is asked over a separate connection.
    """
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        try:
            first = stack.enter_context(_opened(dial, deadline))
            first.sendall(_SSL_REQUEST)
            answer = _first_of([first], min(deadline, time.monotonic() + seconds / 3))
            if answer is None or not _postgresql(answer[1]):
                second = stack.enter_context(_opened(dial, deadline))
                second.sendall(_REDIS_PING)
                # The first may only have been slow; an answer or a hang-up is enough.
                answer = _first_of([first, second] if answer is None else [second], deadline)
        except (OSError, CriuctlError):  # that process may have ended
            return ""
        if answer is None:
            return ""
        asked, data = answer
        if asked is first:
            return "postgresql" if _postgresql(data) else ""
        return "redis" if data.startswith(_REDIS_ANSWERS) else ""


def _postgresql(data: bytes) -> bool:
    return data in (b"N", b"S")


def _opened(dial: Dial, deadline: float) -> socket.socket:
    make, address = dial
    opened = make()
    try:
        opened.settimeout(max(0.01, deadline - time.monotonic()))
        opened.connect(address)
    except BaseException:
        opened.close()
        raise
    return opened


def _first_of(asked: list[socket.socket], deadline: float) -> tuple[socket.socket, bytes] | None:
    """Return the first socket that answered, and the answer; None when the time is over or all have
    hung up.
    """
    waiting = list(asked)
    while waiting:
        ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        for each in ready:
            try:
                data = each.recv(64)
            except OSError:
                data = b""
            if data or len(waiting) == 1:
                return each, data
            waiting.remove(each)
    return None
