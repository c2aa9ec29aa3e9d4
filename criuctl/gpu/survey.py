"""Ask the driver for the state of each process that holds a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..errors import TimedOut
from . import holdings
from .devices import DeviceUse
from .driver_process import NOT_INITIALISED, DriverProcess
from .holdings import Holdings
from .use import DeviceUser


def survey(
    driver: DriverProcess,
    users: Mapping[int, DeviceUser],
    parents: Mapping[int, int],
    stopped: Collection[int],
) -> Holdings:
    """Sort the processes that hold devices.

    Those that are `stopped` are not queried: they would not answer.
    """
    states = dict.fromkeys(users, holdings.SILENT)
    for pid in users:
        if pid in stopped:
            continue
        try:
            answer = driver.state(pid)
        except TimedOut:
            continue  # its control group is frozen
        if answer.ok:
            states[pid] = answer.number
        elif answer.result == NOT_INITIALISED:
            states[pid] = holdings.NO_CONTEXT
    return holdings.sort(users, states, parents)


def memory_of(pid: int, used: Iterable[DeviceUse]) -> int:
    """Return the bytes of all devices that a process uses, as far as NVML reports them."""
    return sum(device.processes.get(pid, 0) for device in used)
