"""A net namespace that is the tree's alone: what is in it comes back with the tree, or is reported before the dump."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from support.command import Criuctl
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

_UP = "ip link set lo up"
_MACVLAN = "ip link add v0 type veth peer name v1; ip link add m0 link v0 type macvlan"
_BOUND = """import os, socket, sys
kind, name = sys.argv[1:3]
if kind == "packet":
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.bind((name, 3))
else:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
    sock.bind(("", 7990))
    if kind == "tcp": sock.listen()
sock.set_inheritable(True)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def _inside(*commands: str, unshare: Sequence[str] = ("--net",), leader: bool = False) -> list[str]:
    """The prefix of a program in a net namespace of its own, in which these commands ran first."""
    words = "; ".join((*commands, f'exec {"setsid " if leader else ""}"$@"'))
    return ["unshare", *unshare, "sh", "-ec", words, "sh"]


def _told(criuctl: Criuctl, animal: Animal) -> dict[str, dict[str, object]]:
    findings = criuctl("check", animal.pid, check=False)["findings"]
    return {f["code"]: f for f in findings if f["code"] in ("own-network", "interface-lost")}


_ANYTHING = (
    ("ip addr add 10.9.9.1/24 dev lo", "address 10.9.9.1/24 on lo"),
    ("ip link add v0 type veth peer name v1", "interfaces v0 (veth), v1 (veth)"),
    ("ip route add 10.7.0.0/16 dev lo table 77", "1 route"),
    ("ip rule add from 10.9.9.1 table 77", "1 routing rule"),
    ("nft add table inet zoo", "firewall table inet zoo"),
    ("echo 777 >/proc/sys/net/core/somaxconn", "setting net.core.somaxconn=777"),
)


def test_all_that_would_be_lost_is_reported(zoo: Zoo, criuctl: Criuctl) -> None:
    """Also where a program waits for the end of the tree, in the same namespace, as `unshare --fork` does."""
    commands = [_UP, *(command for command, _ in _ANYTHING), _MACVLAN.split("; ")[1]]
    prefix = _inside(*commands, unshare=("--net", "--pid", "--fork", "--mount-proc"), leader=True)
    animal = zoo.launch("counter.py", prefix=prefix)
    told = _told(criuctl, animal)["own-network"]
    assert told["level"] == "warning" and f"ip netns attach NAME {animal.pid}" in str(told["hint"])
    for _, words in (*_ANYTHING[:1], *_ANYTHING[2:]):
        assert words in str(told["text"])
    assert "interfaces m0 (macvlan), v0 (veth), v1 (veth)" in str(told["text"])


@pytest.mark.parametrize("kind", ["tcp", "udp", "packet"])
def test_a_socket_that_is_bound_to_an_interface_that_would_be_lost(kind: str, zoo: Zoo, criuctl: Criuctl) -> None:
    """Refused where the dump ends the tree, and the interface with it; else there is still time to keep it."""
    prefix = [*_inside(_UP, _MACVLAN), sys.executable, "-c", _BOUND, kind, "m0"]
    animal = zoo.launch("counter.py", prefix=prefix)
    told = _told(criuctl, animal)["interface-lost"]
    assert told["level"] == "error" and "interface m0" in str(told["text"])
    assert told["pid"] == animal.pid and f"ip netns attach NAME {animal.pid}" in str(told["hint"])
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 4 and "interface-lost" in [f["code"] for f in answer["error"]["findings"]]
    animal.ask()
    warnings = criuctl("dump", animal.pid, "--leave-running")["warnings"]
    assert any("interface m0" in text for text in warnings)
