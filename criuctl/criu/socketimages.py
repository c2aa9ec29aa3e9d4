"""Sockets in CRIU's images: TCP connections, and unix sockets whose peer is outside the tree.

Internet sockets are entries of files.img with ``isk``, unix sockets those with ``usk``; what unix
sockets had not read is in sk-queues.img, where each entry is followed by the packet itself. A TCP
connection that CRIU has saved with its queues has an image ``tcp-stream-*`` too.

`give_up` makes CRIU restore sockets without their peers, `link` has it take unix sockets that are
made elsewhere. The other functions only read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from ..errors import Damaged
from . import schema
from .images import ImageSet, magics

TCP_ESTABLISHED, TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LISTEN = 1, 7, 8, 10
_AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_DGRAM = 2, 10, 1, 2
_SHUTDOWN_NONE, _SHUTDOWN_BOTH = 0, 3


class OpenSocket(Struct):
    """An inet socket of the images: its entry and every (PID, descriptor) that holds it."""

    entry: Any
    holders: list[tuple[int, int]] = field(default_factory=list)

    @property
    def local(self) -> tuple[int, bytes, int]:
        """(family, address, port), IPv4-mapped IPv6 addresses as IPv4."""
        return _endpoint(self.entry.family, self.entry.src_addr, self.entry.src_port)

    @property
    def peer(self) -> tuple[int, bytes, int]:
        """The same of the other end."""
        return _endpoint(self.entry.family, self.entry.dst_addr, self.entry.dst_port)


def connections(images: ImageSet) -> list[tuple[tuple[int, bytes, int], tuple[int, bytes, int]]]:
    """Return (local, peer) of every TCP connection that CRIU will restore."""
    return [(s.local, s.peer) for s in _connected(images)]


def streams(images: ImageSet) -> list[str]:
    """Return the images of TCP connections that CRIU has saved, with their queues."""
    return [name for name in images.names() if name.startswith("tcp-stream-")]


def closed_by_peer(images: ImageSet) -> list[OpenSocket]:
    """Return the TCP connections that CRIU will restore with the other end closed."""
    return [s for s in _connected(images) if s.entry.state == TCP_CLOSE_WAIT]


def give_up(
    images: ImageSet, endings: Mapping[tuple[int, int], bool], no_interfaces: Container[str] = ()
) -> None:
    """Remove the peers of these sockets, and interfaces that do not exist here.

    The sockets are named by any (PID, descriptor) that holds them. They come back with the same
    descriptors, options and epoll entries. True: the connection is over, and a unix stream
    reads its end. False, and every internet socket: unconnected, to be connected again or hung
    up later.

    Unix sockets with an outside peer are dumped as ``external unix[INODE]`` of the tree's half
    (CRIU's sk-unix.c). The images then hold, all of it in files.img, entries with ``usk``:

    - The tree's half as it was: state 1, ``peer`` the inode of the other half.  The other half
      is an entry with uflags 1 (USK_EXTERN), type datagram, state 10, which no process holds;
      CRIU would connect the tree's half to its name, which it refuses for a stream.
    - A client that waits in an outside listener's queue: state 1, ``peer`` the inode of that
      listener, which has *no* entry: a restore ends with "Peer unresolved".  (With data in its
      queue, CRIU refuses the dump.)
    - A datagram socket whose peer has a name needs nothing: CRIU connects it to that name
      again.

    This changes them so:

    - To be connected again, a stream or seqpacket socket becomes state 7 with ``peer`` 0 and no
      shutdown flags: a socket that was never connected.  Its unread data belongs to an old
      session: it is removed from sk-queues.img.
    - To be hung up, it stays state 1, with ``peer`` 0 and both shutdown flags: CRIU makes a
      pair of sockets for it, fills its queue from the other end and closes that.  The program
      reads the unread data, then EOF.
    - A datagram socket gets ``peer`` 0; the rest is done once it exists.

    The ``name``, ``name_dir`` and ``file_perms`` of a stream must be removed in both cases:
    CRIU *unlinks* the path that any socket of the images is bound to (an accepted one has its
    listener's), and with state 7 would bind it.
    """
    if not endings:
        return
    held = images.holders()
    ends = {
        file_id: endings[holder]
        for file_id in held
        for holder in held[file_id]
        if holder in endings
    }

    def edit(entry: Any) -> None:
        if entry.id not in ends:
            return
        if entry.HasField("isk"):
            entry.isk.state = TCP_CLOSE
            entry.isk.src_port = entry.isk.dst_port = 0
            entry.isk.ClearField("shutdown")
            if entry.isk.opts.so_bound_dev.rstrip("\0") in no_interfaces:
                entry.isk.opts.ClearField("so_bound_dev")
        elif entry.HasField("usk"):
            _give_up_unix(entry.usk, ends[entry.id])

    images.edit_files(edit)
    _drop_packets(
        images,
        {
            entry.id
            for entry in images.files()
            if entry.HasField("usk") and ends.get(entry.id) is False
        },
    )


def _connected(images: ImageSet) -> list[OpenSocket]:
    """Return the TCP sockets that have another end."""
    holders = images.holders()
    return [
        OpenSocket(entry.isk, holders.get(entry.id, []))
        for entry in images.files()
        if entry.HasField("isk")
        and entry.isk.type == _SOCK_STREAM
        and entry.isk.state not in (TCP_CLOSE, TCP_LISTEN)
        and entry.isk.family in (_AF_INET, _AF_INET6)
    ]


class Linked(Struct):
    """A unix socket whose other end belongs to another tree that is restored at the same time."""

    type: int
    flags: int  # of the open file
    shutdown: int
    sndbuf: int  # as the kernel counts them: twice what was asked for
    rcvbuf: int
    packets: list[bytes] = field(default_factory=list)  # that it has not read


def link(images: ImageSet, inodes: Container[int]) -> dict[int, Linked]:
    """Take the peers and queues of these unix sockets out of the images; return what must be done
    for each by its inode.

    CRIU is given a descriptor for each (``socket:[INODE]``), takes it as it is, and looks neither
    for the peer nor for a name. So it gets the entry of a socket that was never connected.
    """
    found: dict[int, Linked] = {}
    ids: dict[int, int] = {}

    def edit(entry: Any) -> None:
        if not entry.HasField("usk") or entry.usk.ino not in inodes or entry.usk.uflags:
            return
        usk = entry.usk
        opts = usk.opts
        found[usk.ino] = Linked(usk.type, usk.flags, usk.shutdown, opts.so_sndbuf, opts.so_rcvbuf)
        ids[entry.id] = usk.ino
        _give_up_unix(usk, False)

    images.edit_files(edit)
    for packet, data in _packets(images):
        if packet.id_for in ids:
            found[ids[packet.id_for]].packets.append(data)
    _drop_packets(images, set(ids))
    return found


def carry_descriptors(images: ImageSet, inodes: Container[int]) -> bool:
    """Return whether a message that one of these unix sockets has not read carries descriptors."""
    ids = {e.id for e in images.files() if e.HasField("usk") and e.usk.ino in inodes}
    return any(packet.id_for in ids and packet.scm for packet, _ in _packets(images))


def _packets(images: ImageSet) -> list[tuple[Any, bytes]]:
    """Return each entry of sk-queues.img with the packet itself."""
    if "sk-queues.img" not in os.listdir(images.folder):
        return []
    with open(
        os.open("sk-queues.img", os.O_RDONLY | os.O_CLOEXEC, dir_fd=images.folder), "rb"
    ) as file:
        data = file.read()
    head = magics("SK_QUEUES")
    if not data.startswith(head):
        raise Damaged("image sk-queues.img is not a CRIU image of kind SK_QUEUES")
    found = []
    position = len(head)
    while position < len(data):
        (size,) = struct.unpack_from("<I", data.ljust(position + 4, b"\0"), position)
        packet = schema.message("SK_QUEUES")()
        try:
            packet.ParseFromString(data[position + 4 : position + 4 + size])
        except Exception as error:  # as in `images.parse`
            raise Damaged(f"image sk-queues.img cannot be parsed: {error}") from error
        position += 4 + size
        found.append((packet, data[position : position + packet.length]))
        position += packet.length  # the packet itself follows its entry
    return found


def _drop_packets(images: ImageSet, sockets: set[int]) -> None:
    """Remove the queues of these sockets from sk-queues.img.

    A packet with descriptors must have a sender.
    """
    packets = _packets(images) if sockets else []
    if all(packet.id_for not in sockets for packet, _ in packets):
        return
    kept = [magics("SK_QUEUES")]
    for packet, data in packets:
        if packet.id_for not in sockets:
            entry = packet.SerializeToString()
            kept += [struct.pack("<I", len(entry)), entry, data]
    fd = os.open("sk-queues.img", os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, dir_fd=images.folder)
    with os.fdopen(fd, "wb") as file:
        file.write(b"".join(kept))


def _give_up_unix(entry: Any, ended: bool) -> None:
    entry.peer = 0
    if entry.type == _SOCK_DGRAM:
        return
    entry.state = TCP_ESTABLISHED if ended else TCP_CLOSE
    entry.shutdown = _SHUTDOWN_BOTH if ended else _SHUTDOWN_NONE
    entry.name = b""
    entry.ClearField("name_dir")
    entry.ClearField("file_perms")
    entry.ClearField("deleted")


def _endpoint(family: int, words: Iterable[int], port: int) -> tuple[int, bytes, int]:
    address = b"".join(struct.pack("<I", word) for word in words)
    if family == _AF_INET6 and address[:12] == b"\0" * 10 + b"\xff\xff":
        family, address = _AF_INET, address[12:]
    return (family, address[:4] if family == _AF_INET else address[:16], port)
