"""Files of file systems that the kernel fills (sysfs, control groups, tracefs, bpf, ...), open in a
tree.

They come and go with devices, drivers, control groups and settings of the kernel.  What is missing
here cannot be put back, and CRIU would fail half-way: a restore reports it before anything is
touched.  Files of /proc about processes are handled elsewhere (`criuctl.criu.procfiles`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ..checkpoint.manifest import Manifest
from ..criu.images import ImageSet, path_of
from ..criu.procfiles import about
from ..host.registry import boot_id
from ..proc.trustedpath import fs_type
from ..report import Finding

_PLACES = ("/proc/", "/sys/")
_SYSFS, _CGROUP, _CGROUP2 = 0x62656572, 0x27E0EB, 0x63677270  # f_type of statfs(2)
_KERNELS = {
    *(_SYSFS, _CGROUP, _CGROUP2),
    *(0x9FA0, 0x64626720, 0x74726163, 0xCAFE4A11),  # proc, debugfs, tracefs, bpf
    *(0x73636673, 0x62656570, 0xDE5E81E4),  # securityfs, configfs, efivarfs
    *(0xF97CFF8C, 0x43415D53, 0x6165676C),  # selinuxfs, smackfs, pstore
    *(0x42494E4D, 0x7655821, 0x65735543),  # binfmt_misc, resctrl, fusectl
}
_GROUPS = "/sys/fs/cgroup/"
_STATISTICS = frozenset(  # below /proc
    (
        *("cpuinfo", "diskstats", "filesystems", "interrupts", "loadavg", "mdstat", "meminfo"),
        *("partitions", "stat", "swaps", "uptime", "version", "vmstat", "zoneinfo"),
        *("pressure/cpu", "pressure/io", "pressure/memory"),
    )
)


def is_kernels(fd: int) -> bool:
    """Return whether a file is on a file system that the kernel fills."""
    return fs_type(fd) in _KERNELS


def is_harmless(path: str, fd: int, access: int) -> bool:
    """Return whether such a file says the same whatever the rights of the process that has opened
    it: a setting, a number or a statistic that is read.
    """
    numbers = path.removeprefix("/proc/") in _STATISTICS
    return access == os.R_OK and (numbers or fs_type(fd) in (_SYSFS, _CGROUP, _CGROUP2))


def missing(images: ImageSet, manifest: Manifest, *, copy: bool) -> Iterator[Finding]:
    """Report those that the tree has open and that do not exist here."""
    if manifest.namespaces.get("mnt", {}).get("mode", "host") != "host":
        return  # what the tree will see is not known beforehand
    reported: set[str] = set()
    holders = images.holders()
    at_home = manifest.host.boot_id == boot_id() and not copy
    own = {group for p in manifest.processes for group in p.cgroups.values() if group != "/"}
    for entry in images.files():
        path = path_of(entry.reg) if entry.HasField("reg") else ""
        if not path.startswith(_PLACES) or path in reported or about(path) or os.path.lexists(path):
            continue
        reported.add(path)
        if at_home and path.startswith(_GROUPS) and any(f"{group}/" in f"{path}/" for group in own):
            continue  # made again before CRIU opens anything
        pid, fd = next(iter(holders.get(entry.id, ())), (None, None))
        yield Finding(
            "error",
            "kernel-file-missing",
            f"{path}: is open, and is not here",
            _hint(path),
            pid,
            fd,
        )


def _hint(path: str) -> str:
    """Return how it can be made to exist again."""
    if path.startswith(_GROUPS):
        folder = path if os.path.basename(path).find(".") < 0 else os.path.dirname(path)
        return f"Make the control group again: `mkdir -p {shlex.quote(folder)}`."
    if path.startswith("/sys/kernel/"):
        return (
            "Mount that file system, or make the object that it belongs to (a trace instance, for "
            "example), as it was at the dump."
        )
    return (
        "Load the driver, or add the device or interface that it belongs to, under the same name."
    )
