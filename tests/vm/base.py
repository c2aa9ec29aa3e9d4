"""What every lab of machines has: their disks over one image, and criuctl, set up on each by the
same scripts/setup.

The image is Debian's packages and nothing else.  A machine that scripts/setup has prepared once is
kept next to it (``prepared``): later runs begin with it, and set up this checkout on the machines
again, which brings its criuctl and leaves the rest as it is.  The machines reach the package
mirrors through this one, as far as it does; nothing but the checkout is carried in.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from .machine import Failed, Machine, VmError, tree_of

PROJECT = Path(__file__).resolve().parents[2]
SETUP = 900.0  # seconds: packages come from mirrors, and the processor is emulated
CHECKOUT = "/root/criuctl"


class Base:
    """Machines while inside; nothing of them afterwards."""

    def __init__(self, folder: Path, image: Path, key: Path, prepared: Path, *, kvm: bool) -> None:
        self._folder, self._image, self._key, self._prepared, self._kvm = (
            folder,
            image,
            key,
            prepared,
            kvm,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.pull_plug()

    @property
    def machines(self) -> Sequence[Machine]:
        """All there are."""
        raise NotImplementedError

    def prepare(self) -> float | None:
        """Make the prepared disk, if there is none for this image and these scripts; the seconds
        that set-up took.
        """
        if self._prepared.exists():
            return None
        disk = self._overlay(self._prepared.with_suffix(".new"), self._image)
        machine = Machine("prepared", 9, self._folder, disk, self._key)
        try:
            machine.power_on("nobody", kvm=self._kvm)
            machine.wait_up()
            seconds = self.set_up(machine)
            # What makes a machine one of its own is made again by each that begins with this disk.
            machine.sh(
                f"rm -rf {CHECKOUT} /etc/ssh/ssh_host_* /var/lib/apt/lists/* /root/.cache; : "
                ">/etc/machine-id; sync"
            )
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
        """All machines up; the seconds until then."""
        raise NotImplementedError

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
        machine.feed(
            f"rm -rf {CHECKOUT}; mkdir {CHECKOUT} && tar -xz -C {CHECKOUT}", packed.getvalue()
        )
        return machine.start(f"cd {CHECKOUT} && scripts/setup")

    def finish_set_up(self, machine: Machine, process: subprocess.Popen[str], began: float) -> str:
        """Wait for it; what it said."""
        try:
            out, err = process.communicate(timeout=max(1.0, began + SETUP - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise VmError(
                f"{machine.name}: scripts/setup did not end in {SETUP:.0f} s: "
                f"{process.communicate()}"
            ) from None
        if process.returncode != 0:
            raise Failed(f"{machine.name}: scripts/setup", process.returncode, out, err)
        return out

    def _overlay(self, disk: Path, base: Path) -> Path:
        disk.unlink(missing_ok=True)
        argv = [
            "qemu-img",
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            str(base),
            str(disk),
        ]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise VmError(f"{shlex.join(argv)}: {made.stderr}")
        return disk
