"""Socket options that a socket may lose when it is restored, by their names.

A connection that is made anew is a fresh socket; others lose only what CRIU does not save (those not in `SAVED`).  Only what
differs from a new socket of the same kind is recorded: the rest is the kernel's default on any host.  Values
are whole numbers, text (a device, a congestion control) or lists of numbers (linger, times as seconds and microseconds).
"""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Literal

from . import multicast

Kind = Literal["int", "linger", "time", "text", "device"]

_SOL, _TCP, _IP, _IPV6 = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.IPPROTO_IPV6
_UDP = socket.IPPROTO_UDP
_ANY, _INET, _INET6, _STREAM = "any", "inet", "inet6", "tcp"
_INTERNET = "ip"  # IPv4 and IPv6, which speaks IPv4 with peers that have only that
_DGRAM, _DGRAM4, _DGRAM6 = "udp", "udp-inet", "udp-inet6"
_GROUPS = "MCAST_JOIN_GROUP"

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
    "SO_TIMESTAMP": (_DGRAM, _SOL, 29, "int"),
    "SO_TIMESTAMPNS": (_DGRAM, _SOL, 35, "int"),
    "SO_TIMESTAMPING": (_DGRAM, _SOL, 37, "int"),
    "SO_RXQ_OVFL": (_DGRAM, _SOL, 40, "int"),
    "SO_BUSY_POLL": (_ANY, _SOL, 46, "int"),
    "SO_SELECT_ERR_QUEUE": (_INTERNET, _SOL, 45, "int"),
    "SO_ZEROCOPY": (_ANY, _SOL, 60, "int"),
    "SO_PREFER_BUSY_POLL": (_INTERNET, _SOL, 69, "int"),
    "SO_RCVMARK": (_INTERNET, _SOL, 75, "int"),
    "SO_RCVPRIORITY": (_INTERNET, _SOL, 82, "int"),
    "TCP_NODELAY": (_STREAM, _TCP, socket.TCP_NODELAY, "int"),
    "TCP_CORK": (_STREAM, _TCP, socket.TCP_CORK, "int"),
    "TCP_KEEPIDLE": (_STREAM, _TCP, socket.TCP_KEEPIDLE, "int"),
    "TCP_KEEPINTVL": (_STREAM, _TCP, socket.TCP_KEEPINTVL, "int"),
    "TCP_KEEPCNT": (_STREAM, _TCP, socket.TCP_KEEPCNT, "int"),
    "TCP_USER_TIMEOUT": (_STREAM, _TCP, socket.TCP_USER_TIMEOUT, "int"),
    "TCP_LINGER2": (_STREAM, _TCP, socket.TCP_LINGER2, "int"),
    "TCP_NOTSENT_LOWAT": (_STREAM, _TCP, socket.TCP_NOTSENT_LOWAT, "int"),
    "TCP_DEFER_ACCEPT": (_STREAM, _TCP, socket.TCP_DEFER_ACCEPT, "int"),
    "TCP_FASTOPEN": (_STREAM, _TCP, socket.TCP_FASTOPEN, "int"),
    "TCP_SYNCNT": (_STREAM, _TCP, 7, "int"),
    "TCP_THIN_LINEAR_TIMEOUTS": (_STREAM, _TCP, 16, "int"),
    "TCP_SAVE_SYN": (_STREAM, _TCP, 27, "int"),
    "TCP_INQ": (_STREAM, _TCP, 36, "int"),
    "TCP_TX_DELAY": (_STREAM, _TCP, 37, "int"),
    "TCP_CONGESTION": (_STREAM, _TCP, socket.TCP_CONGESTION, "text"),
    "IP_TOS": (_INET, _IP, socket.IP_TOS, "int"),
    "IP_TTL": (_INET, _IP, socket.IP_TTL, "int"),
    "IPV6_TCLASS": (_INET6, _IPV6, socket.IPV6_TCLASS, "int"),
    "IPV6_UNICAST_HOPS": (_INET6, _IPV6, socket.IPV6_UNICAST_HOPS, "int"),
    "IPV6_V6ONLY": (_INET6, _IPV6, socket.IPV6_V6ONLY, "int"),
    "IP_TRANSPARENT": (_INET, _IP, socket.IP_TRANSPARENT, "int"),
    "IP_MTU_DISCOVER": (_INET, _IP, 10, "int"),
    "IP_RECVOPTS": (_INTERNET, _IP, socket.IP_RECVOPTS, "int"),
    "IP_RETOPTS": (_INTERNET, _IP, 7, "int"),
    "IP_RECVERR": (_INTERNET, _IP, 11, "int"),
    "IP_MINTTL": (_INTERNET, _IP, 21, "int"),
    "IP_CHECKSUM": (_DGRAM, _IP, 23, "int"),
    "IP_BIND_ADDRESS_NO_PORT": (_INTERNET, _IP, 24, "int"),
    "IP_RECVFRAGSIZE": (_DGRAM, _IP, 25, "int"),
    "IP_RECVERR_RFC4884": (_INTERNET, _IP, 26, "int"),
    "IP_LOCAL_PORT_RANGE": (_INTERNET, _IP, 51, "int"),
    "IP_RECVTTL": (_DGRAM4, _IP, 12, "int"),
    "IP_RECVTOS": (_DGRAM4, _IP, socket.IP_RECVTOS, "int"),
    "IP_RECVORIGDSTADDR": (_DGRAM4, _IP, 20, "int"),
    "IP_MULTICAST_IF": (_DGRAM4, _IP, socket.IP_MULTICAST_IF, "int"),
    "IP_MULTICAST_TTL": (_DGRAM4, _IP, socket.IP_MULTICAST_TTL, "int"),
    "IP_MULTICAST_LOOP": (_DGRAM4, _IP, socket.IP_MULTICAST_LOOP, "int"),
    "IP_MULTICAST_ALL": (_DGRAM4, _IP, 49, "int"),
    "IPV6_TRANSPARENT": (_INET6, _IPV6, 75, "int"),
    "IPV6_MTU_DISCOVER": (_INET6, _IPV6, 23, "int"),
    "IPV6_RECVERR": (_INET6, _IPV6, 25, "int"),
    "IPV6_ROUTER_ALERT_ISOLATE": (_INET6, _IPV6, 30, "int"),
    "IPV6_RECVERR_RFC4884": (_INET6, _IPV6, 31, "int"),
    "IPV6_FLOWINFO_SEND": (_INET6, _IPV6, 33, "int"),
    "IPV6_DONTFRAG": (_INET6, _IPV6, 62, "int"),
    "IPV6_MINHOPCOUNT": (_INET6, _IPV6, 73, "int"),
    "IPV6_FLOWINFO": (_DGRAM6, _IPV6, 11, "int"),
    "IPV6_RECVHOPOPTS": (_DGRAM6, _IPV6, socket.IPV6_RECVHOPOPTS, "int"),
    "IPV6_RECVRTHDR": (_DGRAM6, _IPV6, socket.IPV6_RECVRTHDR, "int"),
    "IPV6_RECVDSTOPTS": (_DGRAM6, _IPV6, socket.IPV6_RECVDSTOPTS, "int"),
    "IPV6_RECVPATHMTU": (_DGRAM6, _IPV6, socket.IPV6_RECVPATHMTU, "int"),
    "IPV6_RECVORIGDSTADDR": (_DGRAM6, _IPV6, 74, "int"),
    "IPV6_RECVFRAGSIZE": (_DGRAM6, _IPV6, 77, "int"),
    "IPV6_RECVPKTINFO": (_DGRAM6, _IPV6, socket.IPV6_RECVPKTINFO, "int"),
    "IPV6_RECVHOPLIMIT": (_DGRAM6, _IPV6, socket.IPV6_RECVHOPLIMIT, "int"),
    "IPV6_RECVTCLASS": (_DGRAM6, _IPV6, socket.IPV6_RECVTCLASS, "int"),
    "IPV6_MULTICAST_IF": (_DGRAM6, _IPV6, socket.IPV6_MULTICAST_IF, "device"),
    "IPV6_MULTICAST_HOPS": (_DGRAM6, _IPV6, socket.IPV6_MULTICAST_HOPS, "int"),
    "IPV6_MULTICAST_LOOP": (_DGRAM6, _IPV6, socket.IPV6_MULTICAST_LOOP, "int"),
    "IPV6_MULTICAST_ALL": (_DGRAM6, _IPV6, 29, "int"),
    "UDP_NO_CHECK6_TX": (_DGRAM6, _UDP, 101, "int"),
    "UDP_NO_CHECK6_RX": (_DGRAM6, _UDP, 102, "int"),
    "UDP_SEGMENT": (_DGRAM, _UDP, 103, "int"),
    "UDP_GRO": (_DGRAM, _UDP, 104, "int"),
}
"""Name -> (which sockets have it, level, option, form of its value)."""

SAVED = frozenset(name for name in OPTIONS if name.startswith("SO_") and OPTIONS[name][2] < 29) | {
    "TCP_NODELAY",
    "TCP_CORK",
    "TCP_KEEPIDLE",
    "TCP_KEEPINTVL",
    "TCP_KEEPCNT",
    "IP_TOS",
    "IP_TTL",
    "IPV6_V6ONLY",
}
"""What CRIU restores itself, where it restores the socket as it was."""

_SIZES: dict[Kind, int] = {"linger": 8, "time": 16, "text": 64}


def _kinds(sock: socket.socket) -> set[str]:
    kinds = {_ANY}
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        family = _INET if sock.family == socket.AF_INET else _INET6
        kinds |= {family, _INTERNET}
        if sock.type == socket.SOCK_STREAM:
            kinds.add(_STREAM)
        elif sock.type == socket.SOCK_DGRAM:
            kinds |= {_DGRAM, f"{_DGRAM}-{family}"}
    return kinds


def _get(sock: socket.socket, level: int, option: int, kind: Kind) -> Any:
    if kind == "int":
        return sock.getsockopt(level, option)
    if kind == "device":
        return multicast.device_name(sock, sock.getsockopt(level, option))
    raw = sock.getsockopt(level, option, _SIZES[kind])
    if kind == "text":
        return raw.split(b"\0")[0].decode(errors="replace")
    return list(struct.unpack("ii" if kind == "linger" else "qq", raw))


def _all(sock: socket.socket, without: Set[str] = frozenset()) -> dict[str, Any]:
    kinds, found = _kinds(sock), {}
    for name, (kind_of, level, option, kind) in OPTIONS.items():
        if kind_of in kinds and name not in without:
            with suppress(OSError):  # an option that this kernel or this kind of socket has not
                found[name] = _get(sock, level, option, kind)
    return found


@functools.cache
def _fresh(family: int, kind: int) -> Mapping[str, Any]:
    with socket.socket(family, kind) as new:
        return _all(new)


def changed(sock: socket.socket, groups: Sequence[multicast.Group] = (), *, unsaved: bool = False) -> dict[str, Any]:
    """The options of `sock` that differ from those of a new socket of ours, and which of these multicast groups it is in.

    With `unsaved` only those that CRIU does not restore.
    """
    fresh = _fresh(sock.family, sock.type)
    found = {name: value for name, value in _all(sock, SAVED if unsaved else frozenset()).items() if fresh.get(name) != value}
    if groups and sock.type == socket.SOCK_DGRAM and (joined := multicast.joined(sock, groups)):
        found[_GROUPS] = joined
    return found


def apply(sock: socket.socket, options: Mapping[str, Any]) -> list[str]:
    """Set recorded options on `sock`, where they are others; returns the names of those that it did not take."""
    refused = []
    for name, value in options.items():
        if name == _GROUPS:
            refused += multicast.join(sock, value)
            continue
        try:
            _kind_of, level, option, kind = OPTIONS[name]
            if _is(sock, name, value):
                continue
            if kind == "int":
                sock.setsockopt(level, option, value)
            elif kind == "text":
                sock.setsockopt(level, option, value.encode() + b"\0")
            elif kind == "device":
                sock.setsockopt(level, option, multicast.device_number(sock, value))
            else:
                sock.setsockopt(level, option, struct.pack("ii" if kind == "linger" else "qq", *value))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, OSError, struct.error):
            # Of a manifest, which may hold anything.
            refused.append(name)
    return refused


def _is(sock: socket.socket, name: str, value: Any) -> bool:
    _kind_of, level, option, kind = OPTIONS[name]
    with suppress(OSError):
        return bool(_get(sock, level, option, kind) == value)
    return False
