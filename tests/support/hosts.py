"""The fixture `hosts`: two hosts, ``hosts.a`` and ``hosts.b``, and a third one when a test asks for
it, made for this one test.

What a host is stands in ``hosts_lab``.  Making two takes half a second or so; they end with the
test, however it ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_lab import init, sshd
from hosts_lab.bridge import Bridge
from hosts_lab.host import PROJECT, WRAPPER, Host

ADDRESSES = {f"host-{letter}": f"10.77.31.{number}" for number, letter in enumerate("abc", 1)}
# hosts that have been up for different times
FIRST_PIDS = {"host-a": 300, "host-b": 20_000, "host-c": 10_000}


class Hosts:
    """A lab with its hosts."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-m", "hosts_lab.supervisor", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=PROJECT / "tests",
                env={"PATH": init.PATH, "LANG": "C.UTF-8"},
            )
        self.supervisor_pid = self._process.pid
        self.wire = Bridge(self._process.pid)
        self._made: dict[str, Host] = {}
        with tempfile.TemporaryDirectory(prefix="hosts-keys-") as folder:
            self._user = (
                sshd.make_key(Path(folder, "user"), "root of the lab"),
                Path(folder, "user").read_text(),
            )
            self._keys = {
                name: (sshd.make_key(Path(folder, name), name), Path(folder, name).read_text())
                for name in ADDRESSES
            }

    @property
    def a(self) -> Host:
        return self._host("host-a")

    @property
    def b(self) -> Host:
        return self._host("host-b")

    @property
    def c(self) -> Host:
        """A host outside of what is migrated: a store, a database, a client."""
        return self._host("host-c")

    def cut(self, one: Host, other: Host) -> None:
        """Let every packet between two hosts vanish, silently."""
        self.wire.cut(one.name, other.name)

    def mend(self) -> None:
        """Undo every `cut`."""
        self.wire.mend()

    def slow(self, *, rate: str = "", loss: float = 0.0, delay: float = 0.0) -> None:
        """Limit what the wires of the hosts carry: ``100mbit``; the part of frames that is lost;
        seconds on each host's wire.
        """
        self.wire.slow(list(self._made), rate, loss, delay)

    def fast(self) -> None:
        """Undo `slow`."""
        self.wire.fast()

    def lose(self, host: Host) -> None:
        """The power of a host goes, and with it its disk; asked for again, a new host has its name
        and address.
        """
        del self._made[host.name]
        self._ask({"end": host.name})

    def close(self) -> None:
        """Everything is gone afterwards."""
        self.wire.fast()
        self._requests.close()
        assert self._process.wait(120) == 0

    def _host(self, name: str) -> Host:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Host:
        prefixes = [os.environ.get("CRIUCTL_CRIU", ""), "/opt/criuctl"]
        keep = {str(PROJECT), sys.prefix, sys.base_prefix, *filter(os.path.isdir, prefixes)}
        plan = {
            "name": name,
            "address": ADDRESSES[name],
            # one that comes in another's place is found where that one was
            "mac": f"02:00:00:00:31:0{ADDRESSES[name][-1]}",
            "addresses": ADDRESSES,
            "first_pid": FIRST_PIDS[name],
            "keep": sorted(keep),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            answer = self._ask({"make": plan}, theirs.fileno())
        ours.settimeout(60)
        assert ours.recv(100) == b'{"ready": true}', (
            f"{name} did not come up; see the standard error of the tests"
        )
        host = Host(name, ADDRESSES[name], answer["pid"], ours)
        self._furnish(host)
        host.sshd = host.spawn(sshd.ARGV, stderr="/var/log/sshd.log")
        host.wait_listening(22)
        return host

    def _furnish(self, host: Host) -> None:
        """Write the files that make it a host to log in to, with criuctl installed."""
        public, private = self._user
        keys = {name: key for name, (key, _) in self._keys.items()}
        if os.environ.get("CRIUCTL_CRIU"):
            host.env["CRIUCTL_CRIU"] = os.environ["CRIUCTL_CRIU"]
        files = {
            "/etc/ssh/ssh_host_ed25519_key": (self._keys[host.name][1], 0o600),
            "/etc/ssh/sshd_config": (sshd.CONFIG.format(address=host.address), 0o644),
            "/root/.ssh/authorized_keys": (public, 0o600),
            "/root/.ssh/id_ed25519": (private, 0o600),
            "/root/.ssh/known_hosts": (sshd.known_hosts(keys, ADDRESSES), 0o600),
            "/root/.ssh/config": (sshd.CLIENT, 0o600),
            "/usr/local/bin/criuctl": (WRAPPER, 0o755),
        }
        host.path("/run/sshd").mkdir(mode=0o755)
        host.path("/root/.ssh").mkdir(mode=0o700)
        for name, (text, mode) in files.items():
            path = host.path(name)
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(mode)

    def _ask(self, request: dict[str, object], *fds: int) -> dict[str, int]:
        socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
        data = self._requests.recv(init.MAX_REQUEST)
        assert data, "the supervisor of the hosts has ended; see the standard error of the tests"
        answer: dict[str, int] = json.loads(data)
        assert "error" not in answer, answer
        return answer


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A lab for this test alone."""
    hosts = Hosts()
    try:
        yield hosts
    finally:
        hosts.close()
