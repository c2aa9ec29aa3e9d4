"""The multicast groups that a socket is in: finding them, and joining them again.

No system call lists the groups of a socket. But ``/proc`` lists the groups of each interface, of
all sockets together, and a socket that is asked for its filter of one group on one interface
answers whether it is in it.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import NoSuchProcess
from ..proc.procfs import read_lines
from ..proc.syscalls import getsockopt_of

_SIOCGIFNAME, _SIOCGIFINDEX = 0x8910, 0x8933
_MCAST_MSFILTER = 48
_EXCLUDE = 0  # MCAST_EXCLUDE: from all sources but those listed; without a list it is a plain join
_LEVELS = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
# struct group_filter: interface, group, mode, number of sources; their addresses follow
_FILTER = struct.Struct("=I4x128sII")
_REQUEST = struct.Struct("=I4x128s")  # struct group_req: interface, group
_MCAST_JOIN_GROUP = 42
_ADDRESS, _SOURCES = 128, 64
_EVERYBODY = ("224.0.0.1", "ff01::1", "ff02::1")  # every host is in those without any socket
_SOLICITED = "ff02::1:ff"

Group = tuple[int, str, int, str]
"""Address family, address, number and name of the interface."""


def groups(pid: int) -> list[Group]:
    """Return the groups that sockets in the net namespace of the process may have joined."""
    found: list[Group] = []
    index, name = 0, ""
    with suppress(OSError, NoSuchProcess):  # no IPv4, no multicast; or the process has ended
        for line in read_lines(pid, "net/igmp")[1:]:
            words = line.split()
            if not line[:1].isspace():
                # a long name touches the colon after it
                index, name = int(words[0]), words[1].removesuffix(":")
            else:
                found.append(
                    (
                        socket.AF_INET,
                        socket.inet_ntop(socket.AF_INET, struct.pack("=I", int(words[0], 16))),
                        index,
                        name,
                    )
                )
    with suppress(OSError, NoSuchProcess):
        for line in read_lines(pid, "net/igmp6"):
            words = line.split()
            found.append(
                (
                    socket.AF_INET6,
                    socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[2])),
                    int(words[0]),
                    words[1],
                )
            )
    return [g for g in found if g[1] not in _EVERYBODY and not g[1].startswith(_SOLICITED)]


def joined(sock: socket.socket, among: Sequence[Group]) -> list[list[Any]]:
    """Return the groups that the socket is in: ``[group, interface, mode, sources]``."""
    found: list[list[Any]] = []
    for family, group, index, name in among:
        if family != sock.family:
            continue
        asked = bytearray(_FILTER.pack(index, _packed(family, group), 0, _SOURCES)) + bytes(
            _SOURCES * _ADDRESS
        )
        try:
            getsockopt_of(sock.fileno(), _LEVELS[sock.family], _MCAST_MSFILTER, asked)
        except OSError:
            continue  # EADDRNOTAVAIL: it is not in this group
        _index, _group, mode, number = _FILTER.unpack_from(asked)
        starts = [_FILTER.size + n * _ADDRESS for n in range(min(number, _SOURCES))]
        found.append(
            [
                group,
                name,
                mode,
                [_address(family, asked[start : start + _ADDRESS]) for start in starts],
            ]
        )
    return found


def join(sock: socket.socket, wanted: Any) -> list[str]:
    """Join recorded groups; return those that could not be joined, as text. Present memberships
    stay.
    """
    refused = []
    # from a manifest, which may hold anything
    for entry in wanted if isinstance(wanted, list) else [wanted]:
        try:
            group, name, mode, sources = entry
            level = _LEVELS[socket.AddressFamily(sock.family)]
            index = device_number(sock, name)
            packed = _packed(sock.family, group)
            try:
                sock.setsockopt(level, _MCAST_JOIN_GROUP, _REQUEST.pack(index, packed))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if sources or mode != _EXCLUDE:
                listed = b"".join(_packed(sock.family, source) for source in sources)
                sock.setsockopt(
                    level, _MCAST_MSFILTER, _FILTER.pack(index, packed, mode, len(sources)) + listed
                )
        except (KeyError, TypeError, ValueError, AttributeError, OSError, struct.error):
            refused.append(
                f"multicast group {entry[0]} on {entry[1]}"
                if isinstance(entry, list) and len(entry) > 1
                else "?"
            )
    return refused


def device_number(sock: socket.socket, name: str) -> int:
    """Return the number of an interface in the net namespace of the socket; 0 for none."""
    return (
        int(
            struct.unpack_from(
                "16si", fcntl.ioctl(sock, _SIOCGIFINDEX, struct.pack("16s16x", name.encode()))
            )[1]
        )
        if name
        else 0
    )


def device_name(sock: socket.socket, number: int) -> str:
    """Return the interface's name; "" for none."""
    return (
        fcntl.ioctl(sock, _SIOCGIFNAME, struct.pack("16si12x", b"", number))[:16]
        .rstrip(b"\0")
        .decode()
        if number
        else ""
    )


def _packed(family: int, host: str) -> bytes:
    """Return a packed struct sockaddr_storage."""
    raw = socket.inet_pton(family, host)
    head = (
        struct.pack("=HH4s", family, 0, raw)
        if family == socket.AF_INET
        else struct.pack("=HHI16sI", family, 0, 0, raw, 0)
    )
    return head.ljust(_ADDRESS, b"\0")


def _address(family: int, raw: bytes | bytearray) -> str:
    return socket.inet_ntop(family, bytes(raw[4:8] if family == socket.AF_INET else raw[8:24]))
