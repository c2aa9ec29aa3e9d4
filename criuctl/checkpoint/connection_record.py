"""The record of a socket of the tree: a connection, a listener, or a bound socket.

A dump makes one for each such socket (`criuctl.connections.record`) and notes the policy that
applies to it; a restore decides again (`criuctl.connections.rules`) and connects what it can.
PIDs are numbers of the tree's PID namespace.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from .records import Record

UNCONNECTED = "unconnected"


class ConnectionRecord(Record, frozen=True):
    """A connected, listening or bound socket of the tree, and the policy that applies to it.

    An ``unconnected`` socket that no peer can reach is recorded for its options alone.
    """

    pid: int
    fd: int
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor) of every process that shares it
    family: str = ""
    type: str = ""
    protocol: str = ""
    state: str = ""
    inode: int = 0
    local: str = ""
    peer: str = ""
    external: bool = False  # its other end is outside the tree
    direction: str = ""
    rqueue: int = 0
    wqueue: int = 0
    policy: str = ""
    # socket options that differ from a new socket's
    options: dict[str, Any] = field(default_factory=dict)
    tcp: dict[str, Any] = field(default_factory=dict)  # details of TCP_INFO
    host: str = ""  # the name under which a rule knows the peer
    # unix and loopback: "PID (command)" of the process at the other end, if it is local
    peer_process: str = ""
    # application protocol: postgresql, redis, journal, tcp, or the name of a hook
    application: str = ""
    # the session state that the peer holds for this connection, as that protocol reports it
    session: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why the policy differs from the requested one
    ended: bool = False  # the dump ended it along with the tree, so it can only be made again
    # a TCP connection within the tree that its server has not accepted yet: no descriptor of that
    # end exists
    queued: bool = False
    # its other end is held by this session, which is a member of the same group checkpoint
    linked: str = ""
    link: int = 0  # the connection's number there: both ends have it

    @property
    def datagrams(self) -> bool:
        """Whether it sends packets one by one: nothing of it lives in another kernel."""
        return self.type in ("dgram", "raw")

    @property
    def waits(self) -> bool:
        """Whether it has no other end, but takes connections, or datagrams, from any peer, or may
        yet.
        """
        return self.state in ("listen", "bound", UNCONNECTED)


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of an internet address in a record; ("", 0) for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return "", 0
    return host.removeprefix("[").removesuffix("]"), int(port)
