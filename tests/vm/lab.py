"""The two machines: their disks over one image, their wire, and criuctl, set up on each by the same
scripts/setup (`base`).
"""

from __future__ import annotations

import time
from pathlib import Path

from .base import Base
from .machine import Machine

# The cable hangs on a bridge, for a third host can be put on it without a third machine: a network
# namespace with a client in it.
NETWORK = {
    "10-bridge.netdev": "[NetDev]\nName=wire\nKind=bridge\n",
    "10-cable.network": "[Match]\nName=eth1\n[Network]\nBridge=wire\nIgnoreCarrierLoss=yes\n",
    "20-wire.network": "[Match]\nName=wire\n[Network]\nAddress={address}/24\n"
    "LinkLocalAddressing=no\nIPv6AcceptRA=no\nConfigureWithoutCarrier=yes\n"
    "IgnoreCarrierLoss=yes\n",
}
CLIENT = "Host alpha beta\n    User root\n    StrictHostKeyChecking accept-new\n"
GAMMA = "10.77.0.3"


class Lab(Base):
    """Two machines while inside; nothing of them afterwards."""

    def __init__(self, folder: Path, image: Path, key: Path, prepared: Path, *, kvm: bool) -> None:
        super().__init__(folder, image, key, prepared, kvm=kvm)
        self.alpha = Machine("alpha", 1, folder, folder / "alpha.qcow2", key)
        self.beta = Machine("beta", 2, folder, folder / "beta.qcow2", key)

    @property
    def both(self) -> tuple[Machine, Machine]:
        return self.alpha, self.beta

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All there are."""
        return self.both

    def boot(self) -> float:
        """Both machines up, with names, addresses and a key to each other; the seconds until
        then.
        """
        began = time.monotonic()
        for machine in self.both:
            self._overlay(self._folder / f"{machine.name}.qcow2", self._prepared)
            self.power_on(machine)
        for machine in self.both:
            machine.wait_up()
            self._introduce(machine)
        for machine, other in (self.both, self.both[::-1]):
            self.wait_linked(machine)
            machine.sh(f"ssh {other.name} true; sync")
        return time.monotonic() - began

    def power_on(self, machine: Machine) -> None:
        """At first, and again after its plug was pulled."""
        peer = self.beta if machine is self.alpha else self.alpha
        machine.power_on(peer.name, kvm=self._kvm)

    def wait_linked(self, machine: Machine) -> None:
        """Wait until it reaches the other one."""
        other = self.beta if machine is self.alpha else self.alpha
        machine.sh(f"timeout 60 sh -c 'until ping -q -c 1 -W 1 {other.name}; do sleep 0.2; done'")

    def gamma(self) -> None:
        """A third host on the wire: a network namespace of beta's, behind its bridge."""
        self.beta.sh(
            "ip netns add gamma && ip link add g0 type veth peer name eth0 netns gamma && ip link "
            "set g0 master wire up"
            f" && ip -n gamma address add {GAMMA}/24 dev eth0 && ip -n gamma link set eth0 up && "
            "ip -n gamma link set lo up"
        )

    def _introduce(self, machine: Machine) -> None:
        """Its name, its address on the wire, and how it gets into the other one."""
        files = {
            f"/etc/systemd/network/{name}": (text.format(address=machine.address), "644")
            for name, text in NETWORK.items()
        }
        hosts = "".join(f"{each.address} {each.name}\n" for each in self.both)
        files |= {
            "/etc/hosts": (f"127.0.0.1 localhost\n{hosts}", "644"),
            "/root/.ssh/id_ed25519": (self._key.read_text(), "600"),
            "/root/.ssh/config": (CLIENT, "600"),
        }
        for path, (text, mode) in files.items():
            machine.write(path, text, mode)
        machine.sh(
            f"echo {machine.name} >/etc/hostname && hostname {machine.name} && networkctl reload "
            "&& networkctl up eth1 wire"
        )
