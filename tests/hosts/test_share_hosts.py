"""A session shared by way of another host: over wires that are cut, a restore, and a migration."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from hosts_lab.host import Host
from pexpect import fdpexpect
from support.hosts import Hosts
from support.keeper import Launched, wait_until

pytestmark = pytest.mark.integration

TIMEOUT = 120  # seconds for what takes a few


class Guest:
    """A guest at a terminal of a host."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(self._master, (31, 99))
        self.process: Launched = host.spawn(
            ["criuctl", "attach", *arguments], stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.sees = fdpexpect.fdspawn(self._master, timeout=TIMEOUT)

    def says(self, number: int) -> None:
        """Type what makes the shell print a number that was not typed, and wait for it."""
        os.write(self._master, f"echo said-$(({number}*2))\r".encode())
        self.sees.expect(rf"said-{2 * number}\b".encode())

    def close(self) -> None:
        self.process.kill()
        os.close(self._master)


@pytest.fixture
def guests() -> Iterator[list[Guest]]:
    """Those that the test opens."""
    guests: list[Guest] = []
    yield guests
    for guest in guests:
        guest.close()


def _shared(hosts: Hosts) -> dict[str, Any]:
    hosts.a.criuctl("run", "-d", "--name", "work", "--", "bash", "--norc", "--noprofile")
    made: dict[str, Any] = hosts.a.criuctl(
        "share", "work", "--via", hosts.b.ssh_url, "--role", "write"
    )
    assert made["reachable"]
    return made


def _share(hosts: Hosts) -> dict[str, Any]:
    (share,) = hosts.a.criuctl("share", "list")
    return dict(share)


@pytest.mark.slow
def test_after_a_silent_drop_the_address_is_the_same(hosts: Hosts, guests: list[Guest]) -> None:
    made = _shared(hosts)
    guests.append(guest := Guest(hosts.c, made["invitation"]))
    guest.says(21)
    hosts.cut(hosts.a, hosts.b)
    wait_until(lambda: _share(hosts)["state"] == "connecting", TIMEOUT, "the drop is noticed")
    port = int(made["address"].rpartition(":")[2])
    wait_until(lambda: not hosts.b.listening(port), TIMEOUT, "the relay lets the port go")
    hosts.mend()
    wait_until(lambda: _share(hosts)["state"] == "up", TIMEOUT, "the tunnel is back")
    wait_until(lambda: _share(hosts)["guest"] == "here", TIMEOUT, "the guest is back")
    assert _share(hosts)["address"] == made["address"]
    guest.says(34)
    assert "share-" + made["id"] in str(hosts.a.criuctl("status", "work")["operators"])
    hosts.a.criuctl("share", "revoke", made["id"])
    assert guest.process.wait(TIMEOUT) == 10


def test_a_guest_logs_in_at_the_relay(hosts: Hosts, guests: list[Guest]) -> None:
    made = _shared(hosts)
    guests.append(guest := Guest(hosts.c, "--via", hosts.b.ssh_url, made["invitation"]))
    guest.says(21)
    hosts.a.criuctl("kill", "work")
    assert guest.process.wait(TIMEOUT) >= 128
    wait_until(lambda: _share(hosts)["state"] == "ended", TIMEOUT, "it ends with its session")
    assert _share(hosts)["why"] == "the session has ended"


def test_it_goes_on_after_a_restore_here_and_not_elsewhere(
    hosts: Hosts, guests: list[Guest]
) -> None:
    made = _shared(hosts)
    guests.append(guest := Guest(hosts.c, made["invitation"]))
    guest.says(21)
    hosts.a.criuctl("dump", "work")
    hosts.a.criuctl("restore", "work", "--detach")
    guest.says(34)
    assert _share(hosts)["state"] == "up"
    hosts.a.criuctl("migrate", "work", hosts.c.ssh_url)
    wait_until(lambda: _share(hosts)["state"] == "ended", TIMEOUT, "it ends with the migration")
    assert _share(hosts)["why"] == "the session has moved to host-c; share it there"
    assert guest.process.wait(TIMEOUT) != 0
