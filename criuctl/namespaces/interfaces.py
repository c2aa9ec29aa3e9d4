"""The network interfaces that sockets of the tree are bound to: by name (SO_BINDTODEVICE), or by a
link-local address.

CRIU binds to the interface of the same name, and fails half-way if there is none; so it is checked
before anything starts.  A connection that is given up needs none: it is restored without
(`ImageSet.give_up`).
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from ..connections.multicast import device_number
from ..criu.images import ImageSet
from ..proc.namespace_sockets import socket_inside
from .network_choice import NetMode, Place, is_new, opened

_LOOPBACK = "lo"  # the only one of a new network


class BoundSocket(Struct, frozen=True):
    """A socket of the images that is bound to an interface."""

    interface: str
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor), as in the tree
    # there is such an interface in the tree's future network, if no new one is made for it
    here: bool = True


def bound(images: ImageSet, net: Place) -> tuple[BoundSocket, ...]:
    """Return every such socket; `net`: how, and from where, the tree gets its net namespace."""
    found = {
        entry.id: name
        for entry in images.files()
        if entry.HasField("isk") and (name := _interface(entry.isk))
    }
    if not found:
        return ()
    held, here = images.holders(), _present(found.values(), net)
    return tuple(
        BoundSocket(name, tuple(held.get(number, ())), name in here)
        for number, name in found.items()
    )


def _interface(isk: Any) -> str:
    """Return the name; CRIU's images have it up to the NUL, or with it."""
    name: str = isk.opts.so_bound_dev or isk.ifname
    return name.rstrip("\0")


def missing(sockets: Iterable[BoundSocket], net: NetMode) -> list[BoundSocket]:
    """Return those whose interface is not in the network that the tree gets."""
    if net == "dumped":
        return []  # CRIU makes them
    loopback_only = net in ("private", "shared")
    return [s for s in sockets if (s.interface != _LOOPBACK if loopback_only else not s.here)]


def names(sockets: Iterable[BoundSocket]) -> frozenset[str]:
    """Return the interfaces of these."""
    return frozenset(s.interface for s in sockets)


def _present(wanted: Iterable[str], net: Place) -> set[str]:
    if is_new(net.mode):
        return {_LOOPBACK}
    with opened(net) as namespace:
        made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
        with made(socket.AF_INET, socket.SOCK_DGRAM, 0) as asked:
            return {name for name in set(wanted) if _number(asked, name)}


def _number(asked: socket.socket, name: str) -> int:
    try:
        return device_number(asked, name)
    except OSError:
        return 0
