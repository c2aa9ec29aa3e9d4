"""Check that this host has what a checkpoint's GPU processes need, and choose the devices.

`judge` is pure.  The library of NVIDIA's driver that a process has loaded comes back as it was, and
works with no other version of the kernel module: so the versions must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..checkpoint.gpu_records import GpuRecord
from ..gpu.devices import PAIRS_API, Device, NoPlace, pair
from ..report import Finding

_GIB = 1 << 30
_OTHER_HOST = "Restore it on a host with that driver and a device of that kind."


class HostGpus(Struct, frozen=True):
    """This host's driver and devices."""

    error: str = ""  # why there is no driver
    driver: str = ""  # version: "580.159.04"
    api: int = 0
    devices: tuple[Device, ...] = ()
    free: int = 0  # bytes on all devices


def judge(record: GpuRecord, host: HostGpus) -> tuple[list[Finding], dict[str, str]]:
    """Return what forbids the restore, and UUIDs of the checkpoint's devices -> those of this
    host's that replace them.
    """
    if not record.processes:
        return [], {}  # devices that were open without use: opened again, or not
    if host.error:
        text = (
            f"the tree used {_names(record)} with driver {record.driver}; this host has none: "
            f"{host.error}"
        )
        return [_error("gpu-driver", text, _OTHER_HOST)], {}
    if record.driver != host.driver:
        older = _version(host.driver) < _version(record.driver)
        text = (
            f"the tree runs with NVIDIA's driver {record.driver}, and this host has "
            f"{host.driver or 'an unknown one'}"
        )
        text += ", which is older" if older else ""
        return [
            _error("gpu-driver", text, f"Install driver {record.driver} here. {_OTHER_HOST}")
        ], {}
    old = [Device(d.uuid, d.name, d.memory, d.capability) for d in record.devices]
    try:
        pairs = pair(old, host.devices)
    except NoPlace as error:
        return [_error("gpu-device", str(error), _OTHER_HOST)], {}
    found = []
    if pairs and host.api < PAIRS_API:
        text = (
            f"this host has other devices than the checkpoint, and its driver {host.driver} "
            "cannot restore onto those"
        )
        found.append(_error("gpu-device", text, "Driver 580 or newer can."))
    if (needed := sum(p.memory for p in record.processes)) > host.free:
        text = (
            f"the tree needs {needed / _GIB:.1f} GiB on its devices, and {host.free / _GIB:.1f} "
            "GiB are free"
        )
        found.append(
            _error("gpu-memory", text, "`nvidia-smi` shows what uses them; end that first.")
        )
    return found, pairs


_PHASES = ("lock_ms", "checkpoint_ms", "restore_ms", "unlock_ms")


def gpu_facts(record: GpuRecord, timings: Mapping[str, float]) -> dict[str, Any]:
    """Return the GPUs for the results of dump, snapshot and restore; milliseconds of each phase."""
    return {
        "driver": record.driver,
        "processes": len(record.processes),
        "bytes": sum(p.memory for p in record.processes),
        "devices": [
            {"uuid": d.uuid, "name": d.name, "capability": d.capability} for d in record.devices
        ],
    } | {
        name.removeprefix("gpu_"): ms
        for name, ms in timings.items()
        if name.removeprefix("gpu_") in _PHASES
    }


def _names(record: GpuRecord) -> str:
    return ", ".join(sorted({d.name for d in record.devices})) or "an NVIDIA device"


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".") if part.isdigit()]


def _error(code: str, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint)
