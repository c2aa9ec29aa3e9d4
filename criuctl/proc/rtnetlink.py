"""Links, addresses and routes of a net namespace, read and changed by NETLINK_ROUTE.

The socket is made inside the namespace (`namespace_sockets.socket_inside`) and stays with it, so
neither a thread of ours nor a helper program has to enter it. Addresses and routes are kept as the
kernel reports them, including attributes that are unknown here: they are put back exactly as
reported.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import PlatformError
from .namespace_sockets import socket_inside

_ROUTE = 0
_NEWLINK, _GETLINK = 16, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _GETROUTE = 24, 26
_GETRULE, _GETQDISC, _GETNSID = 34, 38, 90
_NETNSA_NSID, _NETNSA_FD = 1, 3
_NSID = struct.Struct("=i")
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP, _CREATE, _EXCLUSIVE, _REPLACE = 1, 4, 0x300, 0x400, 0x200, 0x100
_DUMP_INTERRUPTED = 0x10
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
# family, dst and src length, tos, table, protocol, scope, type, flags
_ROUTE_MESSAGE = struct.Struct("=BBBBBBBBI")
_RULE_MESSAGE = struct.Struct("=BBBBBBBBI")  # like a route's, with an action instead of a type
_QDISC = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x8000

IFLA_ADDRESS, IFLA_IFNAME, IFLA_LINK, _IFLA_LINKINFO, _IFLA_LINK_NETNSID = 1, 3, 5, 18, 37
_IFLA_INFO_KIND, _TCA_KIND = 1, 1
IFA_ADDRESS, IFA_LOCAL, IFA_LABEL, IFA_BROADCAST, IFA_CACHEINFO, IFA_FLAGS = 1, 2, 3, 4, 6, 8
RTA_OIF, RTA_TABLE = 4, 15
IFF_UP, IFF_LOOPBACK, IFF_NOARP = 1, 8, 0x80
(
    F_SECONDARY,
    F_NODAD,
    F_DEPRECATED,
    F_TENTATIVE,
    F_PERMANENT,
    F_MANAGE_TEMPORARY,
    F_NO_PREFIX_ROUTE,
) = (
    *(0x01, 0x02, 0x20, 0x40, 0x80),
    *(0x100, 0x200),
)
_F_TEMPORARY = F_SECONDARY  # of IPv6
_KERNEL_OWN, _TABLE_LOCAL, _UNICAST, _CLONED, _ONLINK = 2, 255, 1, 0x200, 4
_TRIES = 5  # of a dump that a change interrupts


@dataclass(frozen=True, slots=True)
class Link:
    """A network device."""

    index: int
    name: str
    kind: int  # ARPHRD_*: 1 is Ethernet
    flags: int
    hardware: bytes  # "" without one
    # "veth", "bridge", ...: IFLA_INFO_KIND; "" for loopback and for physical devices
    driver: str = ""
    # the number of the other net namespace that holds its other end or lower device
    lower_namespace: int | None = None

    @property
    def up(self) -> bool:
        """Whether it is switched on."""
        return bool(self.flags & IFF_UP)


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a device, with all that the kernel reported."""

    family: int
    prefix: int
    flags: int
    scope: int
    index: int
    attributes: tuple[tuple[int, bytes], ...] = field(repr=False, default=())

    def attribute(self, kind: int) -> bytes:
        """Return the value of one attribute, "" without it."""
        return next((value for number, value in self.attributes if number == kind), b"")

    @property
    def ip(self) -> str:
        """The address itself; of a point-to-point link our side."""
        raw = self.attribute(IFA_LOCAL) or self.attribute(IFA_ADDRESS)
        return str(ipaddress.ip_address(raw))

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The subnet that it makes reachable."""
        raw = self.attribute(IFA_ADDRESS) or self.attribute(IFA_LOCAL)
        return ipaddress.ip_network((raw, self.prefix), strict=False)


@dataclass(frozen=True, slots=True)
class Route:
    """A unicast route that was set by a program (not by the kernel itself)."""

    message: bytes  # rtmsg with its attributes
    device: int  # 0: several, or none

    @property
    def family(self) -> int:
        """AF_INET or AF_INET6."""
        return self.message[0]

    @property
    def default(self) -> bool:
        """Whether it is a default route, in the main table."""
        table = _attributes(self.message, _ROUTE_MESSAGE.size).get(RTA_TABLE)
        return (
            self.message[1] == 0
            and (struct.unpack("=I", table)[0] if table else self.message[4]) == 254
        )


class Rtnetlink:
    """A netlink socket to one net namespace, of the descriptor `namespace`; None is our own."""

    def __init__(self, namespace: int | None = None) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        try:
            if namespace is None:
                self._socket = socket.socket(socket.AF_NETLINK, kind, _ROUTE)
            else:
                self._socket = socket_inside(namespace, socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE)
        except OSError as error:
            raise PlatformError(
                f"the network's state cannot be read: {error.strerror}",
                hint="criuctl needs CAP_SYS_ADMIN and CAP_NET_ADMIN.",
            ) from error
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __enter__(self) -> Rtnetlink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- asking

    def links(self) -> list[Link]:
        """Return all devices."""
        found = []
        for message in self._dump(_GETLINK, _LINK.pack(0, 0, 0, 0, 0)):
            _family, kind, index, flags, _change = _LINK.unpack_from(message)
            attributes = _attributes(message, _LINK.size)
            name = os.fsdecode(attributes.get(IFLA_IFNAME, b"").rstrip(b"\0"))
            info = _attributes(attributes.get(_IFLA_LINKINFO, b""), 0)
            driver = os.fsdecode(info.get(_IFLA_INFO_KIND, b"").rstrip(b"\0"))
            other = (
                _NSID.unpack(attributes[_IFLA_LINK_NETNSID])[0]
                if _IFLA_LINK_NETNSID in attributes
                else None
            )
            found.append(
                Link(index, name, kind, flags, attributes.get(IFLA_ADDRESS, b""), driver, other)
            )
        return found

    def addresses(self) -> list[Address]:
        """Return all addresses, IPv4 and IPv6."""
        found = []
        for message in self._dump(_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0)):
            family, prefix, flags, scope, index = _ADDRESS.unpack_from(message)
            attributes = _attributes(message, _ADDRESS.size)
            if family not in (socket.AF_INET, socket.AF_INET6) or not (
                IFA_LOCAL in attributes or IFA_ADDRESS in attributes
            ):
                continue
            flags = (
                struct.unpack("=I", attributes[IFA_FLAGS])[0] if IFA_FLAGS in attributes else flags
            )
            found.append(Address(family, prefix, flags, scope, index, tuple(attributes.items())))
        return found

    def routes(self, family: int) -> list[Route]:
        """Return the routes of a family in the kernel's order, without those that it makes
        itself.
        """
        found = []
        for message in self._dump(_GETROUTE, _ROUTE_MESSAGE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
            route = _ROUTE_MESSAGE.unpack_from(message)
            attributes = _attributes(message, _ROUTE_MESSAGE.size)
            table = (
                struct.unpack("=I", attributes[RTA_TABLE])[0]
                if RTA_TABLE in attributes
                else route[4]
            )
            if (
                route[7] != _UNICAST
                or route[5] == _KERNEL_OWN
                or table == _TABLE_LOCAL
                or route[8] & _CLONED
            ):
                continue
            device = struct.unpack("=I", attributes[RTA_OIF])[0] if RTA_OIF in attributes else 0
            head = _ROUTE_MESSAGE.pack(*route[:8], route[8] & _ONLINK)  # the other flags are states
            found.append(Route(head + bytes(message[_ROUTE_MESSAGE.size :]), device))
        return found

    def number_of(self, namespace: int) -> int | None:
        """Return the number by which this net namespace knows another one; None if it has none yet.

        `namespace`: a descriptor of the other one.
        """
        attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + _NSID.size, _NETNSA_FD) + _NSID.pack(
            namespace
        )
        self._send(_GETNSID, 0, bytes(4) + attribute)
        for kind, _flags, payload in self._answers():
            if kind == _ERROR:
                raise _error(payload)
            (number,) = _NSID.unpack(_attributes(payload, 4)[_NETNSA_NSID])
            return int(number) if number >= 0 else None
        return None

    def rules(self) -> set[bytes]:
        """Return the rules that choose a routing table, IPv4 and IPv6, each as the kernel reports
        it.
        """
        found: set[bytes] = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # a kernel without rules, or without IPv6
                found.update(
                    map(
                        bytes,
                        self._dump(_GETRULE, _RULE_MESSAGE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)),
                    )
                )
        return found

    def queueing(self) -> set[tuple[int, str]]:
        """Return (index of the device, name) of each queueing discipline that was set on a device.

        The kernel's own have no handle.
        """
        found = set()
        with suppress(OSError):  # a kernel without them
            for message in self._dump(_GETQDISC, _QDISC.pack(0, 0, 0, 0, 0)):
                _family, index, handle, *_ = _QDISC.unpack_from(message)
                name = _attributes(message, _QDISC.size).get(_TCA_KIND, b"")
                if handle:
                    found.add((index, os.fsdecode(name.rstrip(b"\0"))))
        return found

    # -- changing; `OSError` with the kernel's reason

    def add_address(self, address: Address, *, renew: bool = False) -> None:
        """Give a device an address, as it was reported or made; EEXIST if it exists.

        With `renew` the lifetime of an existing one is set again.
        """
        flags = address.flags & (F_NODAD | F_NO_PREFIX_ROUTE)
        attributes = {
            kind: value
            for kind, value in address.attributes
            if kind not in (IFA_FLAGS, IFA_CACHEINFO)
        }
        attributes[IFA_FLAGS] = struct.pack("=I", flags)
        lifetime = address.attribute(IFA_CACHEINFO)
        if lifetime and not address.flags & F_PERMANENT:
            attributes[IFA_CACHEINFO] = lifetime
        head = _ADDRESS.pack(
            address.family, address.prefix, flags & 0xFF, address.scope, address.index
        )
        self._change(
            _NEWADDR, head + _packed(attributes), _CREATE | (_REPLACE if renew else _EXCLUSIVE)
        )

    def delete_address(self, address: Address) -> None:
        """Remove an address from a device."""
        attributes = {
            kind: value for kind, value in address.attributes if kind in (IFA_LOCAL, IFA_ADDRESS)
        }
        head = _ADDRESS.pack(address.family, address.prefix, 0, 0, address.index)
        self._change(_DELADDR, head + _packed(attributes))

    def add_route(self, route: Route) -> None:
        """Set a route as it was reported; EEXIST if it exists."""
        self._change(_NEWROUTE, route.message, _CREATE | _EXCLUSIVE)

    # -- talking

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._sequence += 1
        self._socket.send(
            _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, self._sequence, 0) + body
        )

    def _answers(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (type, flags, payload) of each message that answers the last request."""
        while True:
            data = self._socket.recv(1 << 18)
            position = 0
            while position + _HEADER.size <= len(data):
                length, kind, flags, sequence, _port = _HEADER.unpack_from(data, position)
                if sequence == self._sequence:
                    yield kind, flags, data[position + _HEADER.size : position + length]
                position += (length + 3) & ~3

    def _dump(self, kind: int, body: bytes) -> list[bytes]:
        for _ in range(_TRIES):
            found: list[bytes] = []
            whole = True
            self._send(kind, _DUMP, body)
            for answer, flags, payload in self._answers():
                whole = whole and not flags & _DUMP_INTERRUPTED
                if answer == _DONE:
                    break
                if answer == _ERROR:
                    raise _error(payload)
                found.append(payload)
            if whole:
                break
        return found

    def _change(self, kind: int, body: bytes, flags: int = 0) -> None:
        self._send(kind, _ACK | flags, body)
        for answer, _flags, payload in self._answers():
            if answer == _ERROR:
                if payload[:4] != b"\0\0\0\0":
                    raise _error(payload)
                return


def _error(payload: bytes) -> OSError:
    number = -struct.unpack_from("=i", payload)[0] or errno.EIO
    return OSError(number, os.strerror(number))


def _attributes(message: bytes, start: int) -> dict[int, bytes]:
    found = {}
    while start + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, start)
        if length < _ATTRIBUTE.size:
            break
        found[kind & ~_NESTED] = bytes(message[start + _ATTRIBUTE.size : start + length])
        start += (length + 3) & ~3
    return found


def _packed(attributes: dict[int, bytes]) -> bytes:
    made = b""
    for kind, value in attributes.items():
        made += (
            _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)
        )
    return made
