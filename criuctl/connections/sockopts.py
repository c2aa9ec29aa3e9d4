"""Socket options that a connected socket may lose when it is restored as a fresh one, by their names.

Only what differs from a new socket of the same kind is recorded: the rest is the kernel's default on any host.  Values
are whole numbers, text (a device, a congestion control) or lists of numbers (linger, times as seconds and microseconds).
"""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

Kind = Literal["int", "linger", "time", "text"]

_SOL, _TCP, _IP, _IPV6 = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.IPPROTO_IPV6
_ANY, _INET, _INET6, _STREAM = "any", "inet", "inet6", "tcp"

OPTIONS: dict[str, tuple[str, int, int, Kind]] = {
    "SO_KEEPALIVE": (_ANY, _SOL, socket.SO_KEEPALIVE, "int"),
    "SO_BROADCAST": (_ANY, _SOL, socket.SO_BROADCAST, "int"),
    "SO_REUSEADDR": (_ANY, _SOL, socket.SO_REUSEADDR, "int"),
    "SO_OOBINLINE": (_ANY, _SOL, socket.SO_OOBINLINE, "int"),
    "SO_PRIORITY": (_ANY, _SOL, socket.SO_PRIORITY, "int"),
    "SO_RCVLOWAT": (_ANY, _SOL, socket.SO_RCVLOWAT, "int"),
    "SO_PASSCRED": (_ANY, _SOL, socket.SO_PASSCRED, "int"),
    "SO_MARK": (_ANY, _SOL, socket.SO_MARK, "int"),
    "SO_LINGER": (_ANY, _SOL, socket.SO_LINGER, "linger"),
    "SO_RCVTIMEO": (_ANY, _SOL, socket.SO_RCVTIMEO, "time"),
    "SO_SNDTIMEO": (_ANY, _SOL, socket.SO_SNDTIMEO, "time"),
    "SO_BINDTODEVICE": (_ANY, _SOL, socket.SO_BINDTODEVICE, "text"),
    "TCP_NODELAY": (_STREAM, _TCP, socket.TCP_NODELAY, "int"),
    "TCP_CORK": (_STREAM, _TCP, socket.TCP_CORK, "int"),
    "TCP_KEEPIDLE": (_STREAM, _TCP, socket.TCP_KEEPIDLE, "int"),
    "TCP_KEEPINTVL": (_STREAM, _TCP, socket.TCP_KEEPINTVL, "int"),
    "TCP_KEEPCNT": (_STREAM, _TCP, socket.TCP_KEEPCNT, "int"),
    "TCP_USER_TIMEOUT": (_STREAM, _TCP, socket.TCP_USER_TIMEOUT, "int"),
    "TCP_LINGER2": (_STREAM, _TCP, socket.TCP_LINGER2, "int"),
    "TCP_NOTSENT_LOWAT": (_STREAM, _TCP, socket.TCP_NOTSENT_LOWAT, "int"),
    "TCP_CONGESTION": (_STREAM, _TCP, socket.TCP_CONGESTION, "text"),
    "IP_TOS": (_INET, _IP, socket.IP_TOS, "int"),
    "IP_TTL": (_INET, _IP, socket.IP_TTL, "int"),
    "IPV6_TCLASS": (_INET6, _IPV6, socket.IPV6_TCLASS, "int"),
    "IPV6_UNICAST_HOPS": (_INET6, _IPV6, socket.IPV6_UNICAST_HOPS, "int"),
    "IPV6_V6ONLY": (_INET6, _IPV6, socket.IPV6_V6ONLY, "int"),
}
"""Name -> (which sockets have it, level, option, form of its value)."""

_SIZES: dict[Kind, int] = {"linger": 8, "time": 16, "text": 64}


def _kinds(sock: socket.socket) -> set[str]:
    kinds = {_ANY}
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        kinds.add(_INET if sock.family == socket.AF_INET else _INET6)
        if sock.type == socket.SOCK_STREAM:
            kinds.add(_STREAM)
    return kinds


def _get(sock: socket.socket, level: int, option: int, kind: Kind) -> Any:
    if kind == "int":
        return sock.getsockopt(level, option)
    raw = sock.getsockopt(level, option, _SIZES[kind])
    if kind == "text":
        return raw.split(b"\0")[0].decode(errors="replace")
    return list(struct.unpack("ii" if kind == "linger" else "qq", raw))


def _all(sock: socket.socket) -> dict[str, Any]:
    kinds, found = _kinds(sock), {}
    for name, (kind_of, level, option, kind) in OPTIONS.items():
        if kind_of in kinds:
            with suppress(OSError):  # an option that this kernel or this kind of socket has not
                found[name] = _get(sock, level, option, kind)
    return found


@functools.cache
def _fresh(family: int, kind: int) -> Mapping[str, Any]:
    with socket.socket(family, kind) as new:
        return _all(new)


def changed(sock: socket.socket) -> dict[str, Any]:
    """The options of `sock` that differ from those of a new socket of ours."""
    fresh = _fresh(sock.family, sock.type)
    return {name: value for name, value in _all(sock).items() if fresh.get(name) != value}


def apply(sock: socket.socket, options: Mapping[str, Any]) -> list[str]:
    """Set recorded options on `sock`; returns the names of those that it did not take."""
    refused = []
    for name, value in options.items():
        try:
            _kind_of, level, option, kind = OPTIONS[name]
            if kind == "int":
                sock.setsockopt(level, option, value)
            elif kind == "text":
                sock.setsockopt(level, option, value.encode() + b"\0")
            else:
                sock.setsockopt(level, option, struct.pack("ii" if kind == "linger" else "qq", *value))
        except (KeyError, TypeError, AttributeError, OSError, struct.error):  # of a manifest, which may hold anything
            refused.append(name)
    return refused
