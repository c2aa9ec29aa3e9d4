"""Find the processes of a tree that use an NVIDIA device, from their descriptors and mappings.

Seen with driver 580 (`scripts/gpu-test`): every process that has initialised CUDA or NVML holds
``/dev/nvidiactl``, ``/dev/nvidiaN`` and ``/dev/nvidia-uvm`` open, and one with a context maps them.
Each context maps one range of 2 MiB of ``/dev/nvidia-uvm``; managed memory adds larger or further
ones. A child that was forked afterwards has its parent's descriptors and most of its mappings, and
no context: CUDA cannot be used after a fork.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ..proc.descriptors import Descriptor
from ..proc.mappings import Mapping as MemoryMapping

_PREFIX = "/dev/nvidia"
_UVM = "/dev/nvidia-uvm"
_UVM_BASE = 2 << 20  # bytes that each context maps of it
_INJECTED = ("libcuda-injection", "libcudadebugger", "libTreeLauncherTargetInjection")


class DeviceUser(Struct, frozen=True):
    """What one process holds of NVIDIA's devices."""

    pid: int
    opened: tuple[Descriptor, ...]
    mapped: tuple[MemoryMapping, ...]
    injected: str = ""  # a library that a debugger or profiler has loaded into it

    @property
    def managed(self) -> int:
        """Bytes of managed memory, estimated: more than one range, or a large one."""
        ranges = [m.size for m in self.mapped if m.path.startswith(_UVM)]
        devices = {d.rdev for d in self.opened if d.target[len(_PREFIX) :].isdigit()}
        more = sum(size for size in ranges if size != _UVM_BASE)
        more += _UVM_BASE * max(0, ranges.count(_UVM_BASE) - max(1, len(devices)))
        return more


def is_device(path: str) -> bool:
    """Return whether the path is that of a node of NVIDIA's driver."""
    return path.startswith(_PREFIX)


def opened_device(descriptor: Descriptor) -> bool:
    """Return whether the descriptor is one of NVIDIA's devices.

    It must be a character device, which only root can make.
    """
    return stat.S_ISCHR(descriptor.mode) and is_device(descriptor.target)


def users(
    opened: Mapping[int, Iterable[Descriptor]], mapped: Mapping[int, Sequence[MemoryMapping]]
) -> dict[int, DeviceUser]:
    """Return PID -> its holdings, for the processes that have any."""
    found = {}
    for pid, held in opened.items():
        devices = tuple(d for d in held if opened_device(d))
        ranges = tuple(m for m in mapped.get(pid, ()) if is_device(m.path))
        if devices or ranges:
            names = {os.path.basename(m.path) for m in mapped.get(pid, ()) if ".so" in m.path}
            injected = next((n for n in sorted(names) if n.startswith(_INJECTED)), "")
            found[pid] = DeviceUser(pid, devices, ranges, injected)
    return found
