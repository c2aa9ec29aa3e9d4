"""Check sockets: what CRIU cannot save of them, and connections to outside the tree."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...connections.record import untaken
from ...errors import NoSuchProcess
from ...proc.procfs import reading
from ...proc.socketfiles import bound_file
from ...proc.sockets import Peer, TreeSocket, outside_holders
from ...proc.syscalls import borrow_socket, getsockopt_of
from ...report import Finding
from .scene import Scene

_FAMILIES = frozenset({"inet", "inet6", "unix", "packet", "netlink"})
_PROTOCOLS = frozenset({"ip", "tcp", "udp", "udplite", "icmp", "icmpv6"})
_IPPROTO_MPTCP = 262
_IPPROTO_UDP_CORK = 1
_TCP_ULP, _ULP_NAME = 31, 16  # the longest name of an upper layer protocol
_SO_GET_FILTER, _SO_PASSPIDFD = 26, 76
_DATAGRAM_HEADER = 32  # bytes of a send buffer that CRIU does not count as room for data
_SO_PEEK_OFF = 42
_NAMED = 3  # names in one finding
_GONE = 1 << 32  # bytes: larger than any datagram, for a socket that is gone meanwhile
PASSES = "It passes by itself"  # the first words of such a finding's hint
_TRANSIENT = f"{PASSES}: try again."

MPTCP_HINT = (
    "Start the program without Multipath TCP: by `criuctl run`, which refuses it (programs take "
    "TCP instead); for a Go program with GODEBUG=multipathtcp=0 in its environment; or after "
    "`sysctl net.mptcp.enabled=0`."
)


def _error(s: TreeSocket, code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=s.pid, fd=s.fd)


def check_sockets(scene: Scene) -> Iterator[Finding]:
    """Check every socket that the tree holds, once, under its first holder."""
    strangers = [s for s in scene.sockets if s.socket.family == "unix" and s.where is Peer.OUTSIDE]
    yield from untaken(scene.sockets)
    yield from _peer_credentials(scene)
    owners = (
        outside_holders([s.peer_inode or s.socket.peer_inode for s in strangers], scene.by_pid)
        if strangers
        else {}
    )
    for s in scene.sockets:
        kernel = s.socket
        protocol, program = _asked(s)
        if program:
            yield _error(
                s,
                "socket-filter",
                "a BPF program (SO_ATTACH_BPF) filters what the "
                f"{kernel.protocol or kernel.family} socket receives; CRIU, which "
                "saves classic filters, cannot read it",
                "Have the program detach it before the dump.",
            )
        if kernel.family not in _FAMILIES:
            yield _error(
                s,
                "socket-family",
                f"a socket of family {kernel.family} is open, which CRIU cannot save",
                "Have the program close it before the dump.",
            )
        elif kernel.family == "unix":
            yield from _unix(scene, s, owners)
        elif kernel.family == "netlink":
            yield from _netlink(s)
        elif kernel.family == "packet":
            if not kernel.listed:
                yield _foreign_namespace(s)
        else:
            yield from _internet(s, protocol)


@contextmanager
def borrowed(s: TreeSocket) -> Iterator[socket.socket]:
    """Yield a duplicate of the process's socket; `NoSuchProcess`, `OSError` if it is gone
    meanwhile.
    """
    with reading(s.pid):
        pidfd = os.pidfd_open(s.pid)
    try:
        with borrow_socket(pidfd, s.fd) as duplicate:
            yield duplicate
    finally:
        os.close(pidfd)


def _asked(s: TreeSocket) -> tuple[int, bool]:
    """Return the socket's protocol number, and whether it has a filter that cannot be read.

    Both are asked of the socket itself.
    """
    try:
        with borrowed(s) as duplicate:
            try:
                getsockopt_of(duplicate.fileno(), socket.SOL_SOCKET, _SO_GET_FILTER, bytearray())
            except PermissionError:
                return duplicate.proto, True
            return duplicate.proto, False
    except (NoSuchProcess, OSError):
        return 0, False


def _foreign_namespace(s: TreeSocket) -> Finding:
    return _error(
        s,
        "net-namespace",
        f"the {s.socket.protocol or s.socket.family} socket belongs to a net namespace that no "
        "process of the tree is in",
        "Have the program open its sockets in the namespace that it runs in.",
    )


def _internet(s: TreeSocket, number: int) -> Iterator[Finding]:
    kernel = s.socket
    # Once bound, it appears in the kernel's tables as its inner TCP socket.
    protocol = "mptcp" if number == _IPPROTO_MPTCP else kernel.protocol
    if kernel.type != "raw" and protocol not in _PROTOCOLS:
        hint = MPTCP_HINT if protocol == "mptcp" else "Have the program use TCP or UDP."
        yield _error(
            s,
            "socket-protocol",
            f"a socket of protocol {protocol} is open, which CRIU cannot save",
            hint,
        )
    elif kernel.type not in ("stream", "dgram", "raw"):
        yield _error(
            s,
            "socket-protocol",
            f"an internet socket of type {kernel.type} is open, which CRIU cannot save",
            "Have the program close it.",
        )
    elif kernel.protocol == "tcp" and not kernel.listed and kernel.state != "close":
        yield _foreign_namespace(s)
    elif protocol == "tcp" and (layer := _upper_layer(s)):
        yield _upper_layer_lost(s, layer)
    elif protocol in ("udp", "udplite") and _option(s, socket.IPPROTO_UDP, _IPPROTO_UDP_CORK):
        yield _error(
            s,
            "corked-datagram",
            f"a datagram is being put together (UDP_CORK), with {kernel.wqueue} bytes so far; "
            "CRIU cannot save that",
            f"{PASSES}, unless the program leaves the option on: try again.",
        )


def _peer_credentials(scene: Scene) -> Iterator[Finding]:
    """Warn of named sockets whose SO_PEERCRED changes: CRIU creates both ends, and listens, as root
    in one process.

    Pairs without a name are left out: a program that made both ends does not ask for the peer.
    """
    taken_for_root: list[tuple[TreeSocket, int]] = []
    for s in scene.sockets:
        kernel = s.socket
        named = kernel.name or s.peer_name
        if (
            kernel.family == "unix"
            and kernel.type != "dgram"
            and named
            and (kernel.listening or s.where is Peer.INSIDE)
        ):
            with suppress(NoSuchProcess, OSError), borrowed(s) as sock:
                _pid, uid, gid = struct.unpack(
                    "=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                if uid or gid:
                    taken_for_root.append((s, uid))
    if taken_for_root:
        first, uid = taken_for_root[0]
        names = list(dict.fromkeys(s.socket.name or s.peer_name for s, _uid in taken_for_root))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        count = (
            f"{len(taken_for_root)} unix sockets" if len(taken_for_root) > 1 else "a unix socket"
        )
        yield Finding(
            "warning",
            "peer-credentials",
            f"{count} of the tree will name root as the peer (SO_PEERCRED) after a restore, not "
            f"user {uid}: {', '.join(names[:_NAMED])}{more}",
            "Programs that have asked already are not affected. A server that grants root more, "
            "and clients that check their server's user, are: have them connect again, or the "
            "server listen again, after the restore.",
            pid=first.pid,
            fd=first.fd,
        )


def _option(s: TreeSocket, level: int, name: int) -> int:
    """Return a socket option of the process's socket; 0 if it is gone meanwhile."""
    try:
        with borrowed(s) as duplicate:
            return duplicate.getsockopt(level, name)
    except (NoSuchProcess, OSError):
        return 0


def _upper_layer(s: TreeSocket) -> str:
    """Return the protocol that the kernel speaks on a TCP socket for the program (TCP_ULP), as
    "tls"; "" for none, which is usual.
    """
    try:
        with borrowed(s) as duplicate:
            name = duplicate.getsockopt(socket.IPPROTO_TCP, _TCP_ULP, _ULP_NAME)
    except (NoSuchProcess, OSError):
        return ""
    return name.split(b"\0")[0].decode(errors="replace")


def _upper_layer_lost(s: TreeSocket, layer: str) -> Finding:
    """Refuse it: CRIU 4.2 saves neither the layer nor its keys, and the restored socket sends plain
    text to a peer that expects TLS. With bytes to read, CRIU's dump fails.
    """
    if layer == "tls":
        return _error(
            s,
            "kernel-tls",
            "the kernel speaks TLS on the TCP socket (kTLS); CRIU cannot save its keys",
            "Have the program do without kTLS (OpenSSL: no `Options = KTLS` in openssl.cnf), or "
            "let it connect through `criuctl tls-relay`.",
        )
    return _error(
        s,
        "upper-layer-protocol",
        f"the kernel speaks {layer!r} on the TCP socket (TCP_ULP), which CRIU cannot save",
        "Have the program close it before the dump.",
    )


def _netlink(s: TreeSocket) -> Iterator[Finding]:
    kernel = s.socket
    if _readable(s):
        yield _error(
            s,
            "netlink-queue",
            "the netlink socket has messages that the program has not read; CRIU cannot save those",
            _TRANSIENT,
        )
    elif _words(kernel.groups) > 1:
        yield _error(
            s,
            "netlink-groups",
            "the netlink socket listens to a group above 32, or has room for one above 64, which "
            "CRIU cannot save",
            "Have the program close it.",
        )
    elif kernel.groups and not kernel.port_id:
        yield _error(
            s,
            "netlink-groups",
            "the netlink socket listens to groups and is bound to no address, which CRIU cannot "
            "save",
            "Have the program bind it (to address 0, for one of the kernel's choice), or close it.",
        )


def _words(groups: bytes) -> int:
    """Return how many words of 32 groups CRIU would save: all, except the last one if it is
    empty.
    """
    words = len(groups) // 4
    return words - (1 if groups and not any(groups[-4:]) else 0)


def _readable(s: TreeSocket) -> bool:
    """Return whether a read would find something; a duplicate is polled, nothing is consumed."""
    try:
        with borrowed(s) as duplicate:
            poller = select.poll()
            poller.register(duplicate, select.POLLIN)
            return bool(poller.poll(0))
    except (NoSuchProcess, OSError):
        return False


def _unix(scene: Scene, s: TreeSocket, owners: dict[int, tuple[int, int]]) -> Iterator[Finding]:
    kernel = s.socket
    if not kernel.listed:
        yield _foreign_namespace(s)
        return
    if kernel.name and not kernel.name.startswith(("/", "@")):
        yield from _relative_name(s)
    if s.where is Peer.OUTSIDE:
        yield from _unix_outside(scene, s, owners.get(s.peer_inode or kernel.peer_inode))
    elif (
        s.where is Peer.NONE
        and kernel.state == "established"
        and kernel.type != "dgram"
        and not kernel.shutdown
    ):
        # Its other end has no descriptor anywhere: it is in the queue of a listener in another net
        # namespace.
        yield _error(
            s,
            "unix-peer-outside",
            f"a unix {kernel.type} socket waits to be accepted by a listener in another net "
            "namespace; CRIU cannot save it",
            _TRANSIENT,
        )
    if s.where is Peer.QUEUED and kernel.wqueue:
        yield _error(
            s,
            "unix-not-accepted",
            f"data was sent on a connection to {s.peer_name or 'a unix socket'} that is not "
            "accepted yet; CRIU cannot save it",
            _TRANSIENT,
        )
    if kernel.listening and 0 in kernel.pending:
        yield _error(
            s,
            "unix-not-accepted",
            f"a client of {kernel.name or 'the listening unix socket'} closed its connection "
            "before it was accepted; CRIU cannot save that",
            _TRANSIENT,
        )
    if kernel.listening:
        return
    if _starts_empty(s):
        yield _error(
            s,
            "unix-message-empty",
            f"an empty message waits to be read from the unix {kernel.type} socket; CRIU takes it "
            "for the end, and loses it and what follows it",
            _TRANSIENT,
        )
    if not kernel.rqueue:
        return
    if any(_option(s, socket.SOL_SOCKET, option) for option in (socket.SO_PASSCRED, _SO_PASSPIDFD)):
        yield _error(
            s,
            "unix-credentials",
            "messages with credentials (SO_PASSCRED, SO_PASSPIDFD) wait to be read; CRIU cannot "
            "save those",
            _TRANSIENT,
        )
    elif kernel.type == "dgram" and kernel.rqueue + _DATAGRAM_HEADER > (
        _option(s, socket.SOL_SOCKET, socket.SO_SNDBUF) or _GONE
    ):
        yield _error(
            s,
            "unix-datagram-long",
            f"a datagram of {kernel.rqueue} bytes waits to be read; CRIU cannot save one that is "
            "longer than what the socket itself may send (SO_SNDBUF)",
            _TRANSIENT,
        )


def _starts_empty(s: TreeSocket) -> bool:
    """Return whether the next message to read is empty.

    Later ones cannot be seen while the program may read.
    """
    kernel = s.socket
    ended = kernel.shutdown & 1 and not kernel.rqueue  # reads as empty, too
    if kernel.type not in ("dgram", "seqpacket") or ended:
        return False
    try:
        with borrowed(s) as duplicate:
            # a peek would move the program's own peek offset
            if duplicate.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF) >= 0:
                return False
            return not duplicate.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (NoSuchProcess, OSError):
        return False


def _relative_name(s: TreeSocket) -> Iterator[Finding]:
    """Check that the path of the socket's file still ends with the name that it was bound to.

    CRIU splits the path into a folder to go to and the name to bind there.
    """
    name = s.socket.name
    file = bound_file(s.pid, s.fd, deleted=True)
    if file is not None and not file.endswith("/" + name.removeprefix("./")):
        yield _error(
            s,
            "unix-name",
            f"the unix socket was bound to {name} and its file is {file} now, which CRIU cannot "
            "save",
            "Have the program bind it by its full path.",
        )


def _unix_outside(scene: Scene, s: TreeSocket, owner: tuple[int, int] | None) -> Iterator[Finding]:
    kernel = s.socket
    holder = (
        f"process {scene.command_of(owner[0])}, fd {owner[1]}"
        if owner
        else "the kernel or a process that cannot be seen"
    )
    name = f" {s.peer_name}" if s.peer_name else ""
    if s.waiting and kernel.wqueue:
        yield _error(
            s,
            "unix-not-accepted",
            f"data was sent on a connection to{name} that {holder} has not accepted yet; CRIU "
            "cannot save it",
            _TRANSIENT,
        )
    elif not s.peer_inode:
        yield _error(
            s,
            "unix-peer-outside",
            f"a unix {kernel.type} socket is connected to one of another net namespace; CRIU "
            "cannot save half a connection",
            "Have the program close it before the dump, or dump a tree that holds both ends.",
        )
    elif kernel.type == "dgram" and s.peer_name:
        yield Finding(
            "info",
            "unix-datagram-outside",
            f"the datagram socket sends to{name} of {holder}, outside the tree; a restore connects "
            "it to that name again",
            pid=s.pid,
            fd=s.fd,
        )
    else:
        yield Finding(
            "info",
            "unix-peer-outside",
            f"a unix {kernel.type} socket is connected to{name} of {holder}, outside the tree; "
            "only this half is saved, and after a restore the program sees the end of the "
            "connection, unless it is reconnected",
            "`--connections reconnect`, or a rule in connection_rules, connects it to that name "
            "again; the program must be able to start the exchange from its beginning."
            if s.peer_name
            else "Nothing can connect it again, because its other end has no name: dump a tree "
            "that holds both ends, or have the program open a new one when it reads the end.",
            pid=s.pid,
            fd=s.fd,
        )
