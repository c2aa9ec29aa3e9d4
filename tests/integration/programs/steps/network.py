"""Sockets of the network: listeners, connections within the tree, datagrams, of the kernel."""

from __future__ import annotations

import contextlib
import socket

from . import Place, Step, kind, readable
from .pipes import option_values, options

TCP = {
    "nodelay": (socket.TCP_NODELAY, [1]),
    "keepidle": (socket.TCP_KEEPIDLE, [33]),
    "keepintvl": (socket.TCP_KEEPINTVL, [4]),
    "keepcnt": (socket.TCP_KEEPCNT, [3]),
    "user_timeout": (socket.TCP_USER_TIMEOUT, [9000]),
    "maxseg": (socket.TCP_MAXSEG, [600]),
    "linger2": (socket.TCP_LINGER2, [7]),
    "window_clamp": (socket.TCP_WINDOW_CLAMP, [30000]),
    "quickack": (socket.TCP_QUICKACK, [0]),
    "notsent_lowat": (25, [5000]),
}

IP, IPV6 = socket.IPPROTO_IP, socket.IPPROTO_IPV6
INTERNET = {
    "ttl": (IP, socket.IP_TTL, [9]),
    "tos": (IP, socket.IP_TOS, [8, 16]),
    "mtu_discover": (IP, 10, [0, 2, 3]),
    "recverr": (IP, 11, [1]),
    "freebind": (IP, 15, [1]),
    "minttl": (IP, 21, [1]),
    "bind_no_port": (IP, 24, [1]),
    "retopts": (IP, 7, [1]),
    "pktinfo": (IP, 8, [1]),
    "recvttl": (IP, 12, [1]),
    "recvtos": (IP, 13, [1]),
    "multicast_ttl": (IP, 33, [5]),
    "multicast_all": (IP, 49, [0]),
    "recverr6": (IPV6, 25, [1]),
    "mtu_discover6": (IPV6, 23, [0, 2, 3]),
    "hops6": (IPV6, 16, [9]),
    "tclass6": (IPV6, 67, [8]),
    "dontfrag6": (IPV6, 62, [1]),
    "pktinfo6": (IPV6, 49, [1]),
    "recvhoplimit6": (IPV6, 51, [1]),
    "timestamp": (socket.SOL_SOCKET, 29, [1]),
    "timestampns": (socket.SOL_SOCKET, 35, [1]),
    "rxq_ovfl": (socket.SOL_SOCKET, 40, [1]),
    "gro": (socket.IPPROTO_UDP, 104, [1]),
    "segment": (socket.IPPROTO_UDP, 103, [500]),
}


def _ip_options(place: Place, one: socket.socket) -> None:
    for level, number, values in INTERNET.values():
        if place.random.random() < 0.2:
            with contextlib.suppress(OSError):  # the other family's, or of other sockets
                one.setsockopt(level, number, place.one(values))


def _ip_values(one: socket.socket, *, stream: bool = False) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (level, number, _) in INTERNET.items():
        # no option of a stream: the TTL of the first packet that came
        if stream and name == "multicast_ttl":
            continue
        try:
            found[name] = one.getsockopt(level, number)
        except OSError as error:
            found[name] = f"error {error.errno}"
    return found


def _family(place: Place) -> tuple[int, str]:
    return place.one([(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])


def _tcp_options(place: Place, one: socket.socket) -> None:
    for number, values in TCP.values():
        if place.random.random() < 0.2:
            one.setsockopt(socket.IPPROTO_TCP, number, place.one(values))


def _tcp_values(one: socket.socket) -> dict[str, object]:
    left = ("maxseg", "quickack", "window_clamp")  # they go with the connection's life
    found: dict[str, object] = {
        name: one.getsockopt(socket.IPPROTO_TCP, number)
        for name, (number, _) in TCP.items()
        if name not in left
    }
    found["congestion"] = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).hex()
    return found


@kind
def listener(place: Place) -> Step:
    family, home = _family(place)
    one = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, place.one([0, 1]))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, place.one([0, 1]))
    options(place, one)
    _tcp_options(place, one)
    _ip_options(place, one)
    one.bind((home, 0))
    one.listen(place.random.randint(1, 50))
    one.settimeout(20)
    yield
    while True:
        with socket.create_connection(one.getsockname()[:2], 20) as client:
            server, _ = one.accept()
            client.sendall(b"hello there")
            found = [server.recv(99).hex(), option_values(one), _tcp_values(one), _ip_values(one)]
            server.close()
            client.recv(1)
        yield found


@kind
def connection(place: Place) -> Step:
    """Within the tree, with data on its way both ways, perhaps closed one way."""
    family, home = _family(place)
    with socket.create_server((home, 0), family=socket.AddressFamily(family)) as server:
        a = socket.create_connection(server.getsockname()[:2])
        b, _ = server.accept()
    a.settimeout(20)
    b.settimeout(20)
    _tcp_options(place, a)
    _tcp_options(place, b)
    _ip_options(place, a)
    for one in (a, b):
        if place.random.random() < 0.5:
            one.sendall(place.bytes(5000))
    closed = place.random.random() < 0.3
    if closed:
        a.shutdown(socket.SHUT_WR)
    yield
    while True:
        found: list[object] = []
        for one, other in ((a, b), (b, a)):
            ended = closed and one is a
            if not ended:
                one.sendall(b"mark")
            data = b""
            while not (data.endswith(b"mark") and not ended) and (part := other.recv(9999)):
                data += part
            found += [
                data.hex(),
                _tcp_values(one),
                _ip_values(one, stream=True),
                option_values(one).get("keepalive"),
            ]
        yield found


@kind
def datagram(place: Place) -> Step:
    family, home = _family(place)
    one, other = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
    options(place, one)
    _ip_options(place, one)
    one.bind((home, 0))
    other.bind((home, 0))
    if place.random.random() < 0.5:
        other.connect(one.getsockname()[:2])
    yield
    while True:
        other.sendto(b"x", one.getsockname()[:2])
        yield [readable(one.fileno()) and one.recv(9).hex(), option_values(one), _ip_values(one)]


@kind
def of_no_address(place: Place) -> Step:
    """An internet socket that is not connected, with options; of TCP perhaps bound."""
    family, home = _family(place)
    one = socket.socket(
        family,
        *place.one([(socket.SOCK_STREAM, 0), (socket.SOCK_DGRAM, 0), (socket.SOCK_RAW, 200)]),
    )
    options(place, one)
    _ip_options(place, one)
    if one.type == socket.SOCK_STREAM:
        _tcp_options(place, one)
        if place.random.random() < 0.3:
            one.bind((home, 0))
    yield
    while True:
        yield [
            option_values(one),
            _ip_values(one),
            _tcp_values(one) if one.type == socket.SOCK_STREAM else "",
        ]


@kind
def of_the_interfaces(place: Place) -> Step:
    """rtnetlink: a request and its answer."""
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    one.bind((0, place.one([0, 1])))
    yield
    while True:
        yield [one.getsockname()[1], _ask(one)]


def _ask(one: socket.socket) -> int:
    # RTM_GETLINK of the first interface
    one.send(
        (32).to_bytes(4, "little")
        + bytes([18, 0, 1, 0])
        + bytes(8)
        + bytes(4)
        + (1).to_bytes(4, "little")
        + bytes(8)
    )
    kinds = int.from_bytes(one.recv(9999)[4:6], "little") if readable(one.fileno()) else -1
    with contextlib.suppress(BlockingIOError):
        while one.recv(9999, socket.MSG_DONTWAIT):
            pass
    return kinds


@kind
def raw(place: Place) -> Step:
    one = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 9)
    yield
    while True:
        yield [
            one.getsockopt(socket.IPPROTO_IP, socket.IP_TTL),
            one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE),
        ]


@kind
def packets(place: Place) -> Step:
    """A packet socket on lo."""
    one = socket.socket(socket.AF_PACKET, place.one([socket.SOCK_RAW, socket.SOCK_DGRAM]), 0)
    one.bind(("lo", 0))
    yield
    while True:
        yield [str(one.getsockname()[:2]), one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)]
