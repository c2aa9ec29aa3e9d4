"""Find an address on this host, and the device that would get it.

`parse` reads what ``--keep-address`` takes, and refuses addresses that have a different meaning on
each host. `find` and `choose_device` only ask the kernel; `addresses` moves.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from ..errors import NotFound, UsageError
from ..quoting import quoted
from . import rtnetlink
from .rtnetlink import Address, Link, Rtnetlink

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Found:
    """An address that a host has."""

    ip: str
    device: str
    prefix: int
    dynamic: bool  # it has a lifetime: set by DHCP or a router, which may set it again
    shares: int  # other addresses of the same subnet on that device


def parse(text: str) -> tuple[str, str | None]:
    """Return (address, device) of ``IP`` or ``IP@DEVICE``.

    `UsageError` for an unmovable address.
    """
    plain, at, device = text.partition("@")
    try:
        ip = ipaddress.ip_address(plain)
    except ValueError:
        raise UsageError(
            f"{plain!r} is not an IP address",
            hint="--keep-address takes IP or IP@DEVICE (of the target).",
        ) from None
    if "%" in plain or ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        raise UsageError(
            f"{plain} has a different meaning on each host and cannot move",
            hint="Only addresses of a subnet can.",
        )
    if at and not (0 < len(device) <= 15 and "/" not in device and device.isprintable()):
        raise UsageError(f"{device!r} is not a name of a network device")
    return str(ip), device or None


def find(ip: str, namespace: int | None) -> Found | None:
    """Find the address on this host; None if it has none such."""
    wanted, _device = parse(ip)
    with Rtnetlink(namespace) as net:
        for address in all_of(net, wanted):
            names = {link.index: link.name for link in net.links()}
            shares = (
                sum(
                    a.index == address.index and a.network == address.network
                    for a in net.addresses()
                )
                - 1
            )
            dynamic = not address.flags & rtnetlink.F_PERMANENT
            return Found(wanted, names.get(address.index, ""), address.prefix, dynamic, shares)
    return None


def choose_device(ip: str, device: str | None, namespace: int | None) -> tuple[str, int]:
    """Return (device, prefix length) that the address would get here.

    The requested device, else the one in whose subnet the address is, else the one with the default
    route. Outside every subnet the prefix covers the address alone: a subnet that is not here would
    be cut off. `NotFound` if no such device is up.
    """
    wanted, _none = parse(ip)
    with Rtnetlink(namespace) as net:
        link, prefix = choose(net, ipaddress.ip_address(wanted), device)
    return link.name, prefix


def choose(net: Rtnetlink, ip: IpAddress, device: str | None) -> tuple[Link, int]:
    """Return the link and the prefix length, as `choose_device`."""
    alone = ip.max_prefixlen
    links = {
        link.index: link
        for link in net.links()
        if link.up and not link.flags & rtnetlink.IFF_LOOPBACK
    }
    around = [
        a
        for a in net.addresses()
        if a.index in links
        and a.prefix < alone
        and a.network.version == ip.version
        and ip in a.network
    ]
    if device is not None:
        chosen = next((link for link in links.values() if link.name == device), None)
        if chosen is None:
            raise NotFound(
                f"there is no network device {device} that is up on the target",
                hint="`ip link` shows them.",
            )
        around = [a for a in around if a.index == chosen.index]
        return chosen, max((a.prefix for a in around), default=alone)
    if around:
        closest = max(around, key=lambda a: a.prefix)
        return links[closest.index], closest.prefix
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    for route in net.routes(family):
        if route.default and route.device in links:
            return links[route.device], alone
    raise NotFound(
        f"no network device of the target has a subnet with {ip}, and there is no default route",
        hint=f"Name the device: --keep-address {quoted(ip)}@DEVICE.",
    )


def all_of(net: Rtnetlink, ip: str) -> list[Address]:
    """Return the entries of this address, on all devices."""
    return [address for address in net.addresses() if address.ip == ip]
