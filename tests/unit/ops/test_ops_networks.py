"""Which restored members of a group share a network that is made for them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.ops.linked import networks

LISTENER = ConnectionRecord(
    pid=1, fd=3, family="inet", protocol="tcp", state="listen", local="192.0.2.7:80"
)
CLIENT = ConnectionRecord(
    pid=1,
    fd=3,
    family="inet",
    protocol="tcp",
    state="established",
    local="192.0.2.8:40000",
    peer="192.0.2.7:80",
    external=True,
)
UNIX = ConnectionRecord(
    pid=1, fd=3, family="unix", type="stream", state="established", external=True, linked="b"
)


def _member(*connections: ConnectionRecord, **net: Any) -> Manifest:
    namespaces = {"net": {"mode": "host", "inode": 1, **net}}
    made = Manifest(id="0" * 32, session=SessionRef("a", "1" * 32))
    return made.with_use(connections=connections, namespaces=namespaces)


@pytest.mark.parametrize(
    ("held", "needed"),
    [
        (LISTENER, True),
        (CLIENT, False),
        (CLIENT.with_use(linked="b"), True),
        (UNIX, False),
        (UNIX.with_use(peer="/run/socket"), False),
        (UNIX.with_use(peer="@name"), True),
    ],
)
def test_copies_that_have_an_address(held: ConnectionRecord, needed: bool) -> None:
    """Only they do; and all of them come into the same one."""
    members = {"a": _member(held), "b": _member()}
    with networks.made(members, copy=True) as found:
        assert set(found) == ({"a", "b"} if needed else set())
        assert len(set(found.values())) == int(needed)
        for path in found.values():
            assert os.stat(path).st_ino != os.stat("/proc/self/ns/net").st_ino
    with networks.made(members, copy=False) as found:
        assert found == {}


def test_a_network_that_is_gone() -> None:
    """Those share one that did so before; a tree that had one for itself gets that from CRIU."""
    members = {
        "a": _member(mode="entered", inode=2),
        "b": _member(mode="entered", inode=2),
        "alone": _member(mode="entered", inode=3),
        "saved": _member(mode="dumped", inode=4),
        "home": _member(),
    }
    for copy in (False, True):
        with networks.made(members, copy=copy) as found:
            assert set(found) == {"a", "b"} and found["a"] == found["b"]
