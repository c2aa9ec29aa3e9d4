"""The file system of a host: this machine's root under an overlay in memory, and what every host
has for itself.

Runs as PID 1 of the host, in a mount namespace that is a copy of this machine's.  The staging place
is ``/sys``, which is on every machine and which nothing needs until the host has one of its own:
nothing is made on this machine's disk.

Invariants: no mount of the host is seen outside, and none of this machine's is changed.  What holds
a user's secrets or state (``/root``, ``/etc/criuctl``, ``/run``, ...) is empty in the host.  The
checkout under test and its Python are where they always are.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from . import kernel

STAGE = "/sys"
# Folder -> options of the tmpfs that a host has there.
OWN = {
    "/tmp": "mode=1777",
    "/run": "mode=0755",
    "/dev/shm": "mode=1777",
    "/var/tmp": "mode=1777",
    "/root": "mode=0700",
    "/etc/criuctl": "mode=0755",
    "/var/lib/criuctl": "mode=0700",
    "/var/cache/criuctl": "mode=0700",
}


@dataclass(frozen=True)
class Hierarchy:
    """A mount of control groups on this machine."""

    path: str
    kind: str  # cgroup2, or cgroup: one hierarchy of version 1
    options: str  # the controllers of a hierarchy of version 1


def hierarchies() -> list[Hierarchy]:
    """The control group file systems of this machine that a session's freezer may be in."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            kind, _source, options = rest.split()[:3]
            if kind in ("cgroup", "cgroup2"):
                own = [option for option in options.split(",") if option not in ("rw", "ro")]
                if kind == "cgroup2" or "freezer" in own:
                    found.append(
                        Hierarchy(
                            fields.split()[4], kind, ",".join(own) if kind == "cgroup" else ""
                        )
                    )
    return found


def build(name: str, addresses: dict[str, str], keep: Sequence[str]) -> None:
    """Make the host's root and go there; `keep` are the folders that are to be where they are on
    this machine.
    """
    groups = hierarchies()
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("stage", STAGE, "tmpfs", options="mode=0755")
    new = f"{STAGE}/root"
    for folder in ("upper", "work", "root"):
        os.mkdir(f"{STAGE}/{folder}")
    kernel.mount(
        f"root-of-{name}",
        new,
        "overlay",
        options=f"lowerdir=/,upperdir={STAGE}/upper,workdir={STAGE}/work",
    )
    _system(new, groups)
    for folder, options in OWN.items():
        os.makedirs(new + folder, exist_ok=True)
        kernel.mount("own", new + folder, "tmpfs", options=options)
    for folder in keep:
        if _hidden(folder):
            os.makedirs(new + folder, exist_ok=True)
            kernel.mount(folder, new + folder, flags=kernel.MS_BIND)
    _identity(new, name, addresses)
    os.mkdir(f"{new}/tmp/.old")
    os.chdir(new)
    kernel.pivot_root(".", "tmp/.old")
    os.chdir("/")
    kernel.detach("/tmp/.old")
    os.rmdir("/tmp/.old")


def _hidden(folder: str) -> bool:
    """Whether the overlay, or a tmpfs upon it, shows something else there than this machine's
    folder.
    """
    return os.stat(folder).st_dev != os.stat("/").st_dev or any(
        folder.startswith(own + "/") for own in OWN
    )


def _system(new: str, groups: Sequence[Hierarchy]) -> None:
    kernel.mount("proc", f"{new}/proc", "proc")
    kernel.mount("sysfs", f"{new}/sys", "sysfs")
    kernel.mount("/dev", f"{new}/dev", flags=kernel.MS_BIND)
    kernel.mount(
        "devpts", f"{new}/dev/pts", "devpts", options="newinstance,ptmxmode=0666,mode=0620,gid=5"
    )
    if any(group.path != "/sys/fs/cgroup" for group in groups):
        kernel.mount("cgroups", f"{new}/sys/fs/cgroup", "tmpfs", options="mode=0755")
    for group in groups:
        os.makedirs(new + group.path, exist_ok=True)
        kernel.mount("cgroup", new + group.path, group.kind, options=group.options)


def _identity(new: str, name: str, addresses: dict[str, str]) -> None:
    machine, boot = uuid.uuid4().hex, str(uuid.uuid4())
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost",
        *(f"{address} {other}" for other, address in addresses.items()),
    ]
    for path, text in {
        "/etc/hostname": name,
        "/etc/machine-id": machine,
        "/etc/hosts": "\n".join(lines),
    }.items():
        if os.path.lexists(new + path):
            os.unlink(new + path)
        with open(new + path, "w") as file:
            file.write(text + "\n")
    with open(f"{STAGE}/boot_id", "w") as file:
        file.write(boot + "\n")
    kernel.mount(f"{STAGE}/boot_id", f"{new}/proc/sys/kernel/random/boot_id", flags=kernel.MS_BIND)
