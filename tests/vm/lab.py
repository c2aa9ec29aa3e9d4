"""The two machines: their disks over one image, their wire, and criuctl, set up on each by the same scripts/setup.

The image is Debian's packages and nothing else.  A machine that scripts/setup has prepared once is kept beside it (``prepared``):
later runs begin with it, and set up this checkout on both machines again, which brings its criuctl and leaves the rest as it is.
The machines reach the package mirrors through this one, as far as it does; nothing but the checkout is carried in.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Self

from .machine import Failed, Machine, VmError, tree_of

PROJECT = Path(__file__).resolve().parents[2]
SETUP = 900.0  # seconds: packages come from mirrors, and the processor is emulated
CHECKOUT = "/root/criuctl"
# The cable hangs on a bridge, for a third host can be put on it without a third machine: a network namespace with a client in it.
NETWORK = {
    "10-bridge.netdev": "[NetDev]\nName=wire\nKind=bridge\n",
    "10-cable.network": "[Match]\nName=eth1\n[Network]\nBridge=wire\nIgnoreCarrierLoss=yes\n",
    "20-wire.network": "[Match]\nName=wire\n[Network]\nAddress={address}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    "ConfigureWithoutCarrier=yes\nIgnoreCarrierLoss=yes\n",
}
CLIENT = "Host alpha beta\n    User root\n    StrictHostKeyChecking accept-new\n"
GAMMA = "10.77.0.3"


class Lab:
    """Two machines while inside; nothing of them afterwards."""

    def __init__(self, folder: Path, image: Path, key: Path, prepared: Path, *, kvm: bool) -> None:
        self._folder, self._image, self._key, self._prepared, self._kvm = folder, image, key, prepared, kvm
        self.alpha = Machine("alpha", 1, folder, folder / "alpha.qcow2", key)
        self.beta = Machine("beta", 2, folder, folder / "beta.qcow2", key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.both:
            machine.pull_plug()

    @property
    def both(self) -> tuple[Machine, Machine]:
        return self.alpha, self.beta

    def prepare(self) -> float | None:
        """Make the prepared disk, if there is none for this image and these scripts; the seconds that set-up took."""
        if self._prepared.exists():
            return None
        disk = self._overlay(self._prepared.with_suffix(".new"), self._image)
        machine = Machine("prepared", 9, self._folder, disk, self._key)
        try:
            machine.power_on("nobody", kvm=self._kvm)
            machine.wait_up()
            seconds = self.set_up(machine)
            # What makes a machine one of its own is made anew by each that begins with this disk.
            machine.sh(f"rm -rf {CHECKOUT} /etc/ssh/ssh_host_* /var/lib/apt/lists/* /root/.cache; : >/etc/machine-id; sync")
        except BaseException:
            machine.pull_plug()
            disk.unlink(missing_ok=True)
            raise
        machine.pull_plug()
        for other in self._prepared.parent.glob("prepared-*.qcow2"):
            other.unlink()
        disk.rename(self._prepared)
        return seconds

    def boot(self) -> float:
        """Both machines up, with names, addresses and a key to each other; the seconds until then."""
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

    def set_up(self, machine: Machine) -> float:
        """This checkout on a machine, and scripts/setup there; the seconds that it took."""
        began = time.monotonic()
        self.finish_set_up(machine, self.begin_set_up(machine), began)
        return time.monotonic() - began

    def begin_set_up(self, machine: Machine) -> subprocess.Popen[str]:
        """Start what `finish_set_up` waits for."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for name in tree_of(PROJECT):
                archive.add(PROJECT / name, name, recursive=False)
        machine.feed(f"rm -rf {CHECKOUT}; mkdir {CHECKOUT} && tar -xz -C {CHECKOUT}", packed.getvalue())
        return machine.start(f"cd {CHECKOUT} && scripts/setup")

    def finish_set_up(self, machine: Machine, process: subprocess.Popen[str], began: float) -> str:
        """Wait for it; what it said."""
        try:
            out, err = process.communicate(timeout=max(1.0, began + SETUP - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise VmError(f"{machine.name}: scripts/setup did not end in {SETUP:.0f} s: {process.communicate()}") from None
        if process.returncode != 0:
            raise Failed(f"{machine.name}: scripts/setup", process.returncode, out, err)
        return out

    def gamma(self) -> None:
        """A third host on the wire: a network namespace of beta's, behind its bridge."""
        self.beta.sh(
            "ip netns add gamma && ip link add g0 type veth peer name eth0 netns gamma && ip link set g0 master wire up"
            f" && ip -n gamma address add {GAMMA}/24 dev eth0 && ip -n gamma link set eth0 up && ip -n gamma link set lo up"
        )

    def _introduce(self, machine: Machine) -> None:
        """Its name, its address on the wire, and how it gets into the other one."""
        files = {f"/etc/systemd/network/{name}": (text.format(address=machine.address), "644") for name, text in NETWORK.items()}
        hosts = "".join(f"{each.address} {each.name}\n" for each in self.both)
        files |= {
            "/etc/hosts": (f"127.0.0.1 localhost\n{hosts}", "644"),
            "/root/.ssh/id_ed25519": (self._key.read_text(), "600"),
            "/root/.ssh/config": (CLIENT, "600"),
        }
        for path, (text, mode) in files.items():
            machine.write(path, text, mode)
        machine.sh(
            f"echo {machine.name} >/etc/hostname && hostname {machine.name} && networkctl reload && networkctl up eth1 wire"
        )

    def _overlay(self, disk: Path, base: Path) -> Path:
        disk.unlink(missing_ok=True)
        argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(disk)]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise VmError(f"{shlex.join(argv)}: {made.stderr}")
        return disk
