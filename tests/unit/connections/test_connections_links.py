"""Which ends of connections belong together when several trees are dumped at one moment."""

from __future__ import annotations

from criuctl.connections.links import Half, Link, match

CLIENT, SERVER = "127.0.0.1:40000", "127.0.0.1:6379"


def tcp(inode: int, local: str, peer: str, **more: object) -> Half:
    half = {"family": "inet", "type": "stream", "protocol": "tcp", "namespace": 1}
    return Half(**(half | {"inode": inode, "local": local, "peer": peer} | more))  # type: ignore[arg-type]


def unix(inode: int, peer_inode: int, kind: str = "stream", **more: object) -> Half:
    half = {"family": "unix", "type": kind, "protocol": "", "namespace": 1, "local": "", "peer": ""}
    return Half(**(half | {"inode": inode, "peer_inode": peer_inode} | more))  # type: ignore[arg-type]


def listener(inode: int, local: str, **more: object) -> Half:
    return tcp(inode, local, "", listening=True, **more)


PIDS = {"agent": {10, 11}, "db": {20}, "other": {30}}


def test_both_ends_of_tcp_and_unix_connections() -> None:
    found = match(
        {
            "agent": [tcp(1, CLIENT, SERVER, peer_inode=3), unix(2, 4)],
            "db": [listener(9, SERVER), tcp(3, SERVER, CLIENT, peer_inode=1), unix(4, 2)],
        },
        PIDS,
    )
    assert found.links == {
        "agent": {1: Link("db", 1), 2: Link("db", 2)},
        "db": {3: Link("agent", 1), 4: Link("agent", 2)},
    }
    assert not found.unaccepted


def test_what_is_none() -> None:
    """One end outside, another namespace, datagrams, and both ends in one tree."""
    found = match(
        {
            "agent": [
                tcp(1, CLIENT, SERVER, peer_inode=77),
                unix(2, 78),
                unix(5, 6, "dgram"),
                tcp(7, "127.0.0.1:1", "127.0.0.1:2"),
                tcp(8, "127.0.0.1:2", "127.0.0.1:1"),
            ],
            "db": [tcp(3, SERVER, CLIENT, namespace=2), unix(6, 5, "dgram")],
        },
        PIDS,
    )
    assert found.links == {"agent": {}, "db": {}} and not found.unaccepted


def test_what_is_not_accepted_yet() -> None:
    for address in (SERVER, "0.0.0.0:6379", "[::]:6379"):
        found = match({"agent": [tcp(1, CLIENT, SERVER)], "db": [listener(9, address)]}, PIDS)
        assert found.unaccepted == [f"agent  to {SERVER}"], address
    waiting = unix(1, 99, waiting=True, owner=20, about="PID 10 fd 3", peer="/run/db")
    found = match({"agent": [waiting], "db": []}, PIDS)
    assert found.unaccepted == ["agent PID 10 fd 3 to /run/db"]
    # at a listener that is not of the group, and of its own tree
    for owner in (40, 10):
        waiting = unix(1, 99, waiting=True, owner=owner)
        assert not match({"agent": [waiting], "db": []}, PIDS).unaccepted
