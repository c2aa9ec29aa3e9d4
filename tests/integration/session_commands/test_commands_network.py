"""A session that was started in a net namespace which others live in, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Home
from support.keeper import wait_until
from support.operating import Operators

pytestmark = pytest.mark.integration


def _net(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


@pytest.mark.parametrize("options", [(), ("--host-pids",)])
def test_a_session_comes_back_to_those_it_shared_its_network_with(
    options: tuple[str, ...], home: Home, operators: Operators
) -> None:
    """Whether its holder starts CRIU, which has waited for it, or CRIU runs in namespaces of the
    session.
    """
    up = "ip link set lo up; exec sleep 600"
    other = operators.keeper.spawn(
        ["unshare", "--net", "sh", "-c", up], env=operators.environment(), cwd=home.path
    )
    try:
        wait_until(
            lambda: Path(f"/proc/{other.pid}/comm").read_text() == "sleep\n",
            60,
            "its network is there",
        )
        operators.prefix = ["nsenter", "-t", str(other.pid), "-n"]
        session = operators("run", "-d", *options, "--", "sleep", "600")
        operators.prefix = []
        report = operators("dump", session["session"])
        restored = operators("restore", report["checkpoint"])
        assert (_net(restored["pid"]), restored["warnings"]) == (_net(other.pid), [])
    finally:
        other.kill()
        other.wait(60)
