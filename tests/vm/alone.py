"""One machine, ``sigma``: for what needs systemd, logins and a reboot, and no second host."""

from __future__ import annotations

import time
from pathlib import Path

from .base import Base
from .machine import Machine

# Without it a login is no session of logind's; Debian's own installations have it.
LOGINS = "libpam-systemd"
INSTALL = (
    "apt-get -qq -o Acquire::Check-Valid-Until=false update && apt-get -qq install -y "
    f"--no-install-recommends {LOGINS}"
)
PATIENCE = 600.0


class Alone(Base):
    """The machine while inside; nothing of it afterwards."""

    def __init__(self, folder: Path, image: Path, key: Path, prepared: Path, *, kvm: bool) -> None:
        super().__init__(folder, image, key, prepared, kvm=kvm)
        self.sigma = Machine("sigma", 1, folder, folder / "sigma.qcow2", key)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All there are."""
        return (self.sigma,)

    def boot(self) -> float:
        """It is up, with its name; the seconds until then."""
        began = time.monotonic()
        self._overlay(self._folder / "sigma.qcow2", self._prepared)
        self.power_on()
        self.sigma.write("/etc/hosts", "127.0.0.1 localhost sigma\n")
        self.sigma.sh("echo sigma >/etc/hostname && hostname sigma && sync")
        return time.monotonic() - began

    def power_on(self) -> float:
        """At first, and again after a reboot or a power cut; the seconds until it is up."""
        self.sigma.power_on("nobody", kvm=self._kvm)
        return self.sigma.wait_up()

    def install_logins(self) -> None:
        """What makes a login a session of logind's, with a new connection of ours that is none: it
        is not to be ended.
        """
        self.sigma.sh(
            f"export DEBIAN_FRONTEND=noninteractive; dpkg -s {LOGINS} "
            f">/dev/null 2>&1 || {{ {INSTALL}; }}",
            timeout=PATIENCE,
        )
