"""Devices of a host and of a checkpoint, and which replaces which. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

PAIRS_API = 13000  # the first interface that restores onto other devices (driver 580)


class Device(Struct, frozen=True):
    """One device, as the driver describes it."""

    uuid: str  # "GPU-..."
    name: str
    memory: int  # bytes
    capability: str  # compute capability: "9.0"; programs are compiled for it


class DeviceUse(Struct, frozen=True):
    """The use of one device by processes."""

    uuid: str
    free: int  # bytes
    mig: bool  # partitioned into instances
    processes: Mapping[int, int] = field(default_factory=dict)  # PID -> bytes used
    mps: frozenset[int] = frozenset()  # PIDs that share it through MPS


class NoPlace(Exception):
    """A device of the checkpoint has no counterpart; the message says which, and why."""


def pair(old: Sequence[Device], here: Sequence[Device]) -> dict[str, str]:
    """Return UUIDs of a checkpoint's devices -> those of this host that replace them.

    Empty if they are the very same devices. A device replaces one of the same name and compute
    capability with no more memory: the code on the device was compiled for that. `NoPlace`
    otherwise. The driver wants every visible device of the checkpoint named, the unchanged ones
    too.
    """
    free = {device.uuid: device for device in here}
    pairs = {device.uuid: device.uuid for device in old if free.pop(device.uuid, None) is not None}
    if len(pairs) == len(old):
        return {}
    for device in old:
        if device.uuid in pairs:
            continue
        fits = next((other for other in free.values() if _replaces(device, other)), None)
        if fits is None:
            raise NoPlace(_why(device, here))
        pairs[device.uuid] = fits.uuid
        del free[fits.uuid]
    return pairs


def _replaces(old: Device, new: Device) -> bool:
    same = (old.name, old.capability) == (new.name, new.capability)
    return same and new.memory >= old.memory


def _why(device: Device, here: Sequence[Device]) -> str:
    wanted = f"{device.name} (compute capability {device.capability}, {device.uuid})"
    if not here:
        return f"the checkpoint needs a {wanted}, and this host has no NVIDIA device"
    there = ", ".join(f"{d.name} (compute capability {d.capability}, {d.uuid})" for d in here)
    return f"the checkpoint needs a {wanted}; this host has {there}"
