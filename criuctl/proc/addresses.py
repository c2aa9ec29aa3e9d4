"""Move an address from one host to another, with the established connections that are bound to it.

Used by a migration with ``--keep-address``: the tree is frozen and CRIU's firewall lock drops every
packet of its connections. The source gives the address up (`take`). The target gets it (`bring`)
before CRIU restores the sockets, which bind to it, and announces it to the network
(`BroughtAddress.announce`). A migration that fails undoes both, target first: an address that two
hosts have breaks the connections of both. So the target's address is on trial until the tree runs
there.

Taking one address away may take more with it: other addresses of its subnet, when it was the first
of them, and routes that were set through it. What can stay is put back at once. The rest is part of
the held address and comes back with `HeldAddress.put_back`; its description is JSON, so that
another criuctl can do it if this one is killed.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import Conflict, CriuctlError, NotFound, UsageError
from . import rtnetlink
from .address_announcement import announce
from .address_choice import all_of, choose, parse
from .rtnetlink import Address, Link, Route, Rtnetlink

_MAX_ROUTES = 10_000
TRIAL = 10  # seconds that an address on trial outlives its keeper


@dataclass(slots=True)
class HeldAddress:
    """An address that `take` has taken away; no host has it until it is brought or put back."""

    ip: str
    device: str
    address: Address
    routes: tuple[Route, ...]  # routes that were removed with it
    namespace: int | None = None  # descriptor; None: ours. Not part of the description
    notes: list[str] = field(default_factory=list)  # warnings for the user

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON: for the target, and for the criuctl that puts it back
        later.
        """
        a = self.address
        return {
            "ip": self.ip,
            "device": self.device,
            "prefix": a.prefix,
            "flags": a.flags,
            "scope": a.scope,
            "attributes": [[kind, value.hex()] for kind, value in a.attributes],
            "routes": [route.message.hex() for route in self.routes],
        }

    @classmethod
    def from_dict(cls, description: Any, namespace: int | None = None) -> HeldAddress:
        """Parse what `to_dict` returned, on the host that it was taken from.

        `UsageError` if it makes no sense.
        """
        try:
            ip = ipaddress.ip_address(description["ip"])
            attributes = tuple(
                (int(kind), bytes.fromhex(value)) for kind, value in description["attributes"][:32]
            )
            routes = tuple(
                Route(bytes.fromhex(text), 0) for text in description["routes"][:_MAX_ROUTES]
            )
            family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
            address = Address(
                family,
                int(description["prefix"]),
                int(description["flags"]),
                int(description["scope"]),
                0,
                attributes,
            )
            if address.ip != str(ip):
                raise ValueError("it contains two addresses")
            return cls(str(ip), str(description["device"]), address, routes, namespace)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"the description of an address that moves is not valid: {error}"
            ) from error

    def put_back(self) -> None:
        """Give it back to its device, with its routes, and announce it.

        An address that is there is fine. `NotFound` if the device is gone. An address that was the
        first of several in its subnet is the last of them now.
        """
        with Rtnetlink(self.namespace) as net:
            link = _link(net, self.device)
            address = replace(
                self.address, index=link.index, flags=self.address.flags | rtnetlink.F_NODAD
            )
            _add(net, address, self.device)
            _set_routes(net, self.routes)
        announce(self.ip, link, self.namespace)


class BroughtAddress:
    """An address that `bring` has given to this host: on trial, until `announce` or `undo`.

    On trial it has a lifetime of seconds, which a thread renews: if this process is killed, the
    kernel itself removes the address, and the host that it came from can have it again.
    """

    def __init__(self, address: Address, device: str, namespace: int | None, trial: int) -> None:
        self.ip, self.prefix, self.device = address.ip, address.prefix, device
        self._address = address
        self._namespace = namespace
        self._trial = trial
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._give(trial=True, renew=False)
        threading.Thread(target=self._renew, name=f"trial of {self.ip}", daemon=True).start()

    def announce(self) -> None:
        """Keep the address: remove its lifetime and announce it. May be called repeatedly."""
        self._over.set()
        with self._lock:
            link = self._give(trial=False, renew=True)
        announce(self.ip, link, self._namespace)

    def undo(self) -> None:
        """Remove the address again; one that is gone already is fine."""
        self._over.set()
        with self._lock, Rtnetlink(self._namespace) as net:
            links = {link.index: link.name for link in net.links()}
            for address in all_of(net, self.ip):
                if links.get(address.index) == self.device and address.prefix == self.prefix:
                    _delete(net, address)

    def _give(self, *, trial: bool, renew: bool) -> Link:
        # preferred, valid, and the times of creation and change
        lifetime = struct.pack("=IIII", self._trial, self._trial, 0, 0)
        with Rtnetlink(self._namespace) as net:
            link = _link(net, self.device)
            address = replace(self._address, index=link.index)
            if trial:
                attributes = (*address.attributes, (rtnetlink.IFA_CACHEINFO, lifetime))
                address = replace(
                    address, flags=address.flags & ~rtnetlink.F_PERMANENT, attributes=attributes
                )
            _add(net, address, self.device, renew=renew)
        return link

    def _renew(self) -> None:
        while not self._over.wait(self._trial / 5):
            # the device may be gone; the next try reports it
            with self._lock, suppress(CriuctlError, OSError):
                if not self._over.is_set():
                    self._give(trial=True, renew=True)


def _link(net: Rtnetlink, device: str) -> Link:
    for link in net.links():
        if link.name == device:
            return link
    raise NotFound(
        f"the network device {device} is gone",
        hint="Make it again, or add the address to another (`ip address add`).",
    )


# -- moving ----------------------------------------------------------------------------------------


def take(
    ip: str, namespace: int | None, noted: Callable[[HeldAddress], None] | None = None
) -> HeldAddress:
    """Remove the address from the device that has it.

    `NotFound` without it, `Conflict` if two devices have it. `namespace`: a descriptor of the net
    namespace (None: ours), which the result keeps using; the caller keeps it open. `noted` is
    called with what is about to be removed, to write it down.
    """
    wanted, _device = parse(ip)
    with Rtnetlink(namespace) as net:
        found = all_of(net, wanted)
        if not found:
            raise NotFound(
                f"{wanted} is not an address of this host", hint="`ip address` shows them."
            )
        names = {link.index: link.name for link in net.links()}
        if len(found) > 1:
            where = ", ".join(names.get(a.index, "?") for a in found)
            raise Conflict(
                f"several devices have the address {wanted}: {where}",
                hint="Remove it from all but one (`ip address del`).",
            )
        address = found[0]
        others = [
            a
            for a in net.addresses()
            if a.index == address.index and a.family == address.family and a != address
        ]
        before = net.routes(address.family)
        held = HeldAddress(wanted, names[address.index], address, (), namespace)
        if not address.flags & rtnetlink.F_PERMANENT:
            held.notes.append(
                f"{wanted} has a lifetime: DHCP or a router set it, and may set it again on this "
                "host again"
            )
        if noted is not None:
            noted(replace(held, routes=tuple(before)))
        _delete(net, address)
        try:
            _repair(net, others)
            lost = _missing(before, net.routes(address.family))
            _set_routes(net, lost)
            held.routes = tuple(_missing(before, net.routes(address.family)))
        except BaseException:
            held.routes = tuple(before)
            held.put_back()
            raise
        return held


def _repair(net: Rtnetlink, others: Iterable[Address]) -> None:
    """Restore addresses of the subnet that were removed with its first one."""
    here = {(a.ip, a.prefix) for a in net.addresses()}
    for address in others:
        if (address.ip, address.prefix) not in here:
            _add(net, replace(address, flags=address.flags | rtnetlink.F_NODAD), str(address.index))


def _missing(before: Iterable[Route], after: Iterable[Route]) -> list[Route]:
    left = {route.message for route in after}
    return [route for route in before if route.message not in left]


def _set_routes(net: Rtnetlink, routes: Iterable[Route]) -> None:
    """Set the routes that can be set.

    A route through an address that is not here cannot, nor one that exists already.
    """
    for route in routes:
        with suppress(OSError):
            net.add_route(route)


def bring(
    ip: str,
    description: Any,
    *,
    device: str | None = None,
    namespace: int | None = None,
    trial: int = TRIAL,
) -> BroughtAddress:
    """Give the address to this host; `description`: `HeldAddress.to_dict` of the source.

    `Conflict` if it is here already, `NotFound` if no device fits (see `choose_device`).
    """
    wanted, _none = parse(ip)
    if not isinstance(description, dict) or description.get("ip") != wanted:
        raise UsageError(f"the description that came with {wanted} is of another address")
    with Rtnetlink(namespace) as net:
        if all_of(net, wanted):
            raise Conflict(
                f"{wanted} is an address of this host already",
                hint="Remove it here first (`ip address del`).",
            )
        parsed = ipaddress.ip_address(wanted)
        link, prefix = choose(net, parsed, device)
        family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
        attributes = [(rtnetlink.IFA_LOCAL, parsed.packed), (rtnetlink.IFA_ADDRESS, parsed.packed)]
        if parsed.version == 4 and prefix < 31:
            network = ipaddress.IPv4Network((parsed.packed, prefix), strict=False)
            attributes.append((rtnetlink.IFA_BROADCAST, network.broadcast_address.packed))
        flags = rtnetlink.F_NODAD | rtnetlink.F_PERMANENT
    address = Address(family, prefix, flags, 0, link.index, tuple(attributes))
    return BroughtAddress(address, link.name, namespace, trial)


def _add(net: Rtnetlink, address: Address, device: str, *, renew: bool = False) -> None:
    try:
        net.add_address(address, renew=renew)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise CriuctlError(
                f"{address.ip} cannot be added to {device}: {error.strerror}",
                hint="criuctl needs CAP_NET_ADMIN; is the device up?",
            ) from error


def _delete(net: Rtnetlink, address: Address) -> None:
    try:
        net.delete_address(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise CriuctlError(
                f"{address.ip} cannot be removed: {error.strerror}",
                hint="criuctl needs CAP_NET_ADMIN.",
            ) from error
