"""Which multicast groups there are, by what the kernel tells of each interface."""

from __future__ import annotations

import socket

import pytest

from criuctl.connections import multicast

# As ip_mc_seq_show prints it: a name of ten characters and more meets the colon.
IGMP = """Idx	Device    : Count Querier	Group    Users Timer	Reporter
1	lo        :     1      V3
				010000E0     1 0:00000000		0
4	br-1a2b3c4d5e6f:     2      V3
				0A0201EF     1 0:00000000		0
				010000E0     1 0:00000000		0
"""
IGMP6 = """1    lo              ff020000000000000000000000000001     1 0000000C 0
4    br-1a2b3c4d5e6f ff150000000000000000000000000042     1 00000004 0
"""


def test_interfaces_with_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        multicast,
        "read_lines",
        lambda _pid, name: (IGMP if name == "net/igmp" else IGMP6).splitlines(),
    )
    assert multicast.groups(1) == [
        (socket.AF_INET, "239.1.2.10", 4, "br-1a2b3c4d5e6f"),
        (socket.AF_INET6, "ff15::42", 4, "br-1a2b3c4d5e6f"),
    ]
