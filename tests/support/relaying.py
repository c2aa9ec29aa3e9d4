"""A relay: a real sshd on loopback with keys of the test's own, and what an evil one does between.

`Relay.between` puts a proxy in front of a share's port, which a test has look at the bytes, change
them, or keep them.
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from criuctl.share.invitation import Invitation

from .keeper import Launched, wait_until
from .operating import TIMEOUT, Operators

if TYPE_CHECKING:
    from criuctl.share.guest import Guest  # loads asyncssh

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
GatewayPorts {gateway}
{more}
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Relay:
    """An sshd, and the shares of one home that lead through it."""

    def __init__(self, operators: Operators, gateway: str = "clientspecified") -> None:
        self.operators, self._gateway = operators, gateway
        self.folder = operators.home.path / "relay"
        self.folder.mkdir(mode=0o700)
        self.port = free_port()
        self.url = f"ssh://root@127.0.0.1:{self.port}"
        self._daemons: list[Launched] = []
        self._proxies: list[Between] = []
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True, timeout=60, stdin=subprocess.DEVNULL)
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {key}\n")
        operators.extra["CRIUCTL_SSH_COMMAND"] = shlex.join(
            [
                *("ssh", "-F", "none", "-i", str(self.folder / "user")),
                *("-o", f"UserKnownHostsFile={self.folder / 'known'}"),
            ]
        )
        self.begin()

    def begin(self, more: str = "") -> None:
        """Start the sshd."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        config = self.folder / "config"
        config.write_text(
            _CONFIG.format(port=self.port, folder=self.folder, gateway=self._gateway, more=more)
        )
        with (self.folder / "log").open("ab") as log:
            self._daemons.append(
                self.operators.keeper.spawn(
                    ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)],
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                    stderr=log,
                )
            )

        def listens() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return True
            return False

        wait_until(listens, TIMEOUT, "the relay listens")

    def allow(self, options: str) -> None:
        """Limit the logins that begin from now on, as sshd(8) has it in authorized_keys."""
        key = (self.folder / "user.pub").read_text()
        (self.folder / "user.pub").write_text(f"{options} {key}")

    def end(self) -> None:
        """End the sshd; logins of before go on."""
        for daemon in self._daemons:
            daemon.kill(signal.SIGTERM)
            daemon.wait(TIMEOUT)

    def share(self, name: str, *options: str) -> dict[str, Any]:
        """Share a session: what ``--json`` prints."""
        made: dict[str, Any] = self.operators("share", name, "--via", self.url, *options)
        return made

    def of(self, made: dict[str, Any]) -> dict[str, Any]:
        """What ``share list`` has of this share."""
        (found,) = [one for one in self.operators("share", "list") if one["id"] == made["id"]]
        return dict(found)

    def between(
        self, made: dict[str, Any], change: Callable[[bytes, bool], bytes] | None = None
    ) -> Between:
        """A proxy to a share's port; see `Between`."""
        proxy = Between(int(made["address"].rpartition(":")[2]), made["invitation"], change)
        self._proxies.append(proxy)
        return proxy

    def close(self) -> None:
        """End shares, proxies and the sshd."""
        for one in self.operators("share", "list"):
            if one["state"] != "ended":
                self.operators("share", "revoke", one["id"])
        for proxy in self._proxies:
            proxy.close()
        self.end()


class Between:
    """What an evil relay does to connections: `change` gets each piece, and whether it comes from
    the guest, and returns what goes on.
    """

    def __init__(
        self, port: int, invitation: str, change: Callable[[bytes, bool], bytes] | None
    ) -> None:
        self._target = port
        self._change = change or (lambda data, _from_guest: data)
        self.from_guest, self.to_guest = bytearray(), bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        there = Invitation.parse(invitation)
        self.invitation = Invitation(
            "127.0.0.1", self.port, there.id, there.host_key, there.secret
        ).line()
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                host = socket.create_connection(("127.0.0.1", self._target))
                self._socks += [guest, host]
                for source, target, outward in ((guest, host, True), (host, guest, False)):
                    arguments = (source, target, outward)
                    threading.Thread(target=self._carry, args=arguments, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, outward: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                (self.from_guest if outward else self.to_guest).extend(data)
                target.sendall(self._change(data, outward))
        self._shut(source, target)

    def cut(self) -> None:
        """Cut every connection off."""
        self._shut(*self._socks)

    @staticmethod
    def _shut(*socks: socket.socket) -> None:
        for sock in socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        self._shut(self._listener)
        self._listener.close()
        self.cut()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def relay(operators: Operators) -> Iterator[Relay]:
    """A relay."""
    relay = Relay(operators)
    yield relay
    relay.close()


@pytest.fixture
def guests() -> Iterator[list[Guest]]:
    """Guests that the test makes; they leave before the relay ends."""
    guests: list[Guest] = []
    yield guests
    for guest in guests:
        guest.close()
