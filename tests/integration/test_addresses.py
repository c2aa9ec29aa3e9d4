"""An address that moves between hosts, made of net namespaces on a bridge: third hosts learn where
it is, and it comes back.

The third host's caches are asked of the kernel; that packets arrive is shown by a datagram that is
answered from the new place.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.command import Home
from support.keeper import wait_until

from criuctl.errors import Conflict, NotFound, UsageError
from criuctl.proc import address_choice, addresses
from criuctl.proc.namespace_sockets import socket_inside

pytestmark = pytest.mark.integration

MOVES = "10.9.0.50"
MOVES_6 = "fd09::50"
MAKE = """
set -e
ip netns add {t}-w; ip -n {t}-w link add name wire type bridge; ip -n {t}-w link set dev wire up
for n in 1 2 3; do
  ip netns add {t}-$n; ip -n {t}-$n link set dev lo up
  ip netns exec {t}-$n sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
  ip -n {t}-$n link add eth0 type veth peer name p$n netns {t}-w
  ip -n {t}-w link set dev p$n master wire up; ip -n {t}-$n link set dev eth0 up
  ip -n {t}-$n address add 10.9.0.$n/24 dev eth0
  ip -n {t}-$n address add fd09::$n/64 dev eth0 nodad
done
ip -n {t}-1 address add 10.9.0.50/24 dev eth0
ip -n {t}-1 address add fd09::50/64 dev eth0 nodad
"""


class Net:
    """Three hosts on a wire; ``net.fd(n)`` is the net namespace of host n."""

    def __init__(self, token: str, stack: ExitStack) -> None:
        self.token = token
        self._fds: dict[int, int] = {}
        for number in (1, 2, 3):
            self._fds[number] = os.open(f"/run/netns/{token}-{number}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, self._fds[number])

    def fd(self, number: int) -> int:
        return self._fds[number]

    def ip(self, number: int, *words: str) -> Any:
        """What `ip --json` says on a host."""
        command = ["ip", "--json", "-n", f"{self.token}-{number}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout) if done.stdout.strip() else []

    def addresses(self, number: int) -> set[str]:
        """Those with a prefix, link-local ones apart."""
        listed = [
            a
            for link in self.ip(number, "address", "show", "dev", "eth0")
            for a in link.get("addr_info", [])
        ]
        return {f"{a['local']}/{a['prefixlen']}" for a in listed if a["scope"] != "link"}

    def routes(self, number: int, family: str = "-4") -> list[str]:
        return sorted(
            f"{r['dst']} {r.get('gateway', '')} {r.get('prefsrc', '')}"
            for r in self.ip(number, family, "route", "show")
        )

    def mac(self, number: int) -> str:
        return str(self.ip(number, "link", "show", "dev", "eth0")[0]["address"])

    def known(self, number: int, ip: str) -> str:
        """The hardware address that a host has in its cache."""
        return str(
            next(
                (n.get("lladdr", "") for n in self.ip(number, "neigh", "show") if n["dst"] == ip),
                "",
            )
        )

    def ask(self, asker: int, answerer: int, ip: str) -> None:
        """Send a datagram to the address, which must arrive on the host `answerer`; one that no
        host takes is dropped after seconds.
        """
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with (
            socket_inside(self.fd(answerer), family, socket.SOCK_DGRAM) as there,
            socket_inside(self.fd(asker), family, socket.SOCK_DGRAM) as here,
        ):
            there.bind((ip, 0))
            there.settimeout(5)
            for _ in range(12):
                here.sendto(b"hello", (ip, there.getsockname()[1]))
                with suppress(TimeoutError):
                    assert there.recv(100) == b"hello"
                    return
        raise AssertionError(f"nothing comes to {ip} on host {answerer}")


@pytest.fixture
def net(home: Home) -> Iterator[Net]:
    with ExitStack() as stack:
        for name in ("w", "1", "2", "3"):
            stack.callback(
                subprocess.run,
                ["ip", "netns", "delete", f"{home.token}-{name}"],
                check=False,
                capture_output=True,
            )
        subprocess.run(["sh", "-c", MAKE.format(t=home.token)], check=True, timeout=60)
        yield Net(home.token, stack)


@pytest.mark.parametrize("ip", [MOVES, MOVES_6])
def test_it_moves_and_the_third_host_learns_it(net: Net, ip: str) -> None:
    net.ask(3, 1, ip)
    assert net.known(3, ip) == net.mac(1)
    before = {number: net.addresses(number) for number in (1, 2)}
    prefix = 64 if ":" in ip else 24
    held = addresses.take(ip, net.fd(1))
    assert net.addresses(1) == before[1] - {f"{ip}/{prefix}"}
    record = json.loads(json.dumps(held.to_dict()))
    brought = addresses.bring(ip, record, namespace=net.fd(2))
    assert net.addresses(2) == before[2] | {f"{ip}/{prefix}"}
    assert net.known(3, ip) == net.mac(1), "no host has announced it yet"
    brought.announce()
    wait_until(lambda: net.known(3, ip) == net.mac(2), 60, "the third host knows the new place")
    net.ask(3, 2, ip)

    brought.undo()
    assert net.addresses(2) == before[2]
    brought.undo()
    # what a criuctl does that comes after a killed one
    again = addresses.HeldAddress.from_dict(record, net.fd(1))
    again.put_back()
    assert net.addresses(1) == before[1]
    again.put_back()
    wait_until(
        lambda: net.known(3, ip) == net.mac(1), 60, "the third host knows the old place again"
    )
    net.ask(3, 1, ip)


def test_it_is_on_trial_until_it_is_announced(net: Net) -> None:
    """A process that brings it and is killed leaves it to the kernel, which takes it away."""

    def lifetimes(ip: str) -> list[int]:
        listed = net.ip(2, "address", "show", "dev", "eth0")[0]["addr_info"]
        return [a["valid_life_time"] for a in listed if a["local"] == ip]

    def gone(ip: str) -> bool:
        return not lifetimes(ip)

    for ip in (MOVES, MOVES_6):
        record = addresses.take(ip, net.fd(1)).to_dict()
        code = (
            "import sys, os, json; sys.path.insert(0, sys.argv[1])\n"
            "from criuctl.proc import addresses\n"
            "fd = os.open(sys.argv[2], os.O_RDONLY)\n"
            "addresses.bring(sys.argv[3], json.loads(sys.argv[4]), namespace=fd, trial=2)\n"
            "os.kill(os.getpid(), 9)"
        )
        place = f"/run/netns/{net.token}-2"
        project = Path(__file__).parent.parent.parent
        done = subprocess.run(
            [sys.executable, "-c", code, project, place, ip, json.dumps(record)],
            check=False,
            timeout=60,
        )
        assert done.returncode == -9
    assert all(0 <= left <= 2 for ip in (MOVES, MOVES_6) for left in lifetimes(ip))
    for ip in (MOVES, MOVES_6):
        wait_until(partial(gone, ip), 60, f"{ip} is gone by itself")
        brought = addresses.bring(ip, {"ip": ip}, namespace=net.fd(2))
        assert lifetimes(ip)[0] <= addresses.TRIAL
        # as if it had been stopped for long
        net.ip(2, "address", "delete", f"{ip}/{brought.prefix}", "dev", "eth0")
        brought.announce()
        assert lifetimes(ip) == [(1 << 32) - 1]
        brought.announce()
        brought.undo()
        assert lifetimes(ip) == []


def test_other_addresses_and_routes_stay(net: Net) -> None:
    """Without the first address of a subnet the kernel drops the others, and the routes that lead
    through it.
    """
    for device in ("all", "eth0"):
        setting = f"net.ipv4.conf.{device}.promote_secondaries=0"
        subprocess.run(
            ["ip", "netns", "exec", f"{net.token}-1", "sysctl", "-qw", setting],
            check=True,
            timeout=60,
        )
    net.ip(1, "route", "add", "default", "via", "10.9.0.3")
    net.ip(1, "route", "add", "10.88.0.0/16", "via", "10.9.0.3", "src", "10.9.0.50", "metric", "7")
    net.ip(1, "route", "add", "10.77.0.0/16", "via", "10.9.0.3", "src", "10.9.0.1")
    before, others = net.addresses(1), net.routes(1)
    held = addresses.take("10.9.0.1", net.fd(1))
    assert net.addresses(1) == before - {"10.9.0.1/24"}
    assert {route.split()[0] for route in net.routes(1)} == {
        "default",
        "10.88.0.0/16",
        "10.9.0.0/24",
    }
    held.put_back()
    assert net.addresses(1) == before
    assert [r for r in net.routes(1) if not r.startswith("10.9.0.0/24")] == [
        r for r in others if not r.startswith("10.9.0.0/24")
    ]


def test_the_only_address_takes_all_routes_along_and_brings_them_back(net: Net) -> None:
    net.ip(2, "route", "add", "default", "via", "10.9.0.3")
    before = net.routes(2)
    held = addresses.take("10.9.0.2", net.fd(2))
    assert net.routes(2) == []
    addresses.HeldAddress.from_dict(held.to_dict(), net.fd(2)).put_back()
    assert net.routes(2) == before


def test_a_label_and_flags_come_back(net: Net) -> None:
    net.ip(
        1,
        "address",
        "add",
        "10.9.0.60/24",
        "dev",
        "eth0",
        "label",
        "eth0:db",
        "broadcast",
        "10.9.0.255",
        "noprefixroute",
    )

    def found() -> Any:
        return next(
            a
            for a in net.ip(1, "address", "show", "dev", "eth0")[0]["addr_info"]
            if a["local"] == "10.9.0.60"
        )

    before = found()
    addresses.take("10.9.0.60", net.fd(1)).put_back()
    assert found() == before


def test_the_device_is_that_of_the_subnet_or_of_the_default_route(net: Net) -> None:
    net.ip(2, "link", "add", "other", "type", "bridge")
    net.ip(2, "link", "set", "other", "up")
    assert address_choice.choose_device(MOVES, None, net.fd(2)) == ("eth0", 24)
    assert address_choice.choose_device(MOVES, "other", net.fd(2)) == ("other", 32)
    with pytest.raises(NotFound) as nowhere:
        address_choice.choose_device("192.0.2.1", None, net.fd(2))
    assert "192.0.2.1@DEVICE" in nowhere.value.hint
    with pytest.raises(NotFound, match="eth7"):
        address_choice.choose_device(MOVES, "eth7", net.fd(2))
    net.ip(2, "route", "add", "default", "via", "10.9.0.3")
    assert address_choice.choose_device("192.0.2.1", None, net.fd(2)) == ("eth0", 32)
    assert address_choice.choose_device("2001:db8::1", "eth0", net.fd(2)) == ("eth0", 128)


def test_what_cannot_be(net: Net) -> None:
    with pytest.raises(NotFound):
        addresses.take("10.9.0.99", net.fd(1))
    held = addresses.take(MOVES, net.fd(1))
    net.ip(2, "address", "add", f"{MOVES}/24", "dev", "eth0")
    with pytest.raises(Conflict):
        addresses.bring(MOVES, held.to_dict(), namespace=net.fd(2))
    net.ip(1, "link", "delete", "eth0")
    with pytest.raises(NotFound, match="gone"):
        held.put_back()


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "::1",
        "fe80::1",
        "host.example",
        "10.9.0.0/24",
        "224.0.0.1",
        "10.9.0.1@",
        "1.2.3.4@a/b",
    ],
)
def test_what_is_no_address_that_could_move(text: str) -> None:
    with pytest.raises(UsageError):
        address_choice.parse(text)
