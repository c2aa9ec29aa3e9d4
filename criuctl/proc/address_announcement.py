"""Announce an address that has moved to this host: gratuitous ARP, or an unsolicited neighbour
advertisement.

Hosts and switches of its subnet learn from it which device has the address now; without it they
send to the old host until their tables expire.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress

from . import rtnetlink
from .namespace_sockets import socket_inside
from .rtnetlink import Link

_ETHERNET = 1
_ETH_P_ARP = 0x0806
_BROADCAST = b"\xff" * 6
_ARP = struct.Struct("!HHBBH6s4s6s4s")
_ARP_REQUEST, _ARP_REPLY = 1, 2
_ADVERTISEMENT, _OVERRIDE, _ALL_NODES = 136, 0x20, "ff02::1"


def announce(ip: str, link: Link, namespace: int | None) -> None:
    """Send gratuitous ARP (request and reply), or an unsolicited neighbour advertisement.

    Hosts that know the address learn its new place. Failures are not reported: a host that missed
    the packet asks before long. Nothing is sent on a device without ARP.
    """
    parsed = ipaddress.ip_address(ip)
    if link.kind != _ETHERNET or len(link.hardware) != 6 or link.flags & rtnetlink.IFF_NOARP:
        return
    with suppress(OSError):
        if parsed.version == 4:
            _gratuitous_arp(parsed.packed, link, namespace)
        else:
            _advertisement(parsed.packed, link, namespace)


def _make(namespace: int | None, family: int, protocol: int) -> socket.socket:
    if namespace is None:
        return socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    return socket_inside(namespace, family, socket.SOCK_RAW, protocol)


def _gratuitous_arp(ip: bytes, link: Link, namespace: int | None) -> None:
    with _make(namespace, socket.AF_PACKET, 0) as sock:
        sock.bind((link.name, 0))
        for operation, target in ((_ARP_REQUEST, b"\0" * 6), (_ARP_REPLY, _BROADCAST)):
            body = _ARP.pack(_ETHERNET, 0x0800, 6, 4, operation, link.hardware, ip, target, ip)
            sock.send(_BROADCAST + link.hardware + struct.pack("!H", _ETH_P_ARP) + body)


def _advertisement(ip: bytes, link: Link, namespace: int | None) -> None:
    with _make(namespace, socket.AF_INET6, socket.IPPROTO_ICMPV6) as sock:
        # else receivers ignore it
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, link.index)
        sock.bind((str(ipaddress.IPv6Address(ip)), 0))
        option = struct.pack("!BB", 2, 1) + link.hardware
        body = struct.pack("!BBHB3x", _ADVERTISEMENT, 0, 0, _OVERRIDE) + ip + option
        sock.sendto(body, (_ALL_NODES, 0, 0, link.index))
