"""CRIU's firewall tables: list, delete and make them.

CRIU locks the TCP connections of a tree with an nftables table and, after a dump that ends the
tree, leaves it behind for a restore to remove. criuctl removes it when the dump is over, because
years may pass before a restore. A restore needs the lock again: otherwise the first packet of a
restored socket meets a peer that is not restored yet, and the connection is reset. CRIU itself
removes the lock at the end.

Listing and deleting are two netlink messages; the table is made by the ``nft`` program.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import PlatformError
from . import command

_NETLINK_NETFILTER = 12
_NFNL_SUBSYS_NFTABLES = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_GETTABLE, _DELTABLE = 1, 2
_F_REQUEST, _F_ACK, _F_DUMP = 1, 4, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TABLE_NAME = 1
_ANY_FAMILY, _INET = 0, 1  # NFPROTO_UNSPEC, NFPROTO_INET
_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC = struct.Struct("=BBH")  # family, version, resource id (network order)
CRIU_TABLE = "CRIU-"
_TABLE_LENGTH = 31  # CRIU prints "inet CRIU-<run id>" into 32 bytes, "inet " included

_CRIU_MARK = "0xC114"  # packets that CRIU itself sends (SOCCR_MARK)

Endpoint = tuple[int, bytes, int]  # family, address, port
SocketMaker = Callable[[int, int, int], socket.socket]


def criu_table(run_id: str) -> str:
    """Return the name of the table in which CRIU's run `run_id` locks connections."""
    return f"inet {CRIU_TABLE}{run_id}"[:_TABLE_LENGTH].removeprefix("inet ")


def _message(
    kind: int, flags: int, sequence: int, family: int, resource: int = 0, attributes: bytes = b""
) -> bytes:
    body = _GENERIC.pack(family, 0, socket.htons(resource)) + attributes
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _replies(sock: socket.socket) -> Iterator[tuple[int, bytes]]:
    while True:
        data = sock.recv(1 << 18)
        position = 0
        while position < len(data):
            length, kind, _flags, _sequence, _port = _HEADER.unpack_from(data, position)
            yield kind, data[position + _HEADER.size : position + length]
            position += (length + 3) & ~3


def _open(make_socket: SocketMaker) -> socket.socket:
    try:
        sock = make_socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    except OSError as error:
        raise PlatformError(
            f"the kernel's netfilter cannot be reached: {error.strerror}"
        ) from error
    sock.settimeout(10)
    return sock


def tables(make_socket: SocketMaker = socket.socket) -> list[str]:
    """Return the names of the tables of family inet.

    `make_socket` may open the socket in another net namespace.
    """
    return [name for _family, name in _tables(make_socket, _INET)]


def all_tables(make_socket: SocketMaker = socket.socket) -> list[str]:
    """Return ``FAMILY NAME`` of every table, as ``nft list tables``, without those of CRIU's
    locks.
    """
    found = _tables(make_socket, _ANY_FAMILY)
    return [
        f"{_FAMILIES.get(number, number)} {name}"
        for number, name in found
        if not name.startswith(CRIU_TABLE)
    ]


def _tables(make_socket: SocketMaker, family: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    with _open(make_socket) as sock:
        sock.send(_message(_NFNL_SUBSYS_NFTABLES << 8 | _GETTABLE, _F_REQUEST | _F_DUMP, 1, family))
        for kind, body in _replies(sock):
            if kind == _NLMSG_DONE:
                return found
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT):
                    return found  # a kernel without nf_tables has no tables
                raise PlatformError(f"nftables' tables cannot be listed: {os.strerror(code)}")
            position = _GENERIC.size
            while position + 4 <= len(body):
                length, attribute = struct.unpack_from("=HH", body, position)
                if attribute & 0x3FFF == _TABLE_NAME:
                    name = (
                        body[position + 4 : position + length]
                        .rstrip(b"\0")
                        .decode(errors="replace")
                    )
                    found.append((body[0], name))
                position += max(4, (length + 3) & ~3)
    return found


def lock_connections(
    name: str,
    pairs: Iterable[tuple[Endpoint, Endpoint]],
    *,
    enter: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Make table `name` (as CRIU makes it at a dump), which drops every packet of these
    connections.

    `enter`: argv prefix that runs ``nft`` in another net namespace. `replace`: replace the existing
    table, in one transaction. Raises `CommandFailed`.
    """
    elements: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for (family, local, local_port), (_family, peer, peer_port) in pairs:
        here, there = socket.inet_ntop(family, local), socket.inet_ntop(family, peer)
        elements[family] += [
            f"{here} . {local_port} . {there} . {peer_port}",
            f"{there} . {peer_port} . {here} . {local_port}",
        ]
    lines = [f"delete table inet {name}"] if replace else []
    lines.append(f"create table inet {name}")
    lines += [
        f"add chain inet {name} {hook} {{ type filter hook {hook} priority 0; }}"
        for hook in ("output", "input")
    ]
    lines += [
        f"add rule inet {name} {hook} meta mark {_CRIU_MARK} accept" for hook in ("output", "input")
    ]
    for family, set_name, kind, header in (
        (socket.AF_INET, "conns4", "ipv4_addr", "ip"),
        (socket.AF_INET6, "conns6", "ipv6_addr", "ip6"),
    ):
        if not elements[family]:
            continue
        lines.append(
            f"add set inet {name} {set_name} {{ type {kind} . inet_service . {kind} . "
            f"inet_service; }}"
        )
        lines.append(
            f"add element inet {name} {set_name} {{ {', '.join(dict.fromkeys(elements[family]))} }}"
        )
        match = f"{header} saddr . tcp sport . {header} daddr . tcp dport @{set_name} drop"
        lines += [f"add rule inet {name} {hook} {match}" for hook in ("output", "input")]
    command.run([*enter, "nft", "-f", "-"], timeout=30, input="\n".join(lines).encode() + b"\n")


def delete_table(name: str, make_socket: SocketMaker = socket.socket) -> bool:
    """Delete table `name` of family inet; return False if it does not exist."""
    with _open(make_socket) as sock:
        sock.send(
            _message(_BATCH_BEGIN, _F_REQUEST, 1, 0, _NFNL_SUBSYS_NFTABLES)
            + _message(
                _NFNL_SUBSYS_NFTABLES << 8 | _DELTABLE,
                _F_REQUEST | _F_ACK,
                2,
                _INET,
                attributes=_attribute(_TABLE_NAME, name.encode() + b"\0"),
            )
            + _message(_BATCH_END, _F_REQUEST, 3, 0, _NFNL_SUBSYS_NFTABLES)
        )
        for kind, body in _replies(sock):
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code == 0:
                    return True
                if code in (errno.ENOENT, errno.EOPNOTSUPP):
                    return False
                raise PlatformError(f"firewall table {name} cannot be deleted: {os.strerror(code)}")
    return False
