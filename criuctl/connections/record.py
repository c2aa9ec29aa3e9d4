"""The records of a tree's connections: one for each socket that has, or waits for, another end.

They are made twice: while the tree runs, for early decisions, and when it is frozen, for the
manifest. On the frozen tree time matters: one pass over the kernel's tables, one borrowed duplicate
for each external socket (its options and TCP_INFO). The search for the process behind a local peer
looks at every descriptor of the host, and is made only for peers that the first pass has not met.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from msgspec import Struct, field

from ..checkpoint.connection_record import UNCONNECTED, ConnectionRecord
from ..errors import NoSuchProcess
from ..proc.descriptors import Descriptor
from ..proc.procfs import read_text
from ..proc.sockets import Peer, TreeSocket, outside_holders, tree_sockets
from ..proc.syscalls import borrow_socket
from ..proc.tree import Process
from ..report import Finding
from . import multicast, sockopts

_FAMILIES = frozenset({"inet", "inet6", "unix"})
# as far as data_segs_out; Linux 4.6 and later have all of it
_TCP_INFO = struct.Struct("=8B24I4Q6I")
_TCP_OPTIONS = {1: "timestamps", 2: "sack", 4: "wscale", 8: "ecn"}
_NEVER = 0xFFFFFFFF
UNTAKEN = ("tcp-not-accepted", "datagrams-lost")  # findings of `untaken`
_UNACCEPTED = frozenset({"established", "fin-wait-1", "fin-wait-2"})


class Connection(Struct):
    """One record, and its socket, with outer PIDs, which only this host knows."""

    record: ConnectionRecord
    held: TreeSocket


class Look(Struct):
    """The result of one pass over a tree; the next pass takes over what cannot have changed."""

    connections: list[Connection]
    # inode of a peer -> "PID (command)"; "" if no visible process holds it
    owners: dict[int, str] = field(default_factory=dict)
    # it holds TCP connections, or may: a descriptor in transit over a unix socket is not visible
    tcp: bool = True

    @property
    def external(self) -> list[Connection]:
        """The connections whose other end is outside the tree or has no holder, without those to
        a member of the same group.
        """
        return [c for c in self.connections if c.record.external and not c.record.linked]

    def unix_keys(self) -> list[str]:
        """Return CRIU's names of the unix sockets whose other half is outside and is not saved."""
        return [
            f"unix[{c.record.inode}]"
            for c in self.connections
            if c.record.external and c.record.family == "unix" and not c.held.waiting
        ]


def look(
    tree: Sequence[Process],
    opened: Mapping[int, Sequence[Descriptor]],
    *,
    before: Look | None = None,
    details: bool = True,
) -> Look:
    """Return every listening, bound or connected internet socket of the tree, and every unix socket
    with another end outside.

    The PIDs of records are those of the tree's PID namespace. With `details`, options, and TCP_INFO
    of the external ones, are read; then other internet sockets are recorded as well, if they have
    options that CRIU does not save, or are bound.
    """
    inner = {p.pid: p.ns_pid for p in tree}
    every = tree_sockets(opened)
    found = [s for s in every if _wanted(s)]
    sent = _sent(opened)  # the holder of the other end may have sent it into the tree meanwhile
    owners = _owners(
        filter(_external, found),
        set(inner),
        before.owners if before is not None and not sent else {},
    )
    if sent:
        found = [s for s in (_queued(s, owners) for s in found) if _wanted(s)]
    listening: set[int | str] = {
        s.socket.local.port if s.socket.local else s.socket.name
        for s in every
        if s.socket.listening
    }
    with _Borrower() as borrower:
        made = []
        for s in found:
            external = _external(s) or unaccepted(s)
            extra = (
                borrower.details(s, external)
                if details and (external or s.socket.family != "unix")
                else {}
            )
            if _unconnected(s) and not (extra.get("options") or _has_address(s)):
                continue
            record = _record(
                s,
                external,
                inner,
                listening,
                owners.get(s.peer_inode, "") if external else "",
                extra,
            )
            made.append(Connection(record, s))
    return Look(made, owners, any(map(_maybe_tcp, every)))


def _sent(opened: Mapping[int, Sequence[Descriptor]]) -> bool:
    """Return whether descriptors were sent to a unix socket of the tree and wait there to be
    received.
    """
    lines = (
        line
        for list_of in opened.values()
        for d in list_of
        if d.kind == "socket"
        for line in d.extra
    )
    return any(line.startswith("scm_fds:") and int(line.split()[1]) for line in lines)


def _queued(s: TreeSocket, owners: Mapping[int, str]) -> TreeSocket:
    """Return the socket; with its other end inside if that is among the sent descriptors, because
    it has no holder.
    """
    return (
        s._replace(where=Peer.INSIDE)
        if _external(s) and s.peer_inode and not owners[s.peer_inode]
        else s
    )


def _wanted(s: TreeSocket) -> bool:
    kernel = s.socket
    if kernel.family == "unix":
        return _external(s)
    return kernel.family in _FAMILIES


def _maybe_tcp(s: TreeSocket) -> bool:
    """Return whether it is a TCP connection, or was one, or has waiting messages that may carry the
    descriptor of one.

    The queue of an ended connection is saved like any other, and the kernel shows only to its
    holder that it had a peer.
    """
    kernel = s.socket
    if kernel.family == "unix":
        return kernel.rqueue > 0
    return kernel.protocol in ("tcp", "mptcp") and not kernel.listening


def _bound(s: TreeSocket) -> bool:
    """Return whether it is a datagram socket that receives from any sender: a server's."""
    kernel = s.socket
    return (
        kernel.type == "dgram"
        and not kernel.connected
        and kernel.local is not None
        and kernel.local.port != 0
    )


def _unconnected(s: TreeSocket) -> bool:
    """Return whether it is an internet socket without another end that no peer can reach: new, raw,
    or of an ended connection.
    """
    kernel = s.socket
    return kernel.family in ("inet", "inet6") and not (
        kernel.connected or kernel.listening or _bound(s)
    )


def _has_address(s: TreeSocket) -> bool:
    local = s.socket.local
    if local is None or s.socket.protocol not in ("tcp", "udp"):
        return False
    return local.port != 0 or local.host not in ("0.0.0.0", "::")


def _external(s: TreeSocket) -> bool:
    return s.where is Peer.OUTSIDE and s.socket.connected and not orphaned(s)


def unaccepted(s: TreeSocket) -> bool:
    """Return whether it is a TCP connection within the tree whose other end waits to be accepted:
    CRIU saves nothing of that.
    """
    return s.where is Peer.QUEUED and s.socket.family != "unix" and s.socket.state in _UNACCEPTED


def untaken(held: Iterable[TreeSocket]) -> Iterator[Finding]:
    """Return findings about data that waits for programs of a tree and that CRIU does not save; it
    changes from one moment to the next.
    """
    sockets = list(held)
    own = Counter(
        (s.net_namespace, s.socket.peer.port) for s in sockets if unaccepted(s) and s.socket.peer
    )
    for s in sockets:
        kernel = s.socket
        if kernel.protocol == "tcp" and kernel.listening and kernel.local:
            waiting = kernel.rqueue - own[s.net_namespace, kernel.local.port]
            if waiting > 0:
                text = (
                    f"{waiting} connection(s) to {kernel.local} wait to be accepted; they are "
                    "lost, clients have to come again"
                )
                yield Finding(
                    "warning",
                    UNTAKEN[0],
                    text,
                    "Dump again when the program has accepted them.",
                    s.pid,
                    s.fd,
                )
        elif kernel.family in ("inet", "inet6") and kernel.type == "dgram" and kernel.rqueue:
            text = (
                f"{kernel.rqueue} bytes of datagrams that {kernel.local} has received but not "
                "read are lost"
            )
            yield Finding(
                "warning",
                UNTAKEN[1],
                text,
                "UDP may lose datagrams at any time; programs expect it.",
                s.pid,
                s.fd,
            )


def orphaned(s: TreeSocket) -> bool:
    """Return whether the other end was in this host's kernel and is closed: its data is queued
    here, and no peer can be lost.
    """
    return s.loopback and s.socket.state == "close-wait" and not s.peer_inode


def _owners(
    outside: Iterable[TreeSocket], inside: set[int], known: Mapping[int, str]
) -> dict[int, str]:
    """Return the holders of the other ends that are on this host."""
    wanted = {s.peer_inode for s in outside if s.peer_inode}
    owners = {inode: known[inode] for inode in wanted if inode in known}
    unknown = wanted - owners.keys()
    if unknown:
        names: dict[int, str] = {}
        for inode, (pid, _fd) in outside_holders(unknown, inside).items():
            if pid not in names:
                try:
                    names[pid] = f"{pid} ({read_text(pid, 'comm').rstrip()})"
                except (NoSuchProcess, OSError):
                    names[pid] = str(pid)
            owners[inode] = names[pid]
        owners.update(dict.fromkeys(unknown - owners.keys(), ""))
    return owners


def _record(
    s: TreeSocket,
    external: bool,
    inner: Mapping[int, int],
    listening: Set[int | str],
    owner: str,
    details: Mapping[str, Any],
) -> ConnectionRecord:
    kernel = s.socket
    state = kernel.state
    if kernel.family != "unix" and (_bound(s) or _unconnected(s)):
        state = "bound" if _bound(s) else UNCONNECTED
    return ConnectionRecord(
        pid=inner.get(s.pid, s.pid),
        fd=s.fd,
        holders=tuple((inner.get(pid, pid), fd) for pid, fd in s.holders),
        family=kernel.family,
        type=kernel.type,
        protocol=kernel.protocol,
        state=state,
        inode=kernel.inode,
        local=str(kernel.local) if kernel.local else kernel.name,
        peer=str(kernel.peer) if kernel.peer and kernel.connected else s.peer_name,
        external=external,
        direction=_direction(s, listening),
        rqueue=kernel.rqueue,
        wqueue=kernel.wqueue,
        peer_process=owner,
        queued=unaccepted(s),
        **details,
    )


def _direction(s: TreeSocket, listening: Set[int | str]) -> str:
    """Return which end connected; "" for a socket pair, and for an unconnected socket.

    No kernel keeps this. An accepted TCP connection has a port on which the tree listens; one whose
    listener is closed by now counts as initiated. An accepted unix socket has its listener's name,
    and its client seldom has one.
    """
    kernel = s.socket
    if not kernel.connected:
        return ""
    if kernel.family == "unix":
        if kernel.type == "dgram":
            return "initiated" if s.peer_name else ""
        if kernel.name and (kernel.name in listening or not s.peer_name):
            return "accepted"
        return "initiated" if s.peer_name else ""
    if kernel.protocol in ("tcp", "mptcp") and kernel.local and kernel.local.port in listening:
        return "accepted"
    return "initiated"


class _Borrower:
    """Makes duplicates of the tree's sockets, one at a time, and one pidfd at a time: a tree may
    have more processes than this process may have descriptors.
    """

    def __init__(self) -> None:
        self._pid, self._pidfd = 0, -1
        self._groups: dict[int, list[multicast.Group]] = {}  # by net namespace

    def __enter__(self) -> _Borrower:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._pid:
            os.close(self._pidfd)
        self._pid = 0

    def details(self, s: TreeSocket, external: bool) -> dict[str, Any]:
        """Return the record's fields that only the socket itself has; nothing for a socket that is
        gone.

        For a socket that CRIU will certainly restore, only the fields that CRIU does not.
        """
        try:
            if s.pid != self._pid:
                self._let_go()
                self._pidfd = os.pidfd_open(s.pid)
                self._pid = s.pid
            with borrow_socket(self._pidfd, s.fd) as borrowed:
                tcp = tcp_info(borrowed) if s.socket.protocol == "tcp" and external else {}
                return {
                    "options": sockopts.changed(borrowed, self._groups_of(s), unsaved=not external),
                    "tcp": tcp,
                }
        except OSError:
            return {}

    def _groups_of(self, s: TreeSocket) -> list[multicast.Group]:
        if s.socket.type != "dgram":
            return []
        if s.net_namespace not in self._groups:
            self._groups[s.net_namespace] = multicast.groups(s.pid)
        return self._groups[s.net_namespace]


def tcp_info(sock: socket.socket) -> dict[str, Any]:
    """Return the fields of TCP_INFO that are shown, and that `drain` needs; {} where there are
    none.
    """
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return {}
    values = _TCP_INFO.unpack(raw.ljust(_TCP_INFO.size, b"\0"))
    small, words, counts, more = values[:8], values[8:32], values[32:36], values[36:]
    return {
        "options": [name for bit, name in _TCP_OPTIONS.items() if small[5] & bit],
        "mss": words[2],
        "unacked": words[4],
        "retransmits": words[23],
        "rtt_us": words[15],
        "idle_ms": min(words[9], words[11]) if min(words[9], words[11]) != _NEVER else 0,
        "bytes_acked": counts[2],
        "bytes_received": counts[3],
        "not_sent": more[2],
    }
