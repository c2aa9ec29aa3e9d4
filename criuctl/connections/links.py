"""The connections among trees that are dumped together: both ends found, from what each tree shows.

Each tree is dumped by itself, and to each of them its connections to the others are external. Once
all stand still every member describes its ends (`halves`); `match` finds those that belong
together. It is pure. A TCP connection is matched by its addresses within one network namespace, a
unix one by the inodes. Datagram sockets are left out: they need no other end.

A connection that the other tree has not accepted yet has no descriptor there, and neither CRIU nor
criuctl can keep it: `Matched.unaccepted` names such ones, and a moment later there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Struct, field

from .record import Connection, unaccepted

_KEPT = ("stream", "seqpacket")
_ANY = ("0.0.0.0", "::")


class Half(Struct, frozen=True):
    """One end of a connection, or a listening socket, as its own tree shows it."""

    inode: int
    family: str
    type: str
    protocol: str
    namespace: int  # of the network
    local: str
    peer: str
    peer_inode: int = 0
    listening: bool = False
    waiting: bool = False  # unix: in the queue of a listener outside
    owner: int = 0  # PID of a process that holds the other end, if one is known
    about: str = ""  # for messages


class Link(Struct, frozen=True):
    """The other end of a connection between two members, and the connection's number."""

    session: str
    number: int


class Matched(Struct):
    """The connections among the members."""

    # by session: inode of the end there -> the other end
    links: dict[str, dict[int, Link]] = field(default_factory=dict)
    unaccepted: list[str] = field(default_factory=list)


def halves(connections: Iterable[Connection]) -> list[Half]:
    """Return the ends of a tree's connections to outside, and its listening sockets."""
    found = []
    for c in connections:
        kernel, external = c.held.socket, c.record.external
        if not (external or kernel.listening) or unaccepted(c.held):
            continue
        found.append(
            Half(
                inode=kernel.inode,
                family=kernel.family,
                type=kernel.type,
                protocol=kernel.protocol,
                namespace=c.held.net_namespace,
                local=str(kernel.local) if kernel.local else kernel.name,
                peer=str(kernel.peer) if kernel.peer else c.held.peer_name,
                peer_inode=c.held.peer_inode,
                listening=kernel.listening,
                waiting=c.held.waiting,
                owner=owner(c),
                about=f"PID {c.held.pid} fd {c.held.fd}",
            )
        )
    return found


def owner(c: Connection) -> int:
    """Return the PID of the process at the other end, 0 if none is known."""
    number = c.record.peer_process.partition(" ")[0]
    return int(number) if number.isdigit() else 0


def match(members: Mapping[str, Sequence[Half]], pids: Mapping[str, Set[int]]) -> Matched:
    """Return the connections among `members`, whose trees have these `pids`."""
    found = Matched({session: {} for session in members})
    pairs = {
        (half.namespace, half.local, half.peer): (session, half)
        for session, half in _all(members)
        if half.protocol == "tcp" and not half.listening
    }
    inodes = {half.inode: (session, half) for session, half in _all(members)}
    number = 0
    for session, half in _all(members):
        if half.listening or half.inode in found.links[session]:
            continue
        if half.protocol == "tcp":
            other = pairs.get((half.namespace, half.peer, half.local))
            late = other is None and not half.peer_inode and _listens(members, session, half)
        elif half.family == "unix" and half.type in _KEPT:
            other = None if half.waiting else inodes.get(half.peer_inode)
            late = half.waiting and _held(pids, session, half.owner)
        else:
            continue
        if late:
            found.unaccepted.append(f"{session} {half.about} to {half.peer or 'a unix socket'}")
        elif other is not None and other[0] != session and other[1].type == half.type:
            number += 1
            found.links[session][half.inode] = Link(other[0], number)
            found.links[other[0]][other[1].inode] = Link(session, number)
    return found


def _all(members: Mapping[str, Sequence[Half]]) -> Iterable[tuple[str, Half]]:
    return ((session, half) for session, found in members.items() for half in found)


def _listens(members: Mapping[str, Sequence[Half]], session: str, half: Half) -> bool:
    """Return whether another member listens where this end is connected to."""
    host, _, port = half.peer.rpartition(":")
    return any(
        other.listening
        and other.protocol == "tcp"
        and other.namespace == half.namespace
        and other.local in (half.peer, *(f"{_bracketed(any_)}:{port}" for any_ in _ANY if host))
        for name, other in _all(members)
        if name != session
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _held(pids: Mapping[str, Set[int]], session: str, pid: int) -> bool:
    return any(pid in held for name, held in pids.items() if name != session)
