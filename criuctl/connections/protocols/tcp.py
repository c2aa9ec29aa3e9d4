"""Connecting only: for protocols without session state, such as HTTP keep-alive or memcached.

Options of a rule:

- ``preamble``: text, or ``{base64: ...}``, sent on the new connection before the program goes on;
- ``expect``: a regular expression (bytes, matched from the beginning) or ``{base64: ...}`` (exactly
  these bytes), which the peer must answer; further bytes of the peer would be read by the program,
  so they are a failure;
- ``within``: seconds for the answer (5);
- ``one_way``: the program does not wait for answers to what it sends.

There is no session, so the peer is not asked; the rule asserts that the program can go on without
one. But a program that waits for an answer would wait for ever on a new connection, so a connection
on which the program was the last to send is not made again unless it is ``one_way``.
"""

from __future__ import annotations

import base64
import binascii
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from ...checkpoint.connection_record import ConnectionRecord
from .base import CannotRebuild, PeerAway, Settings
from .wire import Wire

_KNOWN = ("preamble", "expect", "within", "one_way")
_LONGEST_ANSWER = 64 * 1024
_WITHIN = 5.0


class Tcp:
    """The protocol `tcp`; stateless."""

    name = "tcp"

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`; finds out only whether the program waits for an
        answer.
        """
        _options(settings.options)
        stream = sock.type == socket.SOCK_STREAM
        if (
            stream
            and not settings.options.get("one_way")
            and Wire(sock, deadline, record.peer).unanswered()
        ):
            raise CannotRebuild(
                "the program has sent something that was not answered yet",
                hint=(
                    "If it does not wait for answers, say `one_way: true` in the options of the "
                    "rule."
                ),
            )
        return {}

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`."""
        preamble, expect, within = _options(settings.options)
        wire = Wire(sock, min(deadline, time.monotonic() + within), record.peer)
        if preamble:
            wire.send(preamble)
        answered = _await(wire, expect) if expect is not None else 0
        left = wire.unread() if sock.type != socket.SOCK_DGRAM else 0
        if left:
            raise CannotRebuild(
                f"{record.peer} said {left} bytes that the program does not expect",
                hint="A rule's option expect can take a greeting off the connection.",
            )
        return {"sent": len(preamble), "answered": answered} if preamble or answered else {}


PROTOCOL = Tcp()


def _await(wire: Wire, expect: re.Pattern[bytes] | bytes) -> int:
    """Read exactly the expected answer; return its number of bytes."""
    if isinstance(expect, bytes):
        seen = wire.receive(len(expect))
        if seen != expect:
            raise CannotRebuild(f"{wire.peer} answers something else than the rule expects")
        return len(seen)
    size = 1
    while True:
        try:
            seen = wire.peek(size)
        except PeerAway as error:
            if size == 1:
                raise
            raise PeerAway(
                f"{wire.peer} did not answer what the rule expects: {wire.unread()} bytes came, "
                "which are not it"
            ) from error
        found = expect.match(seen)
        if found is not None and (found.end() < len(seen) or wire.unread() <= len(seen)):
            wire.receive(found.end())
            return found.end()
        if len(seen) < size:
            raise PeerAway(f"{wire.peer} closed the connection")
        if size >= _LONGEST_ANSWER:
            raise CannotRebuild(f"{wire.peer} answers something else than the rule expects")
        size = min(max(wire.unread(), size + 1), _LONGEST_ANSWER)


def _options(options: Mapping[str, Any]) -> tuple[bytes, re.Pattern[bytes] | bytes | None, float]:
    for key in options:
        if key not in _KNOWN:
            raise CannotRebuild(
                f"the rule has an option that tcp does not know: {key}",
                hint=f"It knows {', '.join(_KNOWN)}.",
            )
    within = options.get("within", _WITHIN)
    if isinstance(within, bool) or not isinstance(within, int | float) or within <= 0:
        raise CannotRebuild("the rule's option within must be a number of seconds")
    if not isinstance(options.get("one_way", False), bool):
        raise CannotRebuild("the rule's option one_way must be true or false")
    expect = options.get("expect")
    if isinstance(expect, str):
        try:
            return (
                _bytes(options.get("preamble", ""), "preamble"),
                re.compile(expect.encode(), re.DOTALL),
                float(within),
            )
        except re.error as error:
            raise CannotRebuild(
                f"the rule's option expect is not a regular expression: {error}"
            ) from error
    exactly = None if expect is None else _bytes(expect, "expect")
    return _bytes(options.get("preamble", ""), "preamble"), exactly, float(within)


def _bytes(value: Any, key: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error:
            pass
    raise CannotRebuild(f"the rule's option {key} must be text or {{base64: TEXT}}")
