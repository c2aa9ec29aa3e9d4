"""``migrate --keep-address``: addresses move along with their established connections, and the
peers notice nothing.

A server on two more addresses of host A answers two clients on host C, each over one connection
that is never opened again.  A client counts; the server, whose memory of the count is its own, adds
it up: a lost, repeated or reset exchange shows at once.
"""

from __future__ import annotations

import sys

import pytest
from hosts_lab.pauses import pausing
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

SECONDS = 60
ADDRESSES = ("10.77.31.50", "fd31::50")
SERVER = """
import socket, sys, threading
def serve(listener):
    connection, _ = listener.accept()
    file, total = connection.makefile('rw'), 0
    for line in file:
        total += int(line)
        file.write(f'{total}\\n'); file.flush()
families = {True: socket.AF_INET6, False: socket.AF_INET}
for address in sys.argv[1:]:
    family = families[':' in address]
    threading.Thread(
        target=serve, args=(socket.create_server((address, 7000), family=family),)
    ).start()
"""
CLIENT = """
import socket, sys, time
file, total = socket.create_connection((sys.argv[1], 7000), 60).makefile('rw'), 0
for number in range(1, 1 << 30):
    file.write(f'{number}\\n'); file.flush()
    total += number
    assert int(file.readline()) == total
    with open('/tmp/counted-' + sys.argv[1], 'w') as counted: counted.write(str(number))
    time.sleep(0.01)
"""


class Talk:
    """A server on host A at `ADDRESSES`, and its clients on host C."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        device = hosts.a.sh("ip -o -4 address show scope global | awk '{print $2; exit}'").strip()
        for number, host in enumerate((hosts.a, hosts.b, hosts.c), 1):
            host.sh(f"ip address add fd31::{number}/64 dev {device} nodad")
        hosts.a.sh(
            f"ip address add {ADDRESSES[0]}/24 dev {device}; ip address add {ADDRESSES[1]}/64 "
            "dev "
            f"{device} nodad"
        )
        server = hosts.a.spawn([sys.executable, "-S", "-c", SERVER, *ADDRESSES])
        self.pid = hosts.a.inner_pid(server.pid)
        hosts.a.sh(
            "until [ $(ss -Hltn | grep -c :7000) = 2 ]; do sleep 0.05; done", timeout=SECONDS
        )
        client = [sys.executable, "-S", "-c", CLIENT]
        self.clients = {
            a: hosts.c.spawn([*client, a], stderr="/tmp/client-errors") for a in ADDRESSES
        }
        self.more()

    def counted(self, address: str) -> int:
        """How many numbers a client has had answered."""
        path = self.hosts.c.path(f"/tmp/counted-{address}")
        text = path.read_text() if path.exists() else ""
        return int(text or 0)

    def more(self) -> None:
        """The talks go on, on the same connections."""
        for address in ADDRESSES:
            self._more(address, self.counted(address) + 20)

    def _more(self, address: str, enough: int) -> None:
        client = self.clients[address]
        wait_until(
            lambda: self.counted(address) > enough or not client.alive(),
            SECONDS,
            f"{address} answers",
        )
        assert client.alive(), self.hosts.c.path("/tmp/client-errors").read_text()

    def at(self) -> list[tuple[str, str]]:
        """Which host has which of the addresses."""
        listed = [
            (host.name, host.sh("ip -o address show")) for host in (self.hosts.a, self.hosts.b)
        ]
        return [
            (name, address)
            for name, text in listed
            for address in ADDRESSES
            if f" {address}/" in text
        ]


def test_peers_notice_nothing(hosts: Hosts) -> None:
    talk = Talk(hosts)
    keep = [word for address in ADDRESSES for word in ("--keep-address", address)]
    report = hosts.a.criuctl("migrate", talk.pid, hosts.b.ssh_url, "--name", "talk", *keep)
    assert [c["outcome"] for c in report["connections"]] == ["kept", "kept"]
    talk.more()
    assert talk.at() == [("host-b", address) for address in ADDRESSES]
    hosts.b.criuctl("migrate", "talk", hosts.a.ssh_url, *keep)
    talk.more()
    assert talk.at() == [("host-a", address) for address in ADDRESSES]


def test_what_fails_leaves_the_addresses_where_they_were(hosts: Hosts) -> None:
    """Refused before the freeze, if it can be known; a receiver that is killed takes its claim to
    them with it.
    """
    talk = Talk(hosts)
    stays = [("host-a", address) for address in ADDRESSES]
    keep = [word for address in ADDRESSES for word in ("--keep-address", address)]
    hosts.b.sh(f"ip address add {ADDRESSES[0]}/32 dev lo")
    answer = hosts.a.criuctl("migrate", talk.pid, hosts.b.ssh_url, *keep, check=False)
    assert answer["exit_code"] == 4, answer
    assert ADDRESSES[0] in answer["error"]["message"]
    hosts.b.sh(f"ip address delete {ADDRESSES[0]}/32 dev lo")
    answer = hosts.a.criuctl(
        "migrate", talk.pid, hosts.b.ssh_url, "--keep-address", "10.77.31.51", check=False
    )
    assert answer["exit_code"] == 3, answer
    assert talk.at() == stays
    talk.more()
    with pausing(hosts.b, "held", command="receive") as pause:
        command = hosts.a.start_criuctl("migrate", talk.pid, hosts.b.ssh_url, *keep)
        pause.wait(command)
        assert talk.at() == [("host-b", address) for address in ADDRESSES]
        hosts.b.kill("criuctl", "receive")
    assert command.process.wait(SECONDS) != 0
    assert stays == [had for had in talk.at() if had[0] == "host-a"]
    claimed = [
        line
        for line in hosts.b.sh("ip -o address show").splitlines()
        if any(f" {a}/" in line for a in ADDRESSES)
    ]
    assert all(" dynamic " in line for line in claimed), "the kernel takes them away by itself"
    talk.more()
