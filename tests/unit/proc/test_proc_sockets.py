"""Sockets and their other ends, and terminals."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.proc.namespaces import namespaces
from criuctl.proc.sockets import (
    Address,
    Peer,
    Socket,
    TreeSocket,
    outside_holders,
    sockets,
    tree_sockets,
)
from criuctl.proc.tree import descriptors, read_tree
from criuctl.proc.tty import decode_tty_nr, master_index, pts_index, terminals


def _of(root: int) -> list[TreeSocket]:
    return tree_sockets({process.pid: descriptors(process.pid) for process in read_tree(root)})


def _one(found: list[TreeSocket], wanted: Callable[[Socket], bool]) -> TreeSocket:
    (only,) = [s for s in found if wanted(s.socket)]
    return only


def test_loopback_connection_is_inside(tmp_path: Path) -> None:
    text = (
        "s = socket.create_server(('127.0.0.1', 0)); c = "
        "socket.create_connection(s.getsockname())\n"
        "a = s.accept()[0]; c.send(b'12345'); a.recv(5, socket.MSG_PEEK)"  # it has arrived
    )
    with running(text, tmp_path) as program:
        found = _of(program.pid)
    listener = _one(found, lambda s: s.listening)
    assert (listener.where, listener.socket.peer) == (Peer.NONE, None)
    assert listener.socket.local is not None
    accepted = _one(found, lambda s: s.connected and s.local == listener.socket.local)
    client = _one(found, lambda s: s.connected and s.peer == listener.socket.local)
    assert accepted.socket.rqueue == 5
    assert {accepted.where, client.where} == {Peer.INSIDE}
    assert client.peer_holders == accepted.holders
    assert client.loopback


@pytest.mark.parametrize(
    ("server", "host"),
    [
        ("'127.0.0.1'", "127.0.0.1"),
        ("'0.0.0.0'", "127.0.0.1"),
        ("'::'", "127.0.0.1"),
        ("'::1'", "::1"),
    ],
)
def test_the_other_end_of_a_udp_socket_is_a_server_that_is_only_bound(
    server: str, host: str, tmp_path: Path
) -> None:
    family = "socket.AF_INET6" if ":" in server else "socket.AF_INET"
    client = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    text = (
        f"s = socket.socket({family}, socket.SOCK_DGRAM); s.bind(({server}, 0))\n"
        f"c = socket.socket({client}, socket.SOCK_DGRAM); c.connect(({host!r}, s.getsockname()[1]))"
    )
    with running(text, tmp_path) as program:
        found = _of(program.pid)
    connected, bound = _one(found, lambda s: s.connected), _one(found, lambda s: not s.connected)
    assert (connected.where, connected.peer_holders) == (Peer.INSIDE, bound.holders)


def test_the_other_end_of_a_udp_socket_outside(tmp_path: Path) -> None:
    """Which socket it is, is known; one of the tree that is bound elsewhere is not taken for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        outside.bind(("127.0.0.1", 0))
        port = outside.getsockname()[1]
        text = (
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.2', 0))\n"
            "c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.connect(('127.0.0.1', "
            f"{port}))"
        )
        with running(text, tmp_path) as program:
            connected = _one(_of(program.pid), lambda s: s.connected)
        assert (connected.where, connected.peer_inode) == (
            Peer.OUTSIDE,
            os.fstat(outside.fileno()).st_ino,
        )


def test_connection_between_two_processes_of_the_tree(tmp_path: Path) -> None:
    text = (
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "def run():\n global c\n c = socket.create_connection(s.getsockname()); s.close()\n"
        "pid = child(run); a = s.accept()[0]; open(TMP + '/pid', 'w').write(str(pid))"
    )
    with running(text, tmp_path) as program:
        found = _of(program.pid)
        other = int((tmp_path / "pid").read_text())
    client = next(s for s in found if s.socket.connected and s.pid == other)
    assert client.where is Peer.INSIDE
    assert [pid for pid, _fd in client.peer_holders] == [program.pid]


def test_outside_and_queued_connections(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = (
            "import select; c = socket.create_connection(('127.0.0.1', "
            f"{server.getsockname()[1]}))\n"
            "s = socket.create_server(('', 0)); q = socket.create_connection(('127.0.0.1', "
            "s.getsockname()[1]))\n"
            "select.select([s], [], [])"  # the server knows of it, too
        )
        with running(text, tmp_path) as program:
            found = _of(program.pid)
            accepted, _ = server.accept()
            accepted.close()
    outside = _one(
        found, lambda s: s.peer == Address("127.0.0.1", server_port(found, Peer.OUTSIDE))
    )
    assert (outside.where, outside.loopback, outside.peer_holders) == (Peer.OUTSIDE, True, ())
    queued = next(s for s in found if s.where is Peer.QUEUED)
    assert queued.socket.connected
    assert _one(found, lambda s: s.listening).socket.rqueue == 1


def test_the_tree_listens_where_another_process_answers(tmp_path: Path) -> None:
    """A connection that another process has accepted at a shared port waits in no queue; nor does a
    datagram socket, ever.
    """
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as server,
        socket.socket(type=socket.SOCK_DGRAM) as receiver,
    ):
        address = server.getsockname()
        receiver.bind(address)
        text = (
            f"c = socket.create_connection({address}); u = socket.socket(type=socket.SOCK_DGRAM); "
            f"u.connect({address})\n"
            f"s = socket.create_server({address}, reuse_port=True)"
        )
        with running(text, tmp_path) as program:
            accepted, _ = server.accept()
            found = _of(program.pid)
            accepted.close()
    assert {s.socket.protocol: s.where for s in found if s.socket.connected} == {
        "tcp": Peer.OUTSIDE,
        "udp": Peer.OUTSIDE,
    }


def server_port(found: list[TreeSocket], where: Peer) -> int:
    """The port that the one connection with its peer there goes to."""
    (only,) = [s.socket.peer for s in found if s.where is where]
    assert only is not None
    return only.port


def test_two_families_of_one_connection(tmp_path: Path) -> None:
    text = (
        "s = socket.socket(socket.AF_INET6); s.setsockopt(41, 26, 0); s.bind(('::', 0)); "
        "s.listen()\n"
        "c = socket.create_connection(('127.0.0.1', s.getsockname()[1])); a = s.accept()[0]"
    )
    with running(text, tmp_path) as program:
        found = [s for s in _of(program.pid) if s.socket.connected]
    assert {s.socket.family for s in found} == {"inet", "inet6"}
    assert {s.where for s in found} == {Peer.INSIDE}


def test_unix_sockets(tmp_path: Path) -> None:
    text = (
        "a, b = socket.socketpair(); d, e = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); "
        "d.send(b'x' * 7)\n"
        "s, c = unaccepted(); n = socket.socket(socket.AF_UNIX); n.bind(TMP + '/named'); "
        "n.listen()\n"
        "o, outer = None, None"
    )
    with running(text, tmp_path) as program:
        found = _of(program.pid)
    assert len([s for s in found if s.where is Peer.INSIDE]) == 4
    assert sum(s.socket.rqueue for s in found if s.socket.type == "dgram") > 0
    queued = next(s for s in found if s.where is Peer.QUEUED)
    assert queued.peer_name == f"@{tmp_path}"
    assert _one(found, lambda s: s.name == f"@{tmp_path}").socket.pending == (queued.socket.inode,)
    assert _one(found, lambda s: s.name == f"{tmp_path}/named").socket.listening


def test_unix_peer_outside_is_found(tmp_path: Path) -> None:
    with running("a, b = outside(socket.socketpair); b.close()", tmp_path) as program:
        (only,) = _of(program.pid)
        assert only.where is Peer.OUTSIDE
        inside = [p.pid for p in read_tree(program.pid)]
        (holder,) = outside_holders([only.socket.peer_inode], inside).values()
        assert holder[0] == program.outer


def test_shared_socket_has_all_its_holders(tmp_path: Path) -> None:
    with running(
        "s = socket.create_server(('127.0.0.1', 0)); os.dup(s.fileno()); child(lambda: None)",
        tmp_path,
    ) as program:
        (only,) = _of(program.pid)
    assert len(only.holders) == 4
    assert only.pid == min(pid for pid, _fd in only.holders)


@pytest.mark.parametrize(
    ("make", "family", "kind", "protocol", "state"),
    [
        ("socket.socket()", "inet", "stream", "tcp", "close"),
        ("socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "inet6", "dgram", "udp", "close"),
        ("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "inet", "raw", "icmp", "close"),
        ("socket.socket(socket.AF_VSOCK)", "vsock", "stream", "", "close"),
        (
            "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
            "inet",
            "stream",
            "mptcp",
            "close",
        ),
        ("socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)", "packet", "dgram", "", "close"),
        (
            "(lambda s: (s.bind((0, 0)), s))(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))",
            "netlink",
            "raw",
            "netlink-0",
            "close",
        ),
        ("socket.create_server(('127.0.0.1', 0))", "inet", "stream", "tcp", "listen"),
    ],
)
def test_kinds_of_sockets(
    make: str, family: str, kind: str, protocol: str, state: str, tmp_path: Path
) -> None:
    with running(f"s = {make}", tmp_path) as program:
        (only,) = _of(program.pid)
        s = only.socket
    assert (s.family, s.type, s.protocol, s.state) == (family, kind, protocol, state)
    assert only.where is Peer.NONE


def test_sockets_of_another_net_namespace(tmp_path: Path) -> None:
    text = (
        "again(0x40000000); loopback_up(); s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname()); a = s.accept()[0]"
    )
    with running(text, tmp_path) as program:
        found = _of(program.pid)
        listed = {s.inode for s in sockets(program.pid)}
        here = {s.inode for s in sockets()}
        assert {s.socket.inode for s in found} <= listed
        assert not listed & here
        assert {s.net_namespace for s in found} == {namespaces(program.pid)["net"]}
        assert namespaces("self") == namespaces(os.getpid())
    assert len([s for s in found if s.where is Peer.INSIDE]) == 2


def test_addresses() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"
    assert str(Address("10.0.0.1", 80)) == "10.0.0.1:80"


def test_terminal_with_its_master_inside(tmp_path: Path) -> None:
    with running("m, s = os.openpty()", tmp_path) as program:
        tree = read_tree(program.pid)
        opened = {p.pid: descriptors(p.pid) for p in tree}
        (only,) = terminals(tree, opened)
        masters = [d for d in opened[program.pid] if master_index(d) is not None]
    assert only.master_inside
    assert (only.number, only.path) == (master_index(masters[0]), f"/dev/pts/{only.number}")
    assert only.masters == ((program.pid, masters[0].fd),)
    assert only.controls == ()
    assert pts_index(only.rdev) == only.number


def test_controlling_terminal_from_outside(tmp_path: Path) -> None:
    text = (
        "m, s = outside(os.openpty); os.close(m); fcntl.ioctl(s, 0x540E, 0); child(lambda: "
        "os.close(s))"
    )
    with running(text, tmp_path) as program:
        tree = read_tree(program.pid)
        (only,) = terminals(tree, {p.pid: descriptors(p.pid) for p in tree})
        node = os.stat(only.path)
    assert not only.master_inside
    assert [pid for pid, _fd in only.holders] == [program.pid]
    assert len(only.controls) == 2
    assert only.session_leader == program.pid
    assert decode_tty_nr(tree[0].tty_nr) == only.rdev == node.st_rdev
    assert only.external_key == f"tty[{node.st_rdev:x}:{node.st_dev:x}]"


def test_numbers_of_terminals() -> None:
    assert decode_tty_nr(0) == 0
    assert decode_tty_nr(34816) == os.makedev(136, 0)
    assert pts_index(os.makedev(136, 7)) == 7
    assert pts_index(os.makedev(136, 300)) == 300
    assert pts_index(os.makedev(4, 1)) is None


def test_a_descriptor_that_is_another_socket_by_now_is_not_asked_for_the_first_one() -> None:
    """A unix socket that the tables do not list is one of another net namespace, and refused: this
    one is only closed.
    """
    first, second = socket.socketpair()
    with first, second, socket.socket(socket.AF_UNIX) as third:
        me = os.getpid()
        seen = [descriptor for descriptor in descriptors(me) if descriptor.fd == first.fileno()]
        assert [found.socket.listed for found in tree_sockets({me: seen})] == [True]
        os.dup2(third.fileno(), first.fileno())
        second.close()
        assert tree_sockets({me: seen}) == []
