"""A terminal of a session on another host, through ``ssh HOST criuctl attach --stdio NAME``.

The bridge is that of a session of this host; the holder there decides who writes. What it sends is
untrusted, so `GuardedSession` is between: it bounds what is kept in memory, refuses a value that
has not the type or the range that the bridge and the page expect, and never blocks in a send. An
answer in a form that nothing expects ends this terminal, and nothing else.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..errors import DataError, SessionGone
from ..session import names, protocol
from ..session.client.remote import Remote
from ..session.client.session import Answer, Event, Message, Session
from ..transport import ssh
from .bridge import bridged
from .hosts import HOSTS, OtherHost

_MOST_KEPT = 64 << 20  # bytes of memory, about, for messages that wait
_MESSAGE, _JSON = 512, 25  # the memory of a message; of a byte of JSON, at most
_SEND_BUFFER = 1 << 20
_MOST_A_SECOND = 20_000  # messages
_LARGEST_EVENT = 64 << 10
_DEEPEST, _ROWS, _COLUMNS, _LARGEST = 8, 500, 1000, 1 << 62
_ADDRESS = re.compile(r"[A-Za-z0-9@:/.%+_\[\]-]{0,300}")  # a page shows a command with it
_NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,  # of times that the system cannot show
    RecursionError,
    TypeError,
    ValueError,
)
_SO_SNDBUFFORCE = 32  # socket(7), above the limit of those who are not root


def _natural(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "rows": _natural(_ROWS),
    "cols": _natural(_COLUMNS),
    "to": lambda value: not isinstance(value, str) or _ADDRESS.fullmatch(value) is not None,
    **dict.fromkeys(("offset", "base"), _natural(_LARGEST)),
    **dict.fromkeys(("alternate_since", "cleared_at"), _or_none(_natural(_LARGEST))),
    **dict.fromkeys(("state", "operator", "token", "title", "message", "code"), _is(str)),
    **dict.fromkeys(("status", "modes"), _is(dict)),
    "lease": _or_none(
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(value.get(key), str) for key in ("operator", "name", "kind"))
        )
    ),
}

_KNOWN = ("status", "modes", "lease", "screen", "error")


def check_message(value: Any, depth: int = 0, *, known: bool = True) -> None:
    """Raise `DataError` if a message is nested too deep, or a value is not what its key says.

    Keys mean something at the top (`known`) and in what `_KNOWN` names; elsewhere, in labels or a
    step's progress, a program or a user has chosen them.
    """
    if depth > _DEEPEST:
        raise DataError("the other host sent a message that is nested too deep")
    if isinstance(value, dict):
        for key, one in value.items():
            if known and (check := _CHECKS.get(key)) is not None and not check(one):
                raise DataError(f"the other host sent a message with a wrong {key!r}")
            check_message(one, depth + 1, known=known and key in _KNOWN)
    elif isinstance(value, list):
        for one in value:
            check_message(one, depth + 1, known=False)


class GuardedSession(Session):
    """A connection to a holder that may be hostile."""

    _kept = 0  # see `_MOST_KEPT`
    _second, _count = 0.0, 0

    def __init__(self, sock: socket.socket, **how: Any) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        super().__init__(sock, **how)

    def receive(self, timeout: float | None = None) -> Message | None:
        message = super().receive(timeout)
        if not self.pending:
            self._kept = 0
            self._pieces.clear()  # parts of the answer to a `read`; no read is running here
        return message

    def _sort(self, kind: int, body: bytes) -> None:
        now = time.monotonic()
        if now - self._second > 1.0:
            self._second, self._count = now, 0
        self._count += 1
        self._kept += _MESSAGE + len(body) * (_JSON if kind == protocol.JSON else 1)
        if self._kept > _MOST_KEPT or self._count > _MOST_A_SECOND:
            raise DataError("the other host sends more than a holder does")
        before = len(self._inbox)
        super()._sort(kind, body)
        message = self._inbox[-1] if len(self._inbox) > before else None
        if isinstance(message, Event) and len(body) > _LARGEST_EVENT:
            raise DataError("the other host sent an event that is too large")
        if isinstance(message, Event | Answer):
            check_message(message.body)
        if isinstance(message, Answer) and message.error is not None:
            message.error.hint = ""  # what to do on this host is not for that one to say

    def _send(self, frame: bytes, fds: Any = ()) -> None:
        """Send without waiting: the loop of all pages sends, too."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        if not any(event & select.POLLOUT for _, event in poll.poll(0)):
            raise SessionGone("the other host does not read what is sent to it")
        super()._send(frame, fds)


async def remote_terminal(request: web.Request) -> web.WebSocketResponse:
    """Serve one page that is attached to a session of another host."""
    other = request.app[HOSTS].find(request.match_info["host"])
    config, name = other.desk.config, names.check_name(request.match_info["name"])
    if (connect := other.terminal(name)) is not None:
        return await bridged(request, other.desk, connect, _NONSENSE)
    remote = Remote(
        other.host,
        name,
        tuple(ssh.program(config)),
        session=GuardedSession,
    )
    try:
        return await bridged(request, other.desk, _connector(remote), _NONSENSE)
    finally:
        await _end(other, remote)


def _connector(remote: Remote) -> Callable[..., Session]:
    """Return what connects to the session; a link, which has a name, is for this host only."""

    def connect(*, role: str, operator: str = "") -> Session:
        assert not operator
        try:
            return remote.connect(role, None)
        except (LookupError, TypeError) as error:
            raise DataError("the other host does not greet as criuctl does") from error

    return connect


async def _end(other: OtherHost, remote: Remote) -> None:
    """End ssh, in a thread: it may take its time."""
    try:
        await other.desk.off(remote.close)
    except RuntimeError:  # the server ends, and its threads with it
        remote.close()
