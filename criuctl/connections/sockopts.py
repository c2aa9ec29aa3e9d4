"""Socket options that a socket may lose when it is restored, by their names.

A connection that is made again is a new socket; others lose only what CRIU does not save (those not
in `SAVED`). Only values that differ from a new socket of the same kind are recorded: the rest is
the kernel's default on any host. Values are whole numbers, text (a device, a congestion control) or
lists of numbers (linger, times as seconds and microseconds).
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

_SOL, _TCP, _IP, _IPV6 = (
    socket.SOL_SOCKET,
    socket.IPPROTO_TCP,
    socket.IPPROTO_IP,
    socket.IPPROTO_IPV6,
)
_UDP = socket.IPPROTO_UDP
_ANY, _INET, _INET6, _STREAM = "any", "inet", "inet6", "tcp"
_INTERNET = "ip"  # IPv4 and IPv6, which speaks IPv4 with peers that have only that
# not settings of a connection any more; the second not of a listener either
_ALONE, _NEW = "tcp-alone", "tcp-new"
_DGRAM, _RAW, _PACKETS = "udp", "raw", "packets"  # packets: either of them
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
    "SO_TIMESTAMP": (_INTERNET, _SOL, 29, "int"),
    "SO_TIMESTAMPNS": (_INTERNET, _SOL, 35, "int"),
    "SO_TIMESTAMPING": (_INTERNET, _SOL, 37, "int"),
    "SO_RXQ_OVFL": (_INTERNET, _SOL, 40, "int"),
    "SO_DEBUG": (_INTERNET, _SOL, socket.SO_DEBUG, "int"),
    "SO_WIFI_STATUS": (_INTERNET, _SOL, 41, "int"),
    "SO_PEEK_OFF": (_INTERNET, _SOL, 42, "int"),
    "SO_NOFCS": (_INTERNET, _SOL, 43, "int"),
    "SO_TIMESTAMP_NEW": (_INTERNET, _SOL, 63, "int"),
    "SO_TIMESTAMPNS_NEW": (_INTERNET, _SOL, 64, "int"),
    "SO_TXREHASH": (_INTERNET, _SOL, 74, "int"),
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
    "TCP_MAXSEG": (_ALONE, _TCP, socket.TCP_MAXSEG, "int"),
    "TCP_WINDOW_CLAMP": (_ALONE, _TCP, socket.TCP_WINDOW_CLAMP, "int"),
    "TCP_FASTOPEN_CONNECT": (_NEW, _TCP, 30, "int"),
    "TCP_FASTOPEN_NO_COOKIE": (_ALONE, _TCP, 34, "int"),
    "TCP_CONGESTION": (_STREAM, _TCP, socket.TCP_CONGESTION, "text"),
    "IP_TOS": (_INTERNET, _IP, socket.IP_TOS, "int"),
    "IP_TTL": (_INTERNET, _IP, socket.IP_TTL, "int"),
    "IPV6_TCLASS": (_INET6, _IPV6, socket.IPV6_TCLASS, "int"),
    "IPV6_UNICAST_HOPS": (_INET6, _IPV6, socket.IPV6_UNICAST_HOPS, "int"),
    "IPV6_V6ONLY": (_INET6, _IPV6, socket.IPV6_V6ONLY, "int"),
    "IP_TRANSPARENT": (_INTERNET, _IP, socket.IP_TRANSPARENT, "int"),
    "IP_MTU_DISCOVER": (_INTERNET, _IP, 10, "int"),
    "IP_PKTINFO": (_INTERNET, _IP, 8, "int"),
    "IP_PASSSEC": (_INTERNET, _IP, 18, "int"),
    "IP_ROUTER_ALERT": (_RAW, _IP, 5, "int"),
    "IP_RECVOPTS": (_INTERNET, _IP, socket.IP_RECVOPTS, "int"),
    "IP_RETOPTS": (_INTERNET, _IP, 7, "int"),
    "IP_RECVERR": (_INTERNET, _IP, 11, "int"),
    "IP_MINTTL": (_INTERNET, _IP, 21, "int"),
    "IP_CHECKSUM": (_INTERNET, _IP, 23, "int"),
    "IP_BIND_ADDRESS_NO_PORT": (_INTERNET, _IP, 24, "int"),
    "IP_RECVFRAGSIZE": (_INTERNET, _IP, 25, "int"),
    "IP_RECVERR_RFC4884": (_INTERNET, _IP, 26, "int"),
    "IP_LOCAL_PORT_RANGE": (_INTERNET, _IP, 51, "int"),
    "IP_RECVTTL": (_INTERNET, _IP, 12, "int"),
    "IP_RECVTOS": (_INTERNET, _IP, socket.IP_RECVTOS, "int"),
    "IP_RECVORIGDSTADDR": (_INTERNET, _IP, 20, "int"),
    "IP_MULTICAST_IF": (_PACKETS, _IP, socket.IP_MULTICAST_IF, "int"),
    "IP_MULTICAST_TTL": (_PACKETS, _IP, socket.IP_MULTICAST_TTL, "int"),
    "IP_MULTICAST_LOOP": (_INTERNET, _IP, socket.IP_MULTICAST_LOOP, "int"),
    "IP_MULTICAST_ALL": (_INTERNET, _IP, 49, "int"),
    "IPV6_2292PKTINFO": (_INET6, _IPV6, 2, "int"),
    "IPV6_2292HOPOPTS": (_INET6, _IPV6, 3, "int"),
    "IPV6_2292DSTOPTS": (_INET6, _IPV6, 4, "int"),
    "IPV6_2292RTHDR": (_INET6, _IPV6, 5, "int"),
    "IPV6_2292HOPLIMIT": (_INET6, _IPV6, 8, "int"),
    "IPV6_CHECKSUM": (_RAW, _IPV6, 7, "int"),
    "IPV6_AUTOFLOWLABEL": (_INET6, _IPV6, 70, "int"),
    "IPV6_TRANSPARENT": (_INET6, _IPV6, 75, "int"),
    "IPV6_MTU_DISCOVER": (_INET6, _IPV6, 23, "int"),
    "IPV6_RECVERR": (_INET6, _IPV6, 25, "int"),
    "IPV6_ROUTER_ALERT_ISOLATE": (_INET6, _IPV6, 30, "int"),
    "IPV6_RECVERR_RFC4884": (_INET6, _IPV6, 31, "int"),
    "IPV6_FLOWINFO_SEND": (_INET6, _IPV6, 33, "int"),
    "IPV6_DONTFRAG": (_INET6, _IPV6, 62, "int"),
    "IPV6_MINHOPCOUNT": (_INET6, _IPV6, 73, "int"),
    "IPV6_FLOWINFO": (_INET6, _IPV6, 11, "int"),
    "IPV6_RECVHOPOPTS": (_INET6, _IPV6, socket.IPV6_RECVHOPOPTS, "int"),
    "IPV6_RECVRTHDR": (_INET6, _IPV6, socket.IPV6_RECVRTHDR, "int"),
    "IPV6_RECVDSTOPTS": (_INET6, _IPV6, socket.IPV6_RECVDSTOPTS, "int"),
    "IPV6_RECVPATHMTU": (_INET6, _IPV6, socket.IPV6_RECVPATHMTU, "int"),
    "IPV6_RECVORIGDSTADDR": (_INET6, _IPV6, 74, "int"),
    "IPV6_RECVFRAGSIZE": (_INET6, _IPV6, 77, "int"),
    "IPV6_RECVPKTINFO": (_INET6, _IPV6, socket.IPV6_RECVPKTINFO, "int"),
    "IPV6_RECVHOPLIMIT": (_INET6, _IPV6, socket.IPV6_RECVHOPLIMIT, "int"),
    "IPV6_RECVTCLASS": (_INET6, _IPV6, socket.IPV6_RECVTCLASS, "int"),
    "IPV6_MULTICAST_IF": (_PACKETS, _IPV6, socket.IPV6_MULTICAST_IF, "device"),
    "IPV6_MULTICAST_HOPS": (_PACKETS, _IPV6, socket.IPV6_MULTICAST_HOPS, "int"),
    "IPV6_MULTICAST_LOOP": (_INET6, _IPV6, socket.IPV6_MULTICAST_LOOP, "int"),
    "IPV6_MULTICAST_ALL": (_INET6, _IPV6, 29, "int"),
    "UDP_NO_CHECK6_TX": (_DGRAM, _UDP, 101, "int"),
    "UDP_NO_CHECK6_RX": (_DGRAM, _UDP, 102, "int"),
    "UDP_SEGMENT": (_DGRAM, _UDP, 103, "int"),
    "UDP_GRO": (_DGRAM, _UDP, 104, "int"),
}
"""Name -> (which sockets have it, level, option, form of its value)."""

_EARLY = (name for name in OPTIONS if name.startswith("SO_") and OPTIONS[name][2] < 29)
SAVED = frozenset(_EARLY) - {"SO_DEBUG"} | {
    "TCP_NODELAY",
    "TCP_CORK",
    "TCP_KEEPIDLE",
    "TCP_KEEPINTVL",
    "TCP_KEEPCNT",
    "IP_TOS",
    "IP_TTL",
    "IP_PKTINFO",
    "IPV6_V6ONLY",
}
"""What CRIU restores itself, where it restores the socket as it was."""
# and not of a socket of IPv6, which has them as well
_SAVED_OF_IPV4 = frozenset({"IP_TOS", "IP_TTL", "IP_PKTINFO"})

_SIZES: dict[Kind, int] = {"linger": 8, "time": 16, "text": 64}


def _kinds(sock: socket.socket) -> set[str]:
    kinds = {_ANY}
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        family = _INET if sock.family == socket.AF_INET else _INET6
        kinds |= {family, _INTERNET}
        if sock.type == socket.SOCK_STREAM:
            kinds.add(_STREAM)
            if not _connected(sock):
                kinds |= {_ALONE} if sock.getsockopt(_SOL, socket.SO_ACCEPTCONN) else {_ALONE, _NEW}
        elif sock.type == socket.SOCK_RAW:
            kinds |= {_RAW, _PACKETS}
        elif sock.type == socket.SOCK_DGRAM:
            kinds |= {_DGRAM, _PACKETS}
    return kinds


def _connected(sock: socket.socket) -> bool:
    with suppress(OSError):
        sock.getpeername()
        return True
    return False


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
            # an option that this kernel or this kind of socket does not have
            with suppress(OSError):
                found[name] = _get(sock, level, option, kind)
    return found


@functools.cache
def _fresh(family: int, kind: int, protocol: int) -> Mapping[str, Any]:
    with socket.socket(family, kind, protocol) as new:
        return _all(new)


def changed(
    sock: socket.socket, groups: Sequence[multicast.Group] = (), *, unsaved: bool = False
) -> dict[str, Any]:
    """Return the options of `sock` that differ from those of a new socket, and which of these
    multicast groups it is in.

    With `unsaved` only those that CRIU does not restore.
    """
    # a raw one has no default
    fresh = _fresh(sock.family, sock.type, sock.proto if sock.type == socket.SOCK_RAW else 0)
    saved = SAVED if sock.family != socket.AF_INET6 else SAVED - _SAVED_OF_IPV4
    found = {
        name: value
        for name, value in _all(sock, saved if unsaved else frozenset()).items()
        if fresh.get(name) != value
    }
    if groups and sock.type == socket.SOCK_DGRAM and (joined := multicast.joined(sock, groups)):
        found[_GROUPS] = joined
    return found


def apply(sock: socket.socket, options: Mapping[str, Any]) -> list[str]:
    """Set recorded options on `sock` where they differ; return the names of those that it
    rejected.
    """
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
                sock.setsockopt(
                    level, option, struct.pack("ii" if kind == "linger" else "qq", *value)
                )
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            OSError,
            struct.error,
        ):
            # from a manifest, which may hold anything
            refused.append(name)
    return refused


def _is(sock: socket.socket, name: str, value: Any) -> bool:
    _kind_of, level, option, kind = OPTIONS[name]
    with suppress(OSError):
        return bool(_get(sock, level, option, kind) == value)
    return False
