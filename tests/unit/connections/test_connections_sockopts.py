"""Recorded options of sockets: what a manifest may hold; none of it is trusted."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from criuctl.connections import sockopts


@pytest.mark.parametrize(
    "value", [1 << 40, -(1 << 63), 1 << 400, "x", "\ud800", None, [], [1 << 70, 1], {"a": 1}, 1.5]
)
@pytest.mark.parametrize(
    "name",
    [
        "SO_RCVLOWAT",
        "SO_LINGER",
        "SO_RCVTIMEO",
        "TCP_CONGESTION",
        "IPV6_MULTICAST_IF",
        "MCAST_JOIN_GROUP",
        "NONE",
    ],
)
def test_values_that_no_socket_takes_are_refused(name: str, value: Any) -> None:
    with socket.socket() as sock:
        refused = sockopts.apply(sock, {name: value, "SO_KEEPALIVE": 1})
        assert refused or (name, value) == ("MCAST_JOIN_GROUP", [])
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
