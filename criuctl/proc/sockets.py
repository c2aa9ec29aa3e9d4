"""The sockets of a tree, and the processes at their other ends.

`tree_sockets` joins the descriptors of a tree with the kernel's tables (`sockdiag`): each socket
that the tree holds, its holders, and whether its peer is held by the tree too. The connections
record, the preflight and ``criuctl connections`` use it; `sockets` lists a whole net namespace.

- TCP peers are matched by their four-tuple (IPv4-mapped addresses as IPv4), unix peers by inode.
  A connected UDP socket also has as its peer a socket that is only bound, as servers' are: to that
  address, or to every one.  A TCP connection that its server has not accepted yet has no inode at
  that end: the peer is then the listener's queue, `Peer.QUEUED`, when the listener is in the tree.
- Sockets that the tables do not list are queried by a borrowed duplicate of the descriptor
  (pidfd_getfd) with SO_DOMAIN, SO_TYPE and SO_PROTOCOL.
- The result may be outdated while the tree runs; on a frozen tree it is exact.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from ..errors import NoSuchProcess
from .descriptors import Descriptor
from .namespaces import namespaces
from .procfs import all_pids, open_pidfd, reading
from .sockdiag import CONNECTED, PROTOCOLS, TYPES, Address, Socket, plain_host, sockets
from .syscalls import borrow_socket

__all__ = [
    "CONNECTED",
    "Address",
    "Peer",
    "Socket",
    "TreeSocket",
    "outside_holders",
    "sockets",
    "tree_sockets",
]

_IPPROTO_MPTCP = 262
_ANY = ("0.0.0.0", "::")


class Peer(Enum):
    """Where the other end of a socket is."""

    NONE = "none"  # no peer: listening, unconnected, or the other end is closed
    INSIDE = "inside"  # held by a process of the tree
    QUEUED = "queued"  # waits in the accept queue of a listening socket of the tree
    OUTSIDE = "outside"  # another process, another host, or unknown


class TreeSocket(NamedTuple):
    """A socket that the tree holds, and what is known about its other end."""

    socket: Socket
    net_namespace: int
    holders: tuple[tuple[int, int], ...]  # (PID, fd) in the tree, sorted
    where: Peer
    peer_holders: tuple[tuple[int, int], ...] = ()  # in the tree
    peer_name: str = ""  # unix: the name of the peer, or of the listener that it came from
    # inode of the other end, or of the listener in whose queue it waits, if the tables have it
    peer_inode: int = 0
    waiting: bool = False  # OUTSIDE: the other end is in a listener's queue
    loopback: bool = False  # internet: both addresses belong to this host

    @property
    def pid(self) -> int:
        """A process that holds it."""
        return self.holders[0][0]

    @property
    def fd(self) -> int:
        """Its descriptor there."""
        return self.holders[0][1]


def _ask_descriptor(pid: int, descriptor: Descriptor) -> Socket:
    """Return the properties of a socket that sock_diag does not list, from a duplicate of it."""
    with reading(pid):
        pidfd = open_pidfd(pid)
        try:
            with borrow_socket(pidfd, descriptor.fd) as borrowed:
                if os.fstat(borrowed.fileno()).st_ino != descriptor.inode:
                    raise FileNotFoundError(f"descriptor {descriptor.fd} is another socket by now")
                family = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
                kind = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                protocol = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
                state, local, peer = "close", None, None
                if family in (socket.AF_INET, socket.AF_INET6):
                    local, peer = _names(borrowed)
                    if protocol in (6, _IPPROTO_MPTCP):
                        state = _tcp_state(borrowed, connected=peer is not None)
        finally:
            os.close(pidfd)
    try:
        name = socket.AddressFamily(family).name.removeprefix("AF_").lower()
    except ValueError:
        name = f"family-{family}"
    return Socket(
        inode=descriptor.inode,
        family=name,
        type=TYPES.get(kind, str(kind)),
        protocol=PROTOCOLS.get(protocol, str(protocol)) if name in ("inet", "inet6") else "",
        state=state,
        local=local,
        peer=peer,
        listed=False,
    )


def _names(borrowed: socket.socket) -> tuple[Address | None, Address | None]:
    host, port = borrowed.getsockname()[:2]
    local = Address(plain_host(host), port)
    try:
        host, port = borrowed.getpeername()[:2]
    except OSError:
        return local, None  # ENOTCONN
    return local, Address(plain_host(host), port)


def _tcp_state(borrowed: socket.socket, connected: bool) -> str:
    if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "listen"
    return "established" if connected else "close"


def tree_sockets(opened: Mapping[int, Sequence[Descriptor]]) -> list[TreeSocket]:
    """Return every socket that the processes in `opened` hold, sorted by first holder.

    `opened`: PID -> its descriptors. Processes and descriptors that are gone by now are left out.
    """
    holders: dict[int, list[tuple[int, int]]] = {}
    where_from: dict[int, tuple[int, Descriptor]] = {}
    asked: dict[int, int] = {}  # net namespace -> one PID in it
    homes: dict[int, int] = {}
    for pid, list_of in opened.items():
        ours = [d for d in list_of if d.kind == "socket"]
        if not ours:
            continue
        try:
            homes[pid] = namespaces(pid).get("net", 0)
        except NoSuchProcess:
            continue
        asked.setdefault(homes[pid], pid)
        for descriptor in ours:
            holders.setdefault(descriptor.inode, []).append((pid, descriptor.fd))
            where_from.setdefault(descriptor.inode, (pid, descriptor))
    # inode -> (namespace, socket); of all processes, for the peers' names
    known: dict[int, tuple[int, Socket]] = {}
    own = namespaces("self").get("net")
    for namespace, pid in asked.items():
        try:
            for found in sockets(None if namespace == own else pid):
                known[found.inode] = (namespace, found)
        except NoSuchProcess:
            continue
    for inode, (pid, descriptor) in where_from.items():
        if inode not in known:
            try:
                known[inode] = (homes[pid], _ask_descriptor(pid, descriptor))
            except (NoSuchProcess, OSError):
                continue  # closed meanwhile
    mine = {inode: known[inode] for inode in holders if inode in known}
    return _join(mine, known, holders)


def _join(
    mine: Mapping[int, tuple[int, Socket]],
    known: Mapping[int, tuple[int, Socket]],
    holders: Mapping[int, list[tuple[int, int]]],
) -> list[TreeSocket]:
    by_pair = {
        (namespace, s.protocol, s.local, s.peer): s.inode
        for namespace, s in known.values()
        if s.local and s.peer and s.connected
    }
    listeners = {
        (namespace, s.local)
        for namespace, s in mine.values()
        if s.protocol == "tcp" and s.listening and s.local
    }
    listener_ports = {
        (namespace, address.port) for namespace, address in listeners if _is_any(address.host)
    }
    receivers = _receivers(mine, known)
    local_hosts = {(namespace, s.local.host) for namespace, s in known.values() if s.local}
    pending = {
        inode: s
        for _namespace, s in known.values()
        if s.family == "unix"
        for inode in s.pending
        if inode
    }
    joined = []
    for inode, (namespace, s) in mine.items():
        result = TreeSocket(s, namespace, tuple(sorted(holders[inode])), Peer.NONE)
        if s.family == "unix":
            if s.peer_inode:
                peer = known.get(s.peer_inode)
                inside = s.peer_inode in mine
                result = result._replace(
                    where=Peer.INSIDE if inside else Peer.OUTSIDE,
                    peer_holders=tuple(sorted(holders.get(s.peer_inode, ()))),
                    peer_name=peer[1].name if peer else "",
                    peer_inode=s.peer_inode if peer else 0,
                )
            elif inode in pending:
                listener = pending[inode]
                inside = listener.inode in mine
                result = result._replace(
                    where=Peer.QUEUED if inside else Peer.OUTSIDE,
                    peer_name=listener.name,
                    peer_inode=listener.inode,
                    waiting=not inside,
                )
        elif s.connected and s.peer is not None:
            loopback = _is_loopback(s.peer.host) or (namespace, s.peer.host) in local_hosts
            other = by_pair.get((namespace, s.protocol, s.peer, s.local), 0) if s.local else 0
            if not other and s.type == "dgram":
                other = receivers.get((namespace, s.protocol, s.peer), 0)
                if not other and loopback:
                    anywhere = (
                        (namespace, s.protocol, Address(host, s.peer.port)) for host in _ANY
                    )
                    other = next((receivers[key] for key in anywhere if key in receivers), 0)
            if other in mine:
                result = result._replace(
                    where=Peer.INSIDE,
                    peer_holders=tuple(sorted(holders[other])),
                    peer_inode=other,
                    loopback=True,
                )
            elif (
                s.type == "stream"
                and not other  # a client whose inode is known has been accepted
                and (
                    (namespace, s.peer) in listeners
                    or (loopback and (namespace, s.peer.port) in listener_ports)
                )
            ):
                result = result._replace(where=Peer.QUEUED, loopback=True)
            else:
                result = result._replace(where=Peer.OUTSIDE, loopback=loopback, peer_inode=other)
        joined.append(result)
    return sorted(joined, key=lambda t: t.holders)


def _receivers(
    mine: Mapping[int, tuple[int, Socket]], known: Mapping[int, tuple[int, Socket]]
) -> dict[tuple[int, str, Address], int]:
    """Return the bound, unconnected datagram sockets by namespace, protocol and address.

    Sockets of the tree come before those of other processes.
    """
    return {
        (namespace, s.protocol, s.local): s.inode
        for namespace, s in (*known.values(), *mine.values())
        if s.type == "dgram" and s.local is not None and not s.connected
    }


def _is_any(host: str) -> bool:
    return host in _ANY


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def outside_holders(
    inodes: Iterable[int], inside: Iterable[int] = ()
) -> dict[int, tuple[int, int]]:
    """Return socket inode -> (PID, fd) of a process that holds it, except the processes `inside`.

    Reads every descriptor of the host: for error messages, not for normal operation. Processes that
    may not be read are skipped.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    skip = set(inside)
    found: dict[int, tuple[int, int]] = {}
    for pid in all_pids():
        if len(found) == len(wanted):
            break
        if pid in skip:
            continue
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                inode = wanted.get(os.readlink(f"/proc/{pid}/fd/{name}"), 0)
                if inode:
                    found.setdefault(inode, (pid, int(name)))
        except OSError:
            continue  # gone meanwhile, or no permission to look
    return found
