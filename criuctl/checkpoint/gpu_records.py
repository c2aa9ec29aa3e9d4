"""The records of NVIDIA GPUs: the devices of the dump's host, and the processes that used them.

A manifest that holds a `GpuRecord` requires the feature `GPU`, so that a criuctl without GPU
support refuses it. Before the dump the driver moved the device memory into the processes' own
memory; the restore has it moved back (`criuctl.gpu`). PIDs and thread numbers are those of the
tree.
"""

from __future__ import annotations

import re

from .records import Record, check_pattern, check_range

_GPU = re.compile(r"GPU-[0-9a-f-]{1,64}")
_GPU_NODE = re.compile(r"/dev/nvidia[A-Za-z0-9/_-]{0,64}")
GPU = "nvidia-gpu"  # the feature of a manifest that has a `GpuRecord`


class GpuDevice(Record, frozen=True):
    """A GPU that the host of the dump had."""

    uuid: str
    name: str
    memory: int  # bytes
    capability: str  # compute capability: "9.0"

    def check(self, where: str) -> None:
        check_pattern(_GPU, self.uuid, f"{where}.uuid")
        check_range(self.memory, 0, 1 << 60, f"{where}.memory")


class GpuProcess(Record, frozen=True):
    """A process whose device memory the driver has moved into its ordinary memory; its own
    numbers.
    """

    pid: int
    thread: int  # which gives the device back
    memory: int = 0  # bytes on the device; 0 if unknown

    def check(self, where: str) -> None:
        for name in ("pid", "thread"):
            check_range(getattr(self, name), 1, 1 << 31, f"{where}.{name}")
        check_range(self.memory, 0, 1 << 60, f"{where}.memory")


class GpuDescriptor(Record, frozen=True):
    """A device that a process has open without using it: opened again by path after the restore."""

    pid: int  # its own number
    fd: int
    path: str
    flags: int = 0  # as of open(2)
    cloexec: bool = False

    def check(self, where: str) -> None:
        check_range(self.pid, 1, 1 << 31, f"{where}.pid")
        check_range(self.fd, 0, 1 << 31, f"{where}.fd")
        check_pattern(_GPU_NODE, self.path, f"{where}.path")


class GpuRecord(Record, frozen=True):
    """What a restore must know of the tree's GPUs; a manifest that has it requires the feature
    `GPU`.
    """

    driver: str  # version of NVIDIA's driver: "580.159.04"
    api: int  # version of its interface: 13000
    devices: tuple[GpuDevice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    opened: tuple[GpuDescriptor, ...] = ()
