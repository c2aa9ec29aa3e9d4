"""A net namespace in CRIU's images: leave it out, and clear route states that cannot be set.

CRIU has the namespace of each process in ``ids-PID.img``, by its own numbers, and that of CRIU
itself at the dump in the inventory (``root_ids``); sockets have the number as ``ns_id``. A process
whose number is that of the inventory comes into the namespace that CRIU is in.

Routes are saved as ``ip route save`` writes them: its magic, then rtnetlink messages. The flags of
a route also include the state of its device (RTNH_F_DEAD, RTNH_F_LINKDOWN, ...), with which the
kernel accepts no route.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from ..errors import Damaged
from .images import ImageSet, read, write

# the parts of a files.img entry that have a net namespace
_SOCKETS = ("isk", "usk", "psk", "nlsk", "tunf")
_SAVED_ROUTES = 0x45311224  # the magic of ip route save
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_MESSAGE, _MESSAGE_FLAGS = 12, 8  # size of an rtmsg, and where its flags are
_ATTRIBUTE = struct.Struct("=HH")
_HOP = struct.Struct("=HBBi")  # length, flags, weight, device
_MULTIPATH = 9
_ONLINK = 4  # RTNH_F_ONLINK


def leave_network(images: ImageSet) -> None:
    """Put the processes and sockets of the tree's net namespace into the one that CRIU will be
    in.
    """
    (inventory,) = read(images.folder, "inventory.img", "INVENTORY")
    outside = inventory.root_ids.net_ns_id
    for name in (name for name in images.names() if name.startswith("ids-")):
        (ids,) = read(images.folder, name, "IDS")
        ids.net_ns_id = outside
        write(images.folder, name, "IDS", [ids])

    def edit(entry: Any) -> None:
        for kind in _SOCKETS:
            if entry.HasField(kind) and getattr(entry, kind).HasField("ns_id"):
                getattr(entry, kind).ns_id = outside

    images.edit_files(edit)


def forget_states(images: ImageSet) -> None:
    """Clear in all saved routes the flags that cannot be set."""
    for name in images.names():
        if not name.startswith(("route-", "route6-")):
            continue
        with open(os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=images.folder), "r+b") as file:
            data = bytearray(file.read())
            _clear(data, name)
            file.seek(0)
            file.write(data)


def _clear(data: bytearray, name: str) -> None:
    if not data:
        return
    if len(data) < 4 or struct.unpack_from("=I", data)[0] != _SAVED_ROUTES:
        raise Damaged(f"image {name} has no routes of `ip route save`")
    position = 4
    while position + _HEADER.size + _MESSAGE <= len(data):
        length = _HEADER.unpack_from(data, position)[0]
        if length < _HEADER.size + _MESSAGE or position + length > len(data):
            raise Damaged(f"image {name} is cut off")
        body = position + _HEADER.size
        (flags,) = struct.unpack_from("=I", data, body + _MESSAGE_FLAGS)
        struct.pack_into("=I", data, body + _MESSAGE_FLAGS, flags & _ONLINK)
        _clear_hops(data, body + _MESSAGE, position + length)
        position += (length + 3) & ~3


def _clear_hops(data: bytearray, position: int, end: int) -> None:
    """Clear the same flags in each hop of a route that has several."""
    while position + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, position)
        if length < _ATTRIBUTE.size:
            return
        hop, last = position + _ATTRIBUTE.size, min(position + length, end)
        while kind == _MULTIPATH and hop + _HOP.size <= last:
            size, flags, weight, device = _HOP.unpack_from(data, hop)
            if size < _HOP.size:
                return
            _HOP.pack_into(data, hop, size, flags & _ONLINK, weight, device)
            hop += (size + 3) & ~3
        position += (length + 3) & ~3
