"""Internet sockets of every kind, with every option that the kernel takes set to another value than
a new socket has.

Nothing is listed here but what is left out: numbers are tried one by one, so that a newer kernel's
options are tried as well.
"""

from __future__ import annotations

import socket
import sys

from animal import Check, serve

SOL, IP, TCP, UDP, IPV6 = socket.SOL_SOCKET, 0, 6, 17, 41
NUMBERS = range(1, 128)
LEVELS = (SOL, IP, TCP, UDP, IPV6)
STATES = {
    "tcp": ("new", "addressed", "bound", "listening", "pair"),
    "udp": ("new", "addressed", "bound", "connected"),
    "raw": ("new", "bound", "connected"),
}
LEFT_OUT = {
    (SOL, 4),  # SO_ERROR
    (SOL, 28),  # SO_PEERNAME
    (SOL, 44),  # SO_LOCK_FILTER: there is no way back
    (SOL, 49),  # SO_INCOMING_CPU: where the last packet came to
    (SOL, 54),  # SO_REUSEPORT_ATTACH_..., no value
    (SOL, 55),  # SO_MEMINFO: what it holds just now
    (SOL, 56),  # SO_INCOMING_NAPI_ID
    (SOL, 57),  # SO_COOKIE: a number of the socket's own
    (TCP, 11),  # TCP_INFO
    (TCP, 12),  # TCP_QUICKACK: the kernel changes it
    (TCP, 19),  # TCP_REPAIR
    (TCP, 24),  # TCP_TIMESTAMP: it runs
    (TCP, 26),  # TCP_CC_INFO
    (IP, 9),  # IP_PKTOPTIONS: of what was received last
    (IP, 14),  # IP_MTU: of the route
    (IPV6, 6),  # IPV6_2292PKTOPTIONS
    (IPV6, 24),  # IPV6_MTU
    (IPV6, 61),  # IPV6_PATHMTU
    (UDP, 1),  # UDP_CORK: refused
}
"""(level, number): what is no setting."""
OF_A_CONNECTION = {
    (TCP, 2),  # TCP_MAXSEG: of what the other end takes
    (TCP, 10),  # TCP_WINDOW_CLAMP: the same
    (IPV6, 17),  # IPV6_MULTICAST_IF: where it came from
    (IPV6, 18),  # IPV6_MULTICAST_HOPS: of its first packet
    (IPV6, 26),  # IPV6_V6ONLY: the kernel sets it where there is an address
    (IP, 33),  # IP_MULTICAST_TTL: the same
}
"""What is no setting either, once there is a connection, or an address."""


def get(sock: socket.socket, level: int, number: int) -> bytes | None:
    """Its value; None if there is no such option."""
    try:
        return sock.getsockopt(level, number, 128)
    except OSError:
        return None


def change(sock: socket.socket, level: int, number: int) -> None:
    """Give it another value, if it takes one."""
    was = get(sock, level, number)
    if was is None or len(was) not in (1, 4):
        return
    value = int.from_bytes(was, sys.byteorder, signed=True)
    for new in (1 - value, value + 1, value - 1) if value in (0, 1) else (value + 1, value - 1):
        try:
            sock.setsockopt(level, number, new)
        except OSError:
            continue
        if get(sock, level, number) != was:
            return


def settings(sock: socket.socket) -> dict[tuple[int, int], bytes]:
    """All that it has, by level and number."""
    found = {}
    for level in LEVELS:
        for number in NUMBERS:
            if (level, number) not in LEFT_OUT and (value := get(sock, level, number)) is not None:
                found[level, number] = value
    return found


def make(kind: str, family: int) -> socket.socket:
    """A new one."""
    types = {
        "tcp": (socket.SOCK_STREAM, 0),
        "udp": (socket.SOCK_DGRAM, 0),
        "raw": (socket.SOCK_RAW, 200),
    }
    return socket.socket(family, *types[kind])


def used(kind: str, family: int, state: str) -> socket.socket:
    """One in that state, with every option changed that can be."""
    home = "127.0.0.1" if family == socket.AF_INET else "::1"
    sock = make(kind, family)
    if state == "pair":
        server = socket.create_server((home, 0), family=family)
        sock.connect(server.getsockname()[:2])
        kept.append(server.accept()[0])
        server.close()
    elif state != "new":
        if state == "addressed":
            sock.setsockopt(IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: it has none then
        sock.bind((home, 0))
    if state == "listening":
        sock.listen()
    for level in LEVELS:
        for number in NUMBERS:
            if (level, number) not in LEFT_OUT:
                change(sock, level, number)
    if state == "connected":
        sock.connect((home, 9))
    return sock


kept: list[socket.socket] = []
made: list[tuple[str, socket.socket, dict[tuple[int, int], bytes]]] = []
names: list[object] = []
changed: dict[str, int] = {}
for family in (socket.AF_INET, socket.AF_INET6):
    for kind, states in STATES.items():
        for state in states:
            one = used(kind, family, state)
            name = f"{kind} of {family.name}, {state}"
            made.append((name, one, settings(one)))
            names.append(one.getsockname())
            with make(kind, family) as other:
                fresh = settings(other)
            changed[name] = sum(fresh.get(key) != value for key, value in made[-1][2].items())


def check(found: Check) -> None:
    found.facts["changed"] = changed
    found.equal("addresses", [sock.getsockname() for _, sock, _ in made], names)
    for name, sock, before in made:
        after = settings(sock)
        for key, value in before.items():
            if after.get(key) != value and not (
                name.endswith(("pair", "addressed")) and key in OF_A_CONNECTION
            ):
                found.equal(f"{name}: {key}", after.get(key, b"").hex(), value.hex())


serve(check)
