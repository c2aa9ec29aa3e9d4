"""A net namespace that is the tree's alone: what is in it comes back with the tree, or is reported
before the dump.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.proc.syscalls import pidfd_getfd
from criuctl.proc.tree import read_tree

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


def _findings(criuctl: Criuctl, animal: Animal) -> dict[str, dict[str, object]]:
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
    """Also where a program waits for the end of the tree, in the same namespace, as `unshare
    --fork` does.
    """
    commands = [_UP, *(command for command, _ in _ANYTHING), _MACVLAN.split("; ")[1]]
    prefix = _inside(*commands, unshare=("--net", "--pid", "--fork", "--mount-proc"), leader=True)
    animal = zoo.launch("counter.py", prefix=prefix)
    finding = _findings(criuctl, animal)["own-network"]
    assert finding["level"] == "warning" and f"ip netns attach NAME {animal.pid}" in str(
        finding["hint"]
    )
    for _, words in (*_ANYTHING[:1], *_ANYTHING[2:]):
        assert words in str(finding["text"])
    assert "interfaces m0 (macvlan), v0 (veth), v1 (veth)" in str(finding["text"])


@pytest.mark.parametrize("kind", ["tcp", "udp", "packet"])
def test_a_socket_that_is_bound_to_an_interface_that_would_be_lost(
    kind: str, zoo: Zoo, criuctl: Criuctl
) -> None:
    """Refused where the dump ends the tree, and the interface with it; else there is still time to
    keep it.
    """
    prefix = [*_inside(_UP, _MACVLAN), sys.executable, "-c", _BOUND, kind, "m0"]
    animal = zoo.launch("counter.py", prefix=prefix)
    finding = _findings(criuctl, animal)["interface-lost"]
    assert finding["level"] == "error" and "interface m0" in str(finding["text"])
    assert finding["pid"] == animal.pid and f"ip netns attach NAME {animal.pid}" in str(
        finding["hint"]
    )
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 4 and "interface-lost" in [
        f["code"] for f in answer["error"]["findings"]
    ]
    animal.ask()
    warnings = criuctl("dump", animal.pid, "--leave-running")["warnings"]
    assert any("interface m0" in text for text in warnings)


_SHOW = (
    "ip -br link; ip -br addr; ip route show table all; ip -6 route show table all; ip rule; nft "
    "list ruleset; "
)
_SHOW += (
    "sysctl net.core.somaxconn net.ipv4.ip_forward net.ipv4.conf.all.accept_redirects "
    "net.ipv4.tcp_syncookies"
)


def _shown(pid: int) -> list[str]:
    """What the system's own programs say of its network, once its new IPv6 addresses are there for
    good.
    """
    inside = ["nsenter", "-t", str(pid), "-n", "ip", "-6", "addr", "show", "tentative"]
    wait_until(
        lambda: not subprocess.run(inside, capture_output=True, check=True).stdout,
        60,
        "addresses are checked",
    )
    inside[4:] = ["sh", "-c", _SHOW]
    return sorted(
        subprocess.run(inside, capture_output=True, text=True, check=True).stdout.splitlines()
    )


_NETWORKS = {
    "down": [],
    "up": [_UP],
    "all": [
        _UP,
        *(command for command, _ in _ANYTHING),
        "ip addr add 10.8.8.1/24 dev v0; ip link set v0 up; ip link set v1 up",
        "ip link add br0 type bridge; ip link set v1 master br0; ip route add 10.6.0.0/16 via "
        "10.8.8.7",
        "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 "
        ">/proc/sys/net/ipv4/conf/all/accept_redirects",
        "echo 0 >/proc/sys/net/ipv4/tcp_syncookies",
        "nft 'add chain inet zoo in { type filter hook input priority 0; }'",
        "nft add rule inet zoo in tcp dport 77 drop",
    ],
}
_SPACES = {
    "net": (("--net",), False),
    "init": (("--net", "--pid", "--fork", "--mount-proc"), True),
    "everything": (("--net", "--pid", "--fork", "--mount-proc", "--mount", "--uts", "--ipc"), True),
}


@pytest.mark.parametrize("network", _NETWORKS)
@pytest.mark.parametrize("spaces", _SPACES)
def test_the_network_comes_back_with_the_tree(
    network: str, spaces: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Time and again."""
    unshare, leader = _SPACES[spaces]
    animal = zoo.launch(
        "counter.py", prefix=_inside(*_NETWORKS[network], unshare=unshare, leader=leader)
    )
    before = _shown(animal.pid)
    for _ in range(2):
        assert _findings(criuctl, animal) == {}
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        assert (_shown(animal.pid), animal.answer["warnings"]) == (before, [])
        animal.ask()


@pytest.mark.parametrize("kind", ["tcp", "udp", "packet"])
def test_a_socket_that_is_bound_to_an_interface_of_it(
    kind: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    bound = [sys.executable, "-c", _BOUND, kind, "v0"]
    animal = zoo.launch(
        "counter.py",
        prefix=[*_inside(_UP, _MACVLAN.split(";", maxsplit=1)[0], "ip link set v0 up"), *bound],
    )
    show = [
        "nsenter",
        "-t",
        str(animal.pid),
        "-n",
        "ss",
        "-H",
        "-n",
        "-a",
        "-0" if kind == "packet" else f"--{kind}",
    ]
    before = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "v0" in before
    assert _findings(criuctl, animal) == {}
    restored = trip.restore(trip.dump(animal), animal, ignore=("*/namespaces/net",))
    show[2] = str(restored.pid)
    assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == before
    restored.ask()


@pytest.mark.parametrize("options", [(), ("--pids", "private"), ("--as", "copy")])
def test_connections_inside_of_it(options: tuple[str, ...], zoo: Zoo, trip: Trip) -> None:
    """They go on, and no table of the lock on them stays; next to its original a copy has the same
    network.
    """
    address = "ip addr add 10.9.9.1/24 dev lo"
    animal = zoo.launch("sockets.py", prefix=_inside(_UP, address))
    before = _shown(animal.pid)
    report = trip.snapshot(animal) if "--as" in options else trip.dump(animal)
    restored = trip.restore(report, animal, *options, equal=False)
    assert _shown(restored.pid) == before
    assert len({os.stat(f"/proc/{pid}/ns/net").st_ino for pid in (restored.pid, os.getpid())}) == 2
    restored.ask()
    if "--as" in options:
        assert _shown(animal.pid) == before
        animal.ask()


_NESTED = """import ctypes, os, subprocess, sys
kinds, inside, then = int(sys.argv[1]), sys.argv[2], sys.argv[3]
done, done_write = os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(kinds) == 0
    subprocess.run(["sh", "-ec", inside], check=True)
    os.close(done); os.write(done_write, b"x"); os.close(done_write)
    os.execvp("sleep", ["sleep", "600"])
os.close(done_write)
assert os.read(done, 1) == b"x"
os.close(done)
subprocess.run(["sh", "-ec", then, "sh", str(child)], check=True)
os.execvp(sys.argv[4], sys.argv[4:])
"""
_NEWNET, _NEWNS = 0x40000000, 0x20000
_REACH = (
    "import socket; s = socket.socket(); s.settimeout(5); raise "
    "SystemExit(s.connect_ex(('10.9.9.2', 9)) != 111)"
)


def _nested(animal: Animal) -> int:
    """The child of the program that has namespaces of its own."""
    (child,) = (p.pid for p in read_tree(animal.pid) if p.command == "sleep")
    return child


@pytest.mark.parametrize("spaces", ["net", "init"])
def test_several_networks_in_one_tree(spaces: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """An interface has its other end in the other one; in each are things that CRIU leaves out."""
    unshare, leader = _SPACES[spaces]
    inside = f"{_UP}; echo 666 >/proc/sys/net/core/somaxconn"
    peers = (
        "ip link add v0 type veth peer name v1 netns $1; ip addr add 10.9.9.1/24 dev v0; ip link "
        "set v0 up; "
    )
    peers += "nsenter -t $1 -n sh -c 'ip addr add 10.9.9.2/24 dev v1; ip link set v1 up'"
    nested = [sys.executable, "-c", _NESTED, str(_NEWNET), inside, peers]
    prefix = [
        *_inside(_UP, "echo 777 >/proc/sys/net/core/somaxconn", unshare=unshare, leader=leader),
        *nested,
    ]
    animal = zoo.launch("counter.py", prefix=prefix)
    before = _shown(animal.pid), _shown(_nested(animal))
    assert before[0] != before[1]
    for _ in range(2):
        assert _findings(criuctl, animal) == {}
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        assert (_shown(animal.pid), _shown(_nested(animal)), animal.answer["warnings"]) == (
            *before,
            [],
        )
        ping = ["nsenter", "-t", str(animal.pid), "-n", sys.executable, "-c", _REACH]
        assert subprocess.run(ping, check=False).returncode == 0
        animal.ask()


def test_a_network_in_the_tree_that_others_live_in_too(zoo: Zoo, criuctl: Criuctl) -> None:
    """CRIU would make another one of it."""
    animal = zoo.launch(
        "counter.py",
        prefix=[*_inside(_UP), sys.executable, "-c", _NESTED, str(_NEWNET), _UP, "true"],
    )
    child = _nested(animal)
    other = zoo.launch(["sleep", "600"], prefix=["nsenter", "-t", str(child), "-n"], name="other")
    net = os.readlink(f"/proc/{child}/ns/net")
    wait_until(lambda: os.readlink(f"/proc/{other.pid}/ns/net") == net, 60, "it has come")
    errors = [
        f for f in criuctl("check", animal.pid, check=False)["findings"] if f["level"] == "error"
    ]
    assert [(f["code"], f["pid"]) for f in errors] == [("nested-namespace", child)]


def test_several_mount_namespaces_in_one_tree(zoo: Zoo, trip: Trip) -> None:
    """Of a root that is PID 1, whose own CRIU saves."""
    unshare, leader = _SPACES["everything"]
    mount = "mkdir own; mount -t tmpfs own own; echo inner >own/f"
    prefix = [
        *_inside(unshare=unshare, leader=leader),
        sys.executable,
        "-c",
        _NESTED,
        str(_NEWNS),
        mount,
        "true",
    ]
    animal = zoo.launch("counter.py", prefix=prefix)
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        own = f"{animal.folder}/own/f"
        assert Path(f"/proc/{_nested(animal)}/root{own}").read_text() == "inner\n"
        assert not Path(f"/proc/{animal.pid}/root{own}").exists()
        animal.ask()


@pytest.mark.parametrize("unshare", [("--pid", "--fork"), ("--pid", "--fork", "--mount")])
def test_a_tree_that_is_pid_1_and_sees_the_proc_of_the_host(
    unshare: tuple[str, ...], zoo: Zoo, trip: Trip
) -> None:
    """CRIU stays outside of it, where the right one is."""
    animal = zoo.launch("counter.py", prefix=_inside(unshare=unshare, leader=True))
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        animal.ask()


_TUNNEL = """import ctypes, fcntl, os, struct, subprocess, sys
home, call = os.open("/proc/self/ns/net", os.O_RDONLY), ctypes.CDLL(None)
if sys.argv[1]: assert call.unshare(0x40000000) == 0
tunnel = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH14x", b"tz0", 0x1001))
up = "ip addr add 10.5.5.1/24 dev tz0; ip link set tz0 up mtu 1300; "
up += "ip route add 10.6.0.0/16 via 10.5.5.2"
subprocess.run(["sh", "-ec", up], check=True)
if sys.argv[1]: assert call.setns(home, 0x40000000) == 0
os.dup2(tunnel, 9)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_SEND = (
    "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'through the "
    "tunnel', ('10.6.0.9', 9))"
)


def _through(pid: int) -> bytes:
    """What its descriptor 9 of a tunnel gets of a packet that is sent in its net namespace."""
    pidfd = os.pidfd_open(pid)
    tunnel = pidfd_getfd(pidfd, 9)
    os.close(pidfd)
    try:
        subprocess.run(["nsenter", "-t", str(pid), "-n", sys.executable, "-c", _SEND], check=True)
        while select.select([tunnel], [], [], 30)[0]:
            # others are the kernel's own
            if (packet := os.read(tunnel, 2000)).endswith(b"through the tunnel"):
                return packet
    finally:
        os.close(tunnel)
    return b""


@pytest.mark.parametrize("spaces", _SPACES)
def test_a_tunnel_of_the_tree_carries_packets_again(spaces: str, zoo: Zoo, trip: Trip) -> None:
    """The program has its end open still, and its addresses, routes and settings are as they
    were.
    """
    unshare, leader = _SPACES[spaces]
    prefix = [*_inside(_UP, unshare=unshare, leader=leader), sys.executable, "-c", _TUNNEL, ""]
    animal = zoo.launch("counter.py", prefix=prefix)
    assert _through(animal.pid)
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        assert _through(animal.pid) and animal.answer["warnings"] == []
        shown = subprocess.run(
            ["nsenter", "-t", str(animal.pid), "-n", "ip", "link", "show", "tz0"],
            capture_output=True,
            check=True,
        )
        assert b"mtu 1300" in shown.stdout
        animal.ask()


def test_a_tunnel_of_another_network(zoo: Zoo, criuctl: Criuctl) -> None:
    """CRIU saves none of the host's."""
    animal = zoo.launch("counter.py", prefix=[sys.executable, "-c", _TUNNEL, "out"])
    errors = [
        f for f in criuctl("check", animal.pid, check=False)["findings"] if f["level"] == "error"
    ]
    assert {(f["code"], f["fd"]) for f in errors} == {("device", 9)}
    assert "net namespace of its own" in str(errors[0]["hint"])
    animal.ask()
