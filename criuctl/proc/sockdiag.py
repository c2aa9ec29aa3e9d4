"""The kernel's socket tables (NETLINK_SOCK_DIAG): every socket of a net namespace, of all users.

The netlink socket must be made in the namespace that it asks about (`namespace_sockets`).

The tables hold bound, connected and listening sockets, and all unix and packet sockets. A new TCP
or netlink socket, and vsock, Bluetooth, AF_ALG, raw ICMP and the like, are in none of the tables
read here. A bound Multipath TCP socket appears as ``tcp``, by its inner socket.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from ..errors import PlatformError
from .namespace_sockets import namespace_of, namespace_socket, socket_inside

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_SOCK_DESTROY = 21
_NLM_F_REQUEST_DUMP, _NLM_F_REQUEST_ACK = 0x001 | 0x300, 0x001 | 0x004
_NLMSG_ERROR, _NLMSG_DONE = 2, 3

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_INET = struct.Struct("=BBBB")  # family, state, timer, retransmits; then the 48-byte socket id
_INET_TAIL = struct.Struct("=IIIII")  # expires, rqueue, wqueue, uid, inode
_UNIX = struct.Struct("=BBBxIII")  # family, type, state, inode, cookie
_PACKET = struct.Struct("=BBHIII")  # family, type, num, inode, cookie
# family, type, protocol, state, portid, dst_portid, dst_group, inode, cookie
_NETLINK = struct.Struct("=BBBBIIIIII")

_STATES = {
    1: "established",
    2: "syn-sent",
    3: "syn-recv",
    4: "fin-wait-1",
    5: "fin-wait-2",
    6: "time-wait",
    7: "close",
    8: "close-wait",
    9: "last-ack",
    10: "listen",
    11: "closing",
    12: "new-syn-recv",
}
# our end is closed, the peer's data or end missing; the peer's end has come; a listener
_CLOSING, _CLOSED, _LISTEN = (4, 9, 11), (5, 6), 10
_SKV6ONLY = 11  # attribute of IPv6 listeners
TYPES = {1: "stream", 2: "dgram", 3: "raw", 4: "rdm", 5: "seqpacket", 10: "packet"}
PROTOCOLS = {
    0: "ip",
    1: "icmp",
    6: "tcp",
    17: "udp",
    58: "icmpv6",
    132: "sctp",
    136: "udplite",
    255: "raw",
    262: "mptcp",
}
_INET_QUERIES = (
    (socket.AF_INET, 6),
    (socket.AF_INET6, 6),
    (socket.AF_INET, 17),
    (socket.AF_INET6, 17),
)
_RARE_INET_QUERIES = (
    (socket.AF_INET, 136),
    (socket.AF_INET6, 136),
    (socket.AF_INET, 255),
    (socket.AF_INET6, 255),
)

# TCP states in which there is, or will soon be, another end.
CONNECTED = frozenset(
    {
        "established",
        "syn-sent",
        "syn-recv",
        "fin-wait-1",
        "fin-wait-2",
        "close-wait",
        "last-ack",
        "closing",
    }
)


class Address(NamedTuple):
    """An internet address and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Socket(NamedTuple):
    """One socket of a net namespace."""

    inode: int
    family: str  # inet, inet6, unix, packet, netlink, vsock, alg, ... or family-N
    type: str  # stream, dgram, raw, seqpacket, ...
    protocol: str  # tcp, udp, icmp, mptcp, ...; "" where the family has none
    state: str  # as TCP names it; "close" for every socket that is not connected
    local: Address | None = None
    peer: Address | None = None
    rqueue: int = 0  # bytes to read; of a TCP listener: connections not accepted yet
    wqueue: int = 0  # bytes not acknowledged; of a unix listener: its backlog
    uid: int = 0
    name: str = ""  # unix: path, or "@..." for an abstract name
    peer_inode: int = 0  # unix
    # unix listeners: inodes of the clients in the accept queue; 0: closed already
    pending: tuple[int, ...] = ()
    # unix: device and inode (its low 32 bits) of the file that it is bound to
    file: tuple[int, int] = (0, 0)
    shutdown: int = 0  # unix and TCP: bit 0 no more reading, bit 1 no more writing
    port_id: int = 0  # netlink
    # netlink: bit mask of the multicast groups, as long as the kernel's
    groups: bytes = b""
    listed: bool = True  # False: not in sock_diag's tables, queried by the descriptor itself

    @property
    def connected(self) -> bool:
        """Whether it has, or will soon have, another end."""
        if self.family == "unix":
            return self.peer_inode != 0 or (self.state == "established" and self.type != "dgram")
        if self.protocol in ("tcp", "mptcp"):
            return self.state in CONNECTED
        return self.peer is not None and self.peer.port != 0

    @property
    def listening(self) -> bool:
        """Whether it waits for connections."""
        return self.state == "listen"


# -- asking the kernel ----------------------------------------------------------------------------


def _dump(diag: socket.socket, request: bytes) -> Iterator[memoryview]:
    """Yield the payload of each message of a dump; nothing where the kernel lacks that table."""
    diag.send(
        _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
        + request
    )
    while True:
        data = memoryview(diag.recv(1 << 18))
        position = 0
        while position + _HEADER.size <= len(data):
            length, kind, _flags, _sequence, _port = _HEADER.unpack_from(data, position)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                # ENOENT, EINVAL, ...: the diag module of that family is missing, so its sockets are
                # not listed
                return
            yield data[position + _HEADER.size : position + length]
            position += (length + 3) & ~3


def _attributes(message: memoryview, start: int) -> dict[int, memoryview]:
    found = {}
    while start + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, start)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = message[start + _ATTRIBUTE.size : start + length]
        start += (length + 3) & ~3
    return found


def _address(family: int, raw: memoryview, port: int) -> Address:
    if family == socket.AF_INET:
        return Address(socket.inet_ntop(socket.AF_INET, raw[:4]), port)
    return Address(plain_host(socket.inet_ntop(socket.AF_INET6, raw)), port)


def plain_host(host: str) -> str:
    """Return IPv4-mapped IPv6 addresses as IPv4: the ends of a connection may differ in family."""
    return host[7:] if host.startswith("::ffff:") and "." in host else host


def _inet(diag: socket.socket, family: int, protocol: int) -> Iterator[Socket]:
    request = struct.pack("=BBBxI", family, protocol, 1 << 7, 0xFFFFFFFF) + bytes(48)
    for message in _dump(diag, request):
        _family, state, _timer, _retransmits = _INET.unpack_from(message)
        local_port, peer_port = struct.unpack_from("!HH", message, 4)
        _expires, rqueue, wqueue, uid, inode = _INET_TAIL.unpack_from(message, 52)
        if inode == 0:
            continue  # TIME_WAIT and connections not accepted yet: they belong to no descriptor
        shutdown = _attributes(message, 72).get(8)
        peer = _address(family, message[24:40], peer_port)
        yield Socket(
            inode=inode,
            family="inet" if family == socket.AF_INET else "inet6",
            type={6: "stream", 255: "raw"}.get(protocol, "dgram"),
            protocol=PROTOCOLS[protocol],
            state=_STATES.get(state, str(state)),
            local=_address(family, message[8:24], local_port),
            peer=peer if peer_port else None,
            rqueue=rqueue,
            wqueue=wqueue,
            uid=uid,
            shutdown=shutdown[0] if shutdown else 0,
        )


def _takes(host: str, other: str, v6only: bool) -> bool:
    """Return whether a socket that is bound to `host` receives data for the address `other`."""
    if host == "0.0.0.0":
        return ":" not in other
    return host == other or (host == "::" and (":" in other or not v6only))


def _of_tcp(diag: socket.socket, family: int, *states: int) -> Iterator[tuple[memoryview, Address]]:
    """Yield the messages of the TCP sockets in these states, and the local address of each."""
    request = struct.pack("=BBBxI", family, 6, 0, sum(1 << state for state in states)) + bytes(48)
    for message in list(_dump(diag, request)):
        yield message, _address(family, message[8:24], struct.unpack_from("!H", message, 4)[0])


def is_remembered(port: int, namespace: int | None = None) -> bool:
    """Return whether the kernel remembers ended TCP connections of this local port.

    They are those that `end_waits` ends, and no process has them open.  `namespace`: a descriptor
    of the net namespace (None: ours).
    """
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
        return any(
            local.port == port and not struct.unpack_from("=I", message, 68)[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for message, local in _of_tcp(diag, family, *_CLOSING, *_CLOSED)
        )


def end_waits(host: str, port: int, namespace: int | None = None, *, v6only: bool = False) -> bool:
    """End leftovers of connections whose local end was this address and was closed first.

    For a wildcard address, all addresses with this port. The leftovers are TIME_WAIT, and FIN_WAIT2
    of connections that no process has open: the peer has received everything, and only has not
    closed its end yet. What a live listener would receive is left alone: it is that listener's.
    `namespace`: a descriptor of the net namespace (None: ours). Returns whether there are some that
    are not in these states yet, and will be if their peers answer. `OSError` where the kernel
    cannot do it.
    """
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    coming = False
    with made(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
        families = (socket.AF_INET, socket.AF_INET6)
        listening = [
            (local.host, bool(bytes(_attributes(message, 72).get(_SKV6ONLY, b"\0"))[0]))
            for family in families
            for message, local in _of_tcp(diag, family, _LISTEN)
            if local.port == port
        ]
        for family in families:
            for message, local in _of_tcp(diag, family, *_CLOSING, *_CLOSED):
                (inode,) = struct.unpack_from("=I", message, 68)
                if inode or local.port != port or not _takes(host, local.host, v6only):
                    continue
                if any(_takes(other, local.host, only) for other, only in listening):
                    continue
                if message[1] in _CLOSING:
                    coming = True
                    continue
                _destroy(diag, family, message)
    return coming


def end_pairs(pairs: Container[tuple[str, str]], namespace: int | None = None) -> None:
    """Destroy the TCP sockets with these (local, peer) addresses that no process has open;
    `namespace` as for `end_waits`, `OSError` too.
    """
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
        for family in (socket.AF_INET, socket.AF_INET6):
            for message, local in _of_tcp(diag, family, *_CLOSING, *_CLOSED):
                (inode,) = struct.unpack_from("=I", message, 68)
                (port,) = struct.unpack_from("!H", message, 6)
                peer = _address(family, message[24:40], port)
                if not inode and (str(local), str(peer)) in pairs:
                    _destroy(diag, family, message)


def _destroy(diag: socket.socket, family: int, message: memoryview) -> None:
    request = struct.pack("=BBBxI", family, 6, 0, 0) + message[4:52]
    diag.send(
        _HEADER.pack(_HEADER.size + len(request), _SOCK_DESTROY, _NLM_F_REQUEST_ACK, 1, 0) + request
    )
    (error,) = struct.unpack_from("=i", diag.recv(1 << 12), _HEADER.size)
    if -error not in (0, errno.ENOENT):  # ENOENT: it has just expired
        raise OSError(-error, os.strerror(-error))


def _unix(diag: socket.socket) -> Iterator[Socket]:
    show = 0x01 | 0x02 | 0x04 | 0x08 | 0x10  # name, file, peer, pending connections, queue lengths
    request = struct.pack(
        "=BBxxIIIII", socket.AF_UNIX, 0, 0xFFFFFFFF, 0, show, 0xFFFFFFFF, 0xFFFFFFFF
    )
    for message in _dump(diag, request):
        _family, kind, state, inode, _cookie0, _cookie1 = _UNIX.unpack_from(message)
        attributes = _attributes(message, _UNIX.size)
        raw = bytes(attributes.get(0, b""))
        queues = struct.unpack("=II", attributes[4]) if 4 in attributes else (0, 0)
        pending = attributes.get(3, memoryview(b""))
        file_inode, device = struct.unpack("=II", attributes[1]) if 1 in attributes else (0, 0)
        yield Socket(
            inode=inode,
            family="unix",
            type=TYPES.get(kind, str(kind)),
            protocol="",
            state=_STATES.get(state, str(state)),
            rqueue=queues[0],
            wqueue=queues[1],
            name="@" + os.fsdecode(raw[1:])
            if raw[:1] == b"\0"
            else os.fsdecode(raw.split(b"\0")[0]),
            peer_inode=struct.unpack("=I", attributes[2])[0] if 2 in attributes else 0,
            pending=struct.unpack(f"={len(pending) // 4}I", pending),
            file=(os.makedev(device >> 20, device & 0xFFFFF), file_inode),
            shutdown=attributes[6][0] if 6 in attributes else 0,
        )


def _packet(diag: socket.socket) -> Iterator[Socket]:
    for message in _dump(
        diag, struct.pack("=BBxxIIII", socket.AF_PACKET, 0, 0, 1, 0xFFFFFFFF, 0xFFFFFFFF)
    ):
        _family, kind, _number, inode, _cookie0, _cookie1 = _PACKET.unpack_from(message)
        yield Socket(
            inode=inode,
            family="packet",
            type=TYPES.get(kind, str(kind)),
            protocol="",
            state="close",
        )


def _netlink(diag: socket.socket) -> Iterator[Socket]:
    request = struct.pack("=BBxxIIII", socket.AF_NETLINK, 255, 0, 2, 0xFFFFFFFF, 0xFFFFFFFF)
    for message in _dump(diag, request):
        _f, kind, protocol, _state, port, _dport, _dgroup, inode, _c0, _c1 = _NETLINK.unpack_from(
            message
        )
        yield Socket(
            inode=inode,
            family="netlink",
            type=TYPES.get(kind, str(kind)),
            protocol=f"netlink-{protocol}",
            state="close",
            port_id=port,
            groups=bytes(_attributes(message, _NETLINK.size).get(1, b"")),
        )


def unix_peer(sock: socket.socket) -> int:
    """Return the inode of the other end of a unix socket, in any net namespace.

    0 if it has none. `OSError`.
    """
    inode = os.fstat(sock.fileno()).st_ino
    namespace = namespace_of(sock)
    try:
        with socket_inside(
            namespace, socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG
        ) as diag:
            return next(
                (found.peer_inode for found in list(_unix(diag)) if found.inode == inode), 0
            )
    finally:
        os.close(namespace)


def unix_sockets(namespace: int | None = None) -> list[Socket]:
    """Return every unix socket of the net namespace of this descriptor (None: ours); `OSError`."""
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
        return list(_unix(diag))


def sockets(pid: int | None = None, namespace: int | None = None) -> list[Socket]:
    """Return every socket of a net namespace that has a descriptor and is in sock_diag's tables.

    The namespace of `pid` (None: ours), or of the descriptor `namespace`. `NoSuchProcess`;
    `PlatformError` if the kernel refuses the query.
    """
    kind = socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG
    try:
        with (
            namespace_socket(pid, *kind)
            if namespace is None
            else socket_inside(namespace, *kind) as diag
        ):
            found = [
                s
                for family, protocol in _INET_QUERIES + _RARE_INET_QUERIES
                for s in _inet(diag, family, protocol)
            ]
            found += _unix(diag)
            found += _packet(diag)
            found += _netlink(diag)
    except OSError as error:
        raise PlatformError(
            f"the kernel's socket diagnostics (NETLINK_SOCK_DIAG) do not work: {error.strerror}"
        ) from error
    return found
